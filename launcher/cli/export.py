"""`launcher export`: adapter and base, merged into one model that plain transformers loads."""

from __future__ import annotations

import argparse
from pathlib import Path

from launcher.cli.finding import add_run_arguments, find_run

HELP = "merge a run's adapter into its base, check that both answer alike, write one model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--out", metavar="DIR", help="where to write it (default: merged/ in the run directory)")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="of the weights (default: the base's own)")
    parser.add_argument("--json", action="store_true", help="print where it lies, and what was checked, as JSON")


def run(arguments: argparse.Namespace) -> int:
    from launcher.cli.torch_verbs import run_module

    paths = find_run(arguments.run, Path(arguments.runs_dir))
    out = [f"--out={arguments.out}"] if arguments.out is not None else []
    dtype = [f"--dtype={arguments.dtype}"] if arguments.dtype is not None else []
    return run_module(
        "launcher.training.export", [f"--run={paths.root}", *out, *dtype, *(["--json"] if arguments.json else [])]
    )
