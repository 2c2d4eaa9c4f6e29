"""`launcher ask`: ask a trained expert one question, with the prompt template of its training."""

from __future__ import annotations

import argparse
from pathlib import Path

from launcher.cli.run_lookup import add_run_arguments, find_run_or_newest
from launcher.cli.torch_subcommands import run_module
from launcher.core.errors import InputError
from launcher.request.flag_types import positive_int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `launcher ask`."""
    add_run_arguments(parser)
    parser.add_argument(
        "question",
        metavar="QUESTION",
        nargs="?",
        help="value of the expert's prompt field (default: that of a test row, whose answer is shown for comparison)",
    )
    parser.add_argument("--input", metavar="TEXT", help="value of its second field, such as a schema or a context")
    parser.add_argument(
        "--system", metavar="TEXT", help="system message (default: that of the training rows, if all have the same)"
    )
    parser.add_argument(
        "--field",
        action="append",
        default=[],
        metavar="NAME=TEXT",
        help="value of one field, for prompts with several fields; replaces QUESTION and --input. The value of a chat "
        "field is its messages as JSON",
    )
    parser.add_argument("--max-new-tokens", type=positive_int, metavar="N", help="longest answer (default 512)")
    parser.add_argument("--json", action="store_true", help="print the answer and its details as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Answer the question in a separate process, which imports torch."""
    paths = find_run_or_newest(arguments.run, Path(arguments.runs_dir))
    if arguments.question is None and not arguments.field and (arguments.input or arguments.system) is not None:
        raise InputError("--input and --system need a question", hint="launcher ask RUN 'How many?' --input TEXT")
    words = [f"--run={paths.root}"]
    words += [] if arguments.question is None else [f"--question={arguments.question}"]
    words += [f"--field={word}" for word in arguments.field]
    if arguments.input is not None:
        words.append(f"--input={arguments.input}")
    if arguments.system is not None:
        words.append(f"--system={arguments.system}")
    if arguments.max_new_tokens is not None:
        words.append(f"--max-new-tokens={arguments.max_new_tokens}")
    return run_module("launcher.training.inference.ask", [*words, *(["--json"] if arguments.json else [])])
