"""A first look at somebody's rows: which fields they have, and what stands in them. Nothing is guessed here."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.corpus.conversations import RowReader, is_chat, role_of
from launcher.corpus.rows import BadRow, Json, Rejections, Row
from launcher.corpus.sources import FileSource
from launcher.new_expert.readable import check_readable, find_source, note_header
from launcher.units import MIB

MOST_ROWS = 20_000  # looked at: enough for every share that is told, and little enough to be held
MOST_BYTES = 512 * MIB  # of them, where rows are whole books
_MOST_DISTINCT = 1_000
_SHOWN_NAMES = 5


@dataclass(kw_only=True, slots=True)
class FieldSeen:
    """What one field holds, counted over the rows that were looked at."""

    name: str
    num_text: int = 0  # not empty
    num_objects: int = 0
    num_lists: int = 0
    num_numbers: int = 0  # true and false are counted here, too
    num_others: int = 0  # bytes and dates of Parquet, which play no role
    num_chats: int = 0  # lists of messages, whether they can be read or not
    num_answered: int = 0  # of them, those that can, with an answer
    num_asking: int = 0  # that end before the assistant speaks
    num_answering: int = 0  # that begin with the assistant
    unread: Rejections = field(default_factory=Rejections)  # why messages cannot be read
    object_keys: tuple[str, ...] = ()  # of the first object
    distinct: set[int] = field(default_factory=set)  # hashes of values; no more than a thousand are kept

    @property
    def num_filled(self) -> int:
        return self.num_text + self.num_objects + self.num_lists + self.num_numbers

    @property
    def kind(self) -> str:
        """What it mostly holds, in words."""
        counts = {
            "text": self.num_text,
            "chat messages": self.num_chats,
            "objects": self.num_objects,
            "lists": self.num_lists - self.num_chats,
            "numbers": self.num_numbers,
            "bytes or dates": self.num_others,
        }
        most = max(counts, key=lambda kind: counts[kind])
        return most if counts[most] else "nothing"

    def add(self, row: Row, value: object) -> None:
        if value is None or value == "" or (isinstance(value, str) and not value.strip()):
            return
        if isinstance(value, str):
            self.num_text += 1
        elif isinstance(value, dict):
            self.num_objects += 1
            self.object_keys = self.object_keys or tuple(value)
        elif isinstance(value, list):
            self.num_lists += 1
            if is_chat(value):
                self._add_chat(row, value)
        elif isinstance(value, int | float):
            self.num_numbers += 1
        else:
            self.num_others += 1
        if len(self.distinct) < _MOST_DISTINCT:
            self.distinct.add(hash(value if isinstance(value, str) else json.dumps(value, default=str)))

    def _add_chat(self, row: Row, turns: Sequence[Json]) -> None:
        """By the reader that training uses."""
        self.num_chats += 1
        self.num_asking += role_of(turns[-1]) in ("user", "tool")
        self.num_answering += role_of(turns[0]) == "assistant"
        content = RowReader(messages=self.name).read(row)
        if isinstance(content, BadRow):
            self.unread.add(content)
        else:
            self.num_answered += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    source: FileSource
    rows: tuple[Row, ...]
    bad_rows: tuple[BadRow, ...]
    fields: dict[str, FieldSeen]  # in the order in which rows have them
    is_whole: bool  # False: there are more rows than were looked at
    notes: tuple[str, ...] = ()  # what of the file is lost, or may be meant otherwise
    odd_names: tuple[str, ...] = ()  # of fields, which no manifest can name

    @property
    def num_rows(self) -> int:
        """That were looked at, usable or not."""
        return len(self.rows) + len(self.bad_rows)

    def share(self, count: int) -> str:
        first = "" if self.is_whole else "the first "
        return f"{count:,} of {first}{len(self.rows):,} rows"


def see_rows(path: Path, wanted: str | None = None) -> Seen:
    """Refuses what is no table of rows, with the line that says so."""
    source = find_source(path, wanted)
    rows: list[Row] = []
    bad: list[BadRow] = []
    held, is_whole = 0, True
    repeated: Counter[str] = Counter()
    for row in source.read(repeated):
        if len(rows) + len(bad) >= MOST_ROWS or held > MOST_BYTES:
            is_whole = False
            break
        if isinstance(row, BadRow):
            bad.append(row)
        else:
            held += sum(len(value) for value in row.fields.values() if isinstance(value, str))
            rows.append(row)
    check_readable(source, rows, bad)
    odd = tuple(dict.fromkeys(name for row in rows for name in row.fields if not is_text(name)))
    return Seen(
        source=source,
        rows=tuple(rows),
        bad_rows=tuple(bad),
        fields=count_fields(rows),
        is_whole=is_whole,
        notes=(*_note_repeated(repeated), *note_header(source, rows), *_note_odd(odd)),
        odd_names=odd,
    )


def count_fields(rows: Iterable[Row]) -> dict[str, FieldSeen]:
    """A name that is no text cannot be written into a manifest: such a field plays no role."""
    fields: dict[str, FieldSeen] = {}
    for row in rows:
        for name, value in row.fields.items():
            if name in fields or is_text(name):
                fields.setdefault(name, FieldSeen(name=name)).add(row, value)
    return fields


def is_text(text: str) -> bool:
    """Half a character (a lone surrogate) is none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _note_repeated(repeated: Counter[str]) -> list[str]:
    return [
        f"the key {name!r} stands twice in {count:,} objects: only its last value is read"
        for name, count in repeated.most_common(_SHOWN_NAMES)
    ]


def _note_odd(names: Sequence[str]) -> list[str]:
    shown = ", ".join(map(ascii, names[:_SHOWN_NAMES]))
    return [f"not looked at: {shown}, a name with half a character in it (a lone surrogate)"] if names else []


def spread(rows: Sequence[Row], most: int) -> tuple[Row, ...]:
    """At most so many, evenly over all of them: files are often sorted."""
    if len(rows) <= most:
        return tuple(rows)
    return tuple(rows[position * len(rows) // most] for position in range(most))
