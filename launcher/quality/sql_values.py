"""Values at the edges of a condition: just inside, just outside, and look-alikes that a careless condition takes in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import date, datetime, timedelta

from launcher.quality.sql_facts import Column, Condition, Kind, Value

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_DATETIME = re.compile(r"(\d{4}-\d{2}-\d{2})[ T](\d{2}:\d{2}:\d{2})")
_FAR = 7
_WORDS = ("amber", "birch", "cedar", "dune", "elm", "fjord", "grove", "heath", "isle", "juniper", "kelp", "larch")


def make_edges(condition: Condition, column: Column) -> list[Value]:
    """Values to try a condition with, deduplicated, the likeliest to meet it first."""
    found: list[Value] = []
    for value in condition.values:
        if condition.operator == "like":
            found += _around_pattern(str(value))
        elif column.kind == "bool":
            found += [value, 1, 0]
        else:
            found += _around(value, column.kind)
        if condition.operator in ("<", "<=", ">", ">=") and isinstance(value, int | float):
            found += [value - _FAR, value + _FAR]  # two on either side: a minimum that is no maximum
    if condition.operator == "between" and len(condition.values) == 2:
        found.insert(0, _between(condition.values[0], condition.values[1]))
    if condition.operator == "null":
        found += [None, _plain(column.kind)]
    if condition.operator == "other":
        found = [*(edge for value in condition.values for edge in _inside_dates(value, column.kind)), *found]
    if column.nullable:
        found.append(None)
    return list(dict.fromkeys(value for value in found if _is_storable(value, column)))


def _is_storable(value: Value, column: Column) -> bool:
    if isinstance(value, int):
        return abs(value) < 2**63
    return value is not None or column.nullable


def holds(condition: Condition, value: Value) -> bool:
    """As SQLite would say; what it does not know it calls false."""
    if condition.operator == "null":
        return (value is None) != condition.negated
    if value is None:
        return False
    return _test(condition, value) != condition.negated


def _test(condition: Condition, value: Value) -> bool:
    if condition.operator == "like":
        return any(_like(str(pattern), str(value)) for pattern in condition.values)
    if condition.operator == "other":
        return value == condition.values[0]
    others = [_alike(other, value) for other in condition.values]
    operator, first = condition.operator, others[0]
    if operator == "between":
        return len(others) == 2 and not _less(value, first) and not _less(others[1], value)
    if operator in ("=", "in"):
        return value in others
    if operator == "<>":
        return value != first
    if operator in ("<", ">="):
        return _less(value, first) == (operator == "<")
    return _less(first, value) == (operator == ">")


def _alike(literal: Value, value: Value) -> Value:
    """'5' compared with a column of numbers is 5."""
    if isinstance(literal, str) and isinstance(value, int | float):
        try:
            return float(literal)
        except ValueError:
            return literal
    return literal


def _less(one: Value, other: Value) -> bool:
    """Numbers stand before texts."""
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one < other
    if isinstance(one, str) and isinstance(other, str):
        return one < other
    return isinstance(one, int | float)


def _like(pattern: str, text: str) -> bool:
    parts = (".*" if char == "%" else "." if char == "_" else re.escape(char) for char in pattern)
    return re.fullmatch("".join(parts), text, re.IGNORECASE | re.DOTALL) is not None


def _around(value: Value, kind: Kind) -> list[Value]:
    if isinstance(value, str) and kind in ("int", "real"):
        value = _alike(value, 0)
    if isinstance(value, int | float):
        if kind in ("text", "date", "datetime", "time"):
            return [value, *_inside_dates(str(value), kind)]
        near = [value - 1, value + 1] + ([value - 0.25, value + 0.25] if kind == "real" else [])
        return [value, *near]
    if isinstance(value, str):
        return list(_around_moment(value, kind) or _around_text(value))
    return [value]


def _around_moment(text: str, kind: Kind) -> list[str]:
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
    yield "x" + text
    yield "other"


def _inside_dates(value: Value, kind: Kind) -> list[Value]:
    """strftime('%Y', x) = '2020' and the like: days of that year, that month or that day."""
    if kind not in ("date", "datetime", "text") or not re.fullmatch(r"\d{1,2}|\d{4}", str(value)):
        return []
    number, tail = int(str(value)), " 10:00:00" if kind == "datetime" else ""
    if number > 999:
        days = [f"{number}-01-01", f"{number}-12-31", f"{number - 1}-12-31", f"{number + 1}-01-01"]
    else:
        months = [f"2020-{number:02}-14", f"2021-{number:02}-01"] if 1 <= number <= 12 else []
        days = [*months, *([f"2020-05-{number:02}"] if 1 <= number <= 31 else []), "2020-11-29"]
    return [day + tail for day in days]


def _around_pattern(pattern: str) -> list[Value]:
    """What it matches, with and without more at either end, and what it only nearly matches."""
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


def _plain(kind: Kind) -> Value:
    return make_plain(kind, 0, 0)


def make_plain(kind: Kind, column: int, number: int) -> Value:
    """The value of that number of a column without a condition. Columns differ, so that a wrong one shows."""
    if kind == "bool":
        return number % 2
    if kind == "int":
        return 10 * (column + 1) + number
    if kind == "real":
        return 10 * (column + 1) + number * 1.25
    if kind == "text":
        word = _WORDS[(number * 5 + column) % len(_WORDS)]
        return f"{word} {column}" if number < len(_WORDS) else f"{word} {column}-{number}"
    day = date(2012 + column % 7, 3, 4) + timedelta(days=37 * number)
    if kind == "date":
        return str(day)
    hour = f"{(number * 7 + column) % 24:02}:{(number * 13) % 60:02}:00"
    return hour if kind == "time" else f"{day} {hour}"


def split(conditions: Sequence[Condition], edges: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    """Those that meet all conditions of a column (or, where none does, the most), and the others."""
    scores = [sum(holds(condition, value) for condition in conditions) for value in edges]
    best = max(scores, default=0)
    inside = [value for value, score in zip(edges, scores, strict=True) if score == best]
    return inside, [value for value, score in zip(edges, scores, strict=True) if score != best]
