"""Texts of a row: a field, one inside an object or a list (`meta.title`, `tags.0`), or a format of several fields."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from launcher.corpus.rows import Json, Row, RowFault
from launcher.manifest.dataset import FieldMapping
from launcher.manifest.suggest import find_closest

_FORMAT_PART = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|[{}]")
_MAX_NESTED = 3  # levels of objects whose fields are offered by name
_MAX_COLUMNS = 500
_CHAT_KEYS = {"role", "from"}  # of messages, which are read as a chat


class UnusableRowError(Exception):
    """A row cannot be used; the message is the reason for which it is rejected."""

    def __init__(self, reason: str, fault: RowFault = RowFault.OTHER) -> None:
        super().__init__(reason)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class RowFormat:
    """A format such as `{subject}: {body}`, filled with fields of a row."""

    source: str  # as in the manifest
    parts: tuple[str, ...]  # text, field, text, field, ..., text

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields, in order."""
        return self.parts[1::2]

    def fill(self, values: Mapping[str, str]) -> str:
        """Return the format with each field replaced by its value; empty if all values are empty."""
        if not any(values[name].strip() for name in self.columns):
            return ""
        return "".join(values[part] if index % 2 else part for index, part in enumerate(self.parts))

    def __str__(self) -> str:
        return self.source


RowText = str | RowFormat  # a field, or a format


def parse_row_text(source: str, columns: Iterable[str]) -> RowText:
    """Parse a field name, or a format with field names in braces; raises ValueError for invalid braces."""
    if source in columns or not {"{", "}"} & set(source):
        return source
    parts, text, position = [], "", 0
    for match in _FORMAT_PART.finditer(source):
        text += source[position : match.start()]
        position = match.end()
        if match[0] in ("{{", "}}"):
            text += match[0][0]
        elif match[1] is None:
            raise ValueError(f"a brace without a field: write {match[0] * 2} for a literal {match[0]}")
        else:
            parts += [text, match[1]]
            text = ""
    if not parts:
        raise ValueError("a format needs at least one {field}")
    return RowFormat(source, (*parts, text + source[position:]))


def list_columns(text: RowText) -> tuple[str, ...]:
    """Return the fields that a field name or format reads."""
    return text.columns if isinstance(text, RowFormat) else (text,)


def find_missing_fields(text: RowText, fields: Sequence[str]) -> Iterator[str]:
    """Yield an error for each field of a text that the rows do not have, with the closest existing name."""
    for name in list_columns(text):
        if name not in fields:
            meant = find_closest(name, fields)
            yield f"rows have no field {name!r}" + (f"; did you mean {meant!r}?" if meant else "")


def list_fields(rows: Sequence[Row]) -> list[str]:
    """Return the names of all fields; nested ones as `meta.title`, and the first entry of a list as `tags.0`."""
    names: dict[str, None] = {}
    for row in rows:
        if len(names) < _MAX_COLUMNS:
            names |= dict.fromkeys(row.fields)
    top = list(names)
    for row in rows:
        if len(names) < _MAX_COLUMNS:
            names |= dict.fromkeys(_list_nested(row.fields, "", _MAX_NESTED))
    return top + [name for name in names if name not in top]


def _list_nested(fields: Mapping[str, Json], prefix: str, levels: int) -> Iterator[str]:
    for name, value in fields.items():
        if prefix:
            yield f"{prefix}{name}"
        if isinstance(value, list) and value and not (isinstance(value[0], dict) and _CHAT_KEYS & set(value[0])):
            value = {"0": value[0]}
        if isinstance(value, dict) and levels:
            yield from _list_nested(value, f"{prefix}{name}.", levels - 1)


def look_up(fields: Mapping[str, Json], name: str) -> Json:
    """Return the value of a field; `a.b` is the field b of the object a, unless a field has that name.

    `a.0` is the first entry of the list a.
    """
    if name in fields or "." not in name:
        return fields.get(name)
    first, _, rest = name.partition(".")
    value = fields.get(first)
    if isinstance(value, list):
        value = {"0": value[0]} if value else None
    return look_up(value, rest) if isinstance(value, dict) else None


def read_text(fields: Mapping[str, Json], text: RowText) -> str:
    """Return the text of a field or format in a row; raises UnusableRowError if it is empty."""
    value = read_optional_text(fields, text)
    if not value.strip():
        is_there = any(name in fields or look_up(fields, name) is not None for name in list_columns(text))
        raise UnusableRowError(f"{text} is empty" if is_there else f"no field {text}")
    return value


def read_optional_text(fields: Mapping[str, Json], text: RowText | None) -> str:
    """Return the text of a field or format in a row; empty if the value is missing."""
    if text is None:
        return ""
    if isinstance(text, RowFormat):
        return text.fill({name: _format_value(look_up(fields, name), name) for name in text.columns})
    return _format_value(look_up(fields, text), text)


def _format_value(value: Json | Decimal, name: str) -> str:
    if is_missing(value):
        return ""
    if isinstance(value, Decimal):  # a number of Parquet, with all its digits
        return format(value, "f")
    # Non-text values as JSON: an answer may be an object or a number, a schema a list.
    if isinstance(value, dict | list | int | float):
        try:
            value = json.dumps(value, ensure_ascii=False, default=_format_other, allow_nan=False)
        except ValueError:
            raise UnusableRowError(f"{name} contains NaN or Infinity, which is not JSON") from None
    if not isinstance(value, str):
        raise UnusableRowError(f"{name} is of type {type(value).__name__}, not text")
    if not is_encodable(value):
        raise UnusableRowError("a value contains a lone surrogate")
    return value


def is_missing(value: object) -> bool:
    """Return whether a value is missing: None, or NaN, which tables write instead."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _format_other(value: object) -> str | float:
    """Convert a Parquet value that JSON has no type for, such as a date; raises UnusableRowError for bytes."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, bytes | bytearray | memoryview):
        raise UnusableRowError("a value contains bytes, which are not text")
    return str(value)


def is_encodable(text: str) -> bool:
    """Whether a text can be written as UTF-8; False if it has a lone surrogate."""
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError:
        return False
    return True


def format_question(mapping: FieldMapping) -> str:
    """Return example arguments of `launcher ask`: a question, or one --field flag for each field of the prompt."""
    texts = [parse_row_text(text, ()) for text in (mapping.instruction, mapping.input, mapping.system) if text]
    if not texts or len(list_columns(texts[0])) == 1:
        return "'your question'" + (f" --input {shlex.quote(f'its {mapping.input}')}" if mapping.input else "")
    names = dict.fromkeys(name for text in texts for name in list_columns(text))
    return " ".join(f"--field {shlex.quote(f'{name}=...')}" for name in names)
