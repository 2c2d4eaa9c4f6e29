"""Values at the boundaries of a condition: just inside, just outside, and look-alikes that a careless query accepts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import date, datetime, timedelta

from launcher.judges.sql.query_analysis import Column, ColumnKind, Condition, Value

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_DATETIME = re.compile(r"(\d{4}-\d{2}-\d{2})[ T](\d{2}:\d{2}:\d{2})")
_FAR = 7
_CLOSE = 1e-6
_PADDED_EVERY = 7
_MAX_LENGTH = 5_000
_WORDS = ("amber", "birch", "cedar", "dune", "elm", "fjord", "grove", "heath", "isle", "juniper", "kelp", "larch")


def make_boundary_values(condition: Condition, column: Column) -> list[Value]:
    """Return distinct values to test a condition with, the likeliest to satisfy it first."""
    values: list[Value] = []
    for value in condition.values:
        if condition.operator == "length":
            values += pad_texts([_WORDS[0]], [condition])
        elif condition.operator == "like":
            values += [*_inside_dates(str(value).strip("-%"), column.kind), *_around_pattern(str(value))]
        elif column.kind == "bool":
            values += [value, 1, 0]
        else:
            values += _around(value, column.kind)
        if condition.operator in ("<", "<=", ">", ">=") and isinstance(value, int | float):
            values += [value - _FAR, value + _FAR]  # two on either side, so that MIN and MAX differ
            values.append(-abs(value) - _FAR)  # for abs()
    if condition.operator == "between" and len(condition.values) == 2:
        values.insert(0, _between(condition.values[0], condition.values[1]))
    if condition.operator == "null":
        values += [None, make_plain_value(column.kind, 0, 0)]
    if condition.operator == "other":
        values = [*(edge for value in condition.values for edge in _inside_dates(value, column.kind)), *values]
    if column.nullable:
        values.append(None)
    stored = list(dict.fromkeys(value for value in values if _is_storable(value, column)))
    # Other text in a column of dates is NULL for strftime: right answers that use other functions would differ.
    dates = [value for value in stored if not isinstance(value, str) or _DATE.match(value)]
    return dates if column.kind in ("date", "datetime") and any(isinstance(value, str) for value in dates) else stored


def pad_texts(texts: Sequence[str], conditions: Sequence[Condition]) -> list[Value]:
    """Return texts padded to one less than, exactly, and one more than the lengths that `length` conditions name."""
    bounds = [value for condition in conditions if condition.operator == "length" for value in condition.values]
    lengths = [
        int(bound) + step
        for bound in bounds
        if isinstance(bound, int) and 0 < bound <= _MAX_LENGTH
        for step in (-1, 0, 1)
    ]
    pairs = [(text, length) for text in texts for length in lengths if length >= len(text)]
    return [padded for text, length in pairs for padded in (text.ljust(length, "x"), text.rjust(length, "x"))]


def _is_storable(value: Value, column: Column) -> bool:
    if isinstance(value, int):
        return abs(value) < 2**63
    return value is not None or column.nullable


def is_satisfied(condition: Condition, value: Value) -> bool:
    """Return whether a value satisfies a condition in SQLite; unknown counts as false."""
    if condition.operator == "null":
        return (value is None) != condition.negated
    if value is None:
        return False
    return _test(condition, value) != condition.negated


def _test(condition: Condition, value: Value) -> bool:
    if condition.operator == "like":
        return any(_matches_like(str(pattern), str(value)) for pattern in condition.values)
    if condition.operator in ("length", "other"):
        return value == condition.values[0]
    others = [_coerce(other, value) for other in condition.values]
    operator, first = condition.operator, others[0]
    if operator == "between":
        return len(others) == 2 and not _is_less(value, first) and not _is_less(others[1], value)
    if operator in ("=", "in"):
        return value in others
    if operator == "<>":
        return value != first
    if operator in ("<", ">="):
        return _is_less(value, first) == (operator == "<")
    return _is_less(first, value) == (operator == ">")


def _coerce(literal: Value, value: Value) -> Value:
    """Convert a literal as SQLite does: '5' compared with a numeric column is 5."""
    if isinstance(literal, str) and isinstance(value, int | float):
        try:
            return float(literal)
        except ValueError:
            return literal
    return literal


def _is_less(one: Value, other: Value) -> bool:
    """Return whether a value sorts before another one in SQLite, where numbers come before strings."""
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one < other
    if isinstance(one, str) and isinstance(other, str):
        return one < other
    return isinstance(one, int | float)


def _matches_like(pattern: str, text: str) -> bool:
    parts = (".*" if char == "%" else "." if char == "_" else re.escape(char) for char in pattern)
    return re.fullmatch("".join(parts), text, re.IGNORECASE | re.DOTALL) is not None


def _around(value: Value, kind: ColumnKind) -> list[Value]:
    if isinstance(value, str) and kind in ("int", "real"):
        value = _coerce(value, 0)
    if isinstance(value, int | float):
        if kind in ("text", "date", "datetime", "time"):
            return [value, *_inside_dates(str(value), kind)]
        near = [value - 1, value + 1]
        if kind == "real":  # 20.0001 in place of 20 is noticed too
            near += [value + step for step in (-0.25, 0.25, -_CLOSE, _CLOSE)]
        return [value, *near]
    if isinstance(value, str):
        return list(_around_time(value, kind) or _around_text(value))
    return [value]


def _around_time(text: str, kind: ColumnKind) -> list[str]:
    try:
        if _DATE.fullmatch(text):
            day = date.fromisoformat(text)
            days = [str(day + timedelta(days=step)) for step in (0, -1, 1, -365, 365)]
            return days if kind != "datetime" else [f"{days[0]} 00:00:00", f"{days[0]} 12:30:00", *days[:3]]
        if match := _DATETIME.fullmatch(text):
            moment = datetime.fromisoformat(f"{match[1]} {match[2]}")
            return [text, *(str(moment + timedelta(seconds=step)) for step in (-1, 1, -86_400, 86_400))]
    except (ValueError, OverflowError):
        pass
    return []


def _around_text(text: str) -> Iterator[str]:
    yield text
    yield text.swapcase()
    yield text + "x"
    yield text[:-1] or "y"
    yield text + " "
    yield " " + text
    yield "x" + text
    yield "other"


def _inside_dates(value: Value, kind: ColumnKind) -> list[Value]:
    """Return dates to test strftime('%Y', x) = '2020' and similar with: in that year, month or day, and others."""
    text = str(value)
    if kind in ("date", "datetime") and re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", text):
        return [f"{text}-01", f"{text}-28", *_inside_dates(text[:4], kind)]
    if kind not in ("date", "datetime", "text") or not re.fullmatch(r"\d{1,2}|\d{4}", text):
        return []
    number, tail = int(text), " 10:00:00" if kind == "datetime" else ""
    if number > 999:
        days = [f"{number}-01-01", f"{number}-12-31", f"{number - 1}-12-31", f"{number + 1}-01-01"]
    else:
        months = [f"2020-{number:02}-14", f"2021-{number:02}-01"] if 1 <= number <= 12 else []
        days = [*months, *([f"2020-05-{number:02}"] if 1 <= number <= 31 else []), "2020-11-29"]
    return [day + tail for day in days]


def _around_pattern(pattern: str) -> list[Value]:
    """Return strings that a LIKE pattern matches, and near misses."""
    core = pattern.replace("_", "q")
    bare = core.replace("%", "")
    texts = [core.replace("%", "v"), bare, core.replace("%", " vw "), bare.swapcase()]
    texts += ["v" + bare, bare + "v", "v" + bare + "v", bare[:-1], bare[1:], "other"]
    return list(dict.fromkeys(texts))


def _between(low: Value, high: Value) -> Value:
    if isinstance(low, int) and isinstance(high, int):
        return (low + high) // 2
    if isinstance(low, int | float) and isinstance(high, int | float):
        return (low + high) / 2
    try:
        first, last = date.fromisoformat(str(low)[:10]), date.fromisoformat(str(high)[:10])
    except ValueError:
        return low
    return str(first + (last - first) / 2)


def make_plain_value(kind: ColumnKind, column: int, number: int) -> Value:
    """Return the `number`-th value for a column. Values differ between columns, so that a wrong column is noticed."""
    if kind == "bool":
        return number % 2
    if kind == "int":
        return 10 * (column + 1) + number
    if kind == "real":
        return 10 * (column + 1) + number * 1.25
    if kind == "text":
        word = _WORDS[(number * 5 + column) % len(_WORDS)]
        text = f"{word} {column}" if number < len(_WORDS) else f"{word} {column}-{number}"
        return f" {text} " if number % _PADDED_EVERY == 3 else text  # for TRIM
    day = date(2012 + column % 7, 3, 4) + timedelta(days=37 * number)
    if kind == "date":
        return str(day)
    hour = f"{(number * 7 + column) % 24:02}:{(number * 13) % 60:02}:00"
    return hour if kind == "time" else f"{day} {hour}"


def split_by_match(conditions: Sequence[Condition], edges: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    """Split values into those that satisfy all conditions (or, if none does, the most conditions) and the others."""
    scores = [sum(is_satisfied(condition, value) for condition in conditions) for value in edges]
    best = max(scores, default=0)
    inside = [value for value, score in zip(edges, scores, strict=True) if score == best]
    return inside, [value for value, score in zip(edges, scores, strict=True) if score != best]
