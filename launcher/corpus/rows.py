"""A row of a dataset, or the reason why it cannot be used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None

# Row numbers stored per reason.
_SHOWN_PLACES = 20
# A reason may quote the row, so the number of reasons is limited.
_MAX_REASONS = 50
_OTHER_REASONS = "other reasons"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row with its fields."""

    number: int  # line of the file, or position in the dataset; from 1
    fields: Mapping[str, Json]


class RowFault(StrEnum):
    """Kinds of reasons why a row cannot be used, for code that has to distinguish them."""

    UNKNOWN_ROLE = "unknown role"
    TOOL_CALLS = "tool calls"  # in place of text
    NO_ANSWER = "no answer"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """A row that cannot be used."""

    number: int
    reason: str
    fault: RowFault = RowFault.OTHER


@dataclass(kw_only=True, slots=True)
class Rejections:
    """Counts of unusable rows by reason, with the first row numbers of each."""

    counts: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[int]] = field(default_factory=dict)
    faults: set[RowFault] = field(default_factory=set)

    def add(self, row: BadRow) -> None:
        """Count an unusable row under its reason."""
        reason = row.reason if row.reason in self.counts or len(self.counts) < _MAX_REASONS else _OTHER_REASONS
        self.faults.add(row.fault)
        self.counts[reason] = self.counts.get(reason, 0) + 1
        places = self.places.setdefault(reason, [])
        if len(places) < _SHOWN_PLACES:
            places.append(row.number)

    @property
    def total(self) -> int:
        """Number of unusable rows."""
        return sum(self.counts.values())


def format_json_error(error: ValueError) -> str:
    """Return the message of a JSON error without the position, because the row's number is reported with it."""
    if not isinstance(error, json.JSONDecodeError):
        return "a number with too many digits"
    message = error.msg.removesuffix(" at").removesuffix(" starting")
    return message + (" (a line break in a string is written \\n)" if "control character" in message else "")
