"""`launcher bench`: is A faster than B, what does each optimisation bring, and what memory does a training take."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Protocol

from launcher.cli import bench_ladder, bench_memory, bench_vary

HELP = "measure: A against B (--vary), every optimisation (ladder), memory against its prediction (memory)"
_VERB = "bench"


class _Part(Protocol):
    """What a module of a sub-verb has."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int: ...


_PARTS: dict[str, _Part] = {"vary": bench_vary, "ladder": bench_ladder}


def complete(words: Sequence[str]) -> list[str]:
    """`bench neo4j --vary …` is short for `bench vary neo4j --vary …`: an expert stands where a sub-verb could."""
    words = list(words)
    if words[:1] != [_VERB] or len(words) < 2 or words[1] in (*_PARTS, "memory", "-h", "--help"):
        return words
    return [_VERB, "vary", *words[1:]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "launcher bench [EXPERT --vary KEY=A,B … | ladder [EXPERT] … | memory …]"
    parts = parser.add_subparsers(prog="launcher bench", dest="part", metavar="PART", required=True)
    for name, module in _PARTS.items():
        part = parts.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(part)
        part.set_defaults(run_part=module.run)
    bench_memory.add_memory_parser(parts)


def run(arguments: argparse.Namespace) -> int:
    code: int = arguments.run_part(arguments)
    return code
