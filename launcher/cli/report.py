"""`launcher report`: a run's report, made from what its directory holds now."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from launcher.cli.finding import add_run_arguments, find_run
from launcher.errors import ExitCode

HELP = "print a run's report: what ran, why so, speed, memory, quality, how to reproduce it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--write", action="store_true", help="into its report.md, too")


def run(arguments: argparse.Namespace) -> ExitCode:
    from launcher.paths import write_text_atomically
    from launcher.report import make_report

    paths = find_run(arguments.run, Path(arguments.runs_dir))
    text = make_report(paths)
    if arguments.write:
        write_text_atomically(paths.report, text)
        print(f"written: {paths.report}", file=sys.stderr)
    sys.stdout.write(text)
    return ExitCode.DONE
