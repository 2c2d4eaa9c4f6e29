"""`launcher bench`: compare settings, measure what each optimization contributes, or time the attention backends."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Protocol

from launcher.cli import bench_ablation, bench_attention, bench_vary
from launcher.core.errors import InputError
from launcher.request.arguments import add_trust_argument

_VERB = "bench"


class _Subcommand(Protocol):
    """Interface of a module that implements a subcommand of `launcher bench`."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int: ...


_SUBCOMMANDS: dict[str, _Subcommand] = {
    "vary": bench_vary,
    "ablation": bench_ablation,
    "attention": bench_attention,
}
# Subcommands of launcher 0.1.
_RENAMED = {"ladder": "launcher bench ablation", "memory": "python -m benchmarks.memory_grid, in a checkout"}


def complete(words: Sequence[str]) -> list[str]:
    """Insert the default subcommand: `bench neo4j --vary …` is short for `bench vary neo4j --vary …`."""
    words = list(words)
    if words[:1] != [_VERB] or len(words) < 2 or words[1] in (*_SUBCOMMANDS, "-h", "--help"):
        return words
    if words[1] in _RENAMED and not any(word.startswith("--vary") for word in words):
        raise InputError(f"launcher bench {words[1]}: no such command", hint=f"write {_RENAMED[words[1]]}")
    return [_VERB, "vary", *words[1:]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `launcher bench`."""
    parser.usage = "launcher bench [EXPERT --vary KEY=A,B … | ablation [EXPERT] … | attention [EXPERT] …]"
    parts = parser.add_subparsers(prog="launcher bench", dest="part", metavar="COMMAND", required=True)
    for name, module in _SUBCOMMANDS.items():
        part = parts.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(part)
        add_trust_argument(part)
        part.set_defaults(run_part=module.run)


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen subcommand."""
    code: int = arguments.run_part(arguments)
    return code
