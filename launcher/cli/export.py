"""`launcher export`: merge adapter and base model into one that plain transformers loads."""

from __future__ import annotations

import argparse
from pathlib import Path

from launcher.cli.run_lookup import add_run_arguments, find_run
from launcher.cli.torch_subcommands import run_module


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run and the output."""
    add_run_arguments(parser)
    parser.add_argument("--out", metavar="DIR", help="output folder (default: merged/ in the run directory)")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), help="dtype of the weights (default: the base model's)"
    )
    parser.add_argument("--json", action="store_true", help="print the output folder and what was checked as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Merge in a process with torch."""
    paths = find_run(arguments.run, Path(arguments.runs_dir))
    out = [f"--out={arguments.out}"] if arguments.out is not None else []
    dtype = [f"--dtype={arguments.dtype}"] if arguments.dtype is not None else []
    return run_module(
        "launcher.training.export.export",
        [f"--run={paths.root}", *out, *dtype, *(["--json"] if arguments.json else [])],
    )
