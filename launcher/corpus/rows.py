"""One row of somebody's data, or the reason why it cannot be used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None

# How many places are kept for each reason: enough to look at, never a second copy of the data.
_SHOWN_PLACES = 20
# A reason may quote the row: without a limit a million bad rows would be a million reasons.
_MOST_REASONS = 50
_OTHER_REASONS = "other reasons"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    number: int  # line of the file, or position in the dataset; from 1
    fields: Mapping[str, Json]


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    number: int
    reason: str


@dataclass(kw_only=True, slots=True)
class Rejections:
    """Rows that cannot be used, counted by reason, with the first places of each."""

    counts: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[int]] = field(default_factory=dict)

    def add(self, row: BadRow) -> None:
        reason = row.reason if row.reason in self.counts or len(self.counts) < _MOST_REASONS else _OTHER_REASONS
        self.counts[reason] = self.counts.get(reason, 0) + 1
        places = self.places.setdefault(reason, [])
        if len(places) < _SHOWN_PLACES:
            places.append(row.number)

    @property
    def total(self) -> int:
        return sum(self.counts.values())
