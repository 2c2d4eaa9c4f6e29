"""The commands of the docs, and how they are classified."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex

from launcher.cli import bench
from launcher.cli.main import make_parser
from tests.docs.markdown import PAGES, Piece, list_commands, list_spans
from tests.docs.pinned import RECORDS

_GENERATED = {"CLI.md", "EXPERT_FORMAT.md"}
_PLACEHOLDER = re.compile(r"^(?:[A-Z]{1,9}…?|…|\.\.\.)$")
# Commands that take a second and need no torch.
_QUICK_VERBS = {"validate", "plan", "schema", "data", "compare", "report", "new"}
_QUICK_FLAGS = {"--dry-run", "--list", "--offline"}


def all_commands() -> list[Piece]:
    """Return the commands of blocks, and complete commands inside sentences (all arguments, no placeholder)."""
    found = {piece.text: piece for page in PAGES for piece in list_commands(page)}
    for page in PAGES:
        for piece in list_spans(page) if page.name not in _GENERATED | RECORDS else ():
            if is_complete(piece.text):
                found.setdefault(piece.text, piece)
    return list(found.values())


def is_complete(text: str) -> bool:
    words = split(text)
    if len(words) < 3 or any(map(_PLACEHOLDER.match, words)):
        return False
    if words[0] == "make":
        return True
    return words[0] == "launcher" and bool(find_parser(words[1:])[1]) and parses(words[1:])


def split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def parses(words: list[str]) -> bool:
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        make_parser().parse_args(bench.complete(words))
        return True
    return False


def is_quick(text: str) -> bool:
    words = split(text)
    if words[:2] == ["launcher", "export"]:  # loads a model, also with --dry-run
        return False
    return words[0] == "launcher" and (words[1] in _QUICK_VERBS or bool(_QUICK_FLAGS & set(words)))


def find_parser(words: list[str]) -> tuple[argparse.ArgumentParser, list[str]]:
    """Return the parser of the (sub-)command and the remaining words."""
    parser, words = make_parser(), bench.complete(words)
    while words and words[0] in (verbs := find_verbs(parser)):
        parser, words = verbs[words[0]], words[1:]
    return parser, words


def find_verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}
