"""What can be typed, from the parsers: verbs, their flags, and what may stand behind each."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["nothing", "anything", "words", "file", "folder", "expert", "run"]

_KINDS: dict[str, Kind] = {
    "EXPERT": "expert",
    "RUN": "run",
    "FILE": "file",
    "ROWS": "file",
    "DIR": "folder",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Values:
    kind: Kind
    words: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    names: tuple[str, ...]
    told: str
    values: Values  # nothing: it stands alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Verb:
    name: str  # `train`, `bench ladder`
    told: str
    flags: tuple[Flag, ...]
    values: Values  # what stands there without a flag


def list_verbs(parser: argparse.ArgumentParser, path: str = "") -> tuple[Verb, ...]:
    return tuple(_walk(parser, path))


def _walk(parser: argparse.ArgumentParser, path: str) -> Iterator[Verb]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _walk(inner, f"{path} {name}".strip())
            return
    yield Verb(
        name=path,
        told=_first_words(parser.description or ""),
        flags=tuple(_make_flag(action) for action in parser._actions if _is_shown_flag(action)),
        values=_find_positional(parser._actions),
    )


def _is_shown_flag(action: argparse.Action) -> bool:
    return bool(action.option_strings) and action.help != argparse.SUPPRESS


def _make_flag(action: argparse.Action) -> Flag:
    alone = Values(kind="nothing")
    values = alone if action.nargs == 0 else _find_values(action)
    return Flag(names=tuple(action.option_strings), told=_first_words(action.help or ""), values=values)


def _find_positional(actions: Sequence[argparse.Action]) -> Values:
    named = [action for action in actions if not action.option_strings]
    return _find_values(named[0]) if named else Values(kind="nothing")


def _find_values(action: argparse.Action) -> Values:
    if action.choices is not None:
        return Values(kind="words", words=tuple(map(str, action.choices)))
    if action.dest == "gpu":
        from launcher.gpus import GPUS

        return Values(kind="words", words=tuple(GPUS))
    if action.dest == "name" and action.metavar == "EXPERT":  # of a new one, there is no name yet
        return Values(kind="anything")
    return Values(kind=_KINDS.get(str(action.metavar), "anything"))


def _first_words(text: str) -> str:
    """One line, as lists of completions show it."""
    line = " ".join(text.replace("%%", "%").split())
    return line if len(line) <= 70 else line[:67] + "..."
