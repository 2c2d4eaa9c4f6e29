"""`launcher ask`: one question to a trained expert, rendered as its training rendered it."""

from __future__ import annotations

import argparse
from pathlib import Path

from launcher.arguments import positive
from launcher.cli.finding import add_run_arguments, find_run

HELP = "ask a trained expert one question"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("question", metavar="QUESTION", help="what the expert's first field holds")
    parser.add_argument("--input", metavar="TEXT", help="what its second field holds: a schema, a context")
    parser.add_argument("--max-new-tokens", type=positive, metavar="N", help="longest answer (default 512)")
    parser.add_argument("--json", action="store_true", help="print the answer and how it came about as JSON")


def run(arguments: argparse.Namespace) -> int:
    from launcher.cli.torch_verbs import run_module

    paths = find_run(arguments.run, Path(arguments.runs_dir))
    given = [f"--run={paths.root}", f"--question={arguments.question}"]
    if arguments.input is not None:
        given.append(f"--input={arguments.input}")
    if arguments.max_new_tokens is not None:
        given.append(f"--max-new-tokens={arguments.max_new_tokens}")
    return run_module("launcher.training.ask", [*given, *(["--json"] if arguments.json else [])])
