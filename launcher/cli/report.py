"""`launcher report`: a run's report, made from what its directory holds now."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from launcher.cli.finding import add_run_arguments, find_run
from launcher.errors import ExitCode
from launcher.paths import RunPaths

HELP = "print a run's report: what ran, why so, speed, memory, quality, how to reproduce it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--write", action="store_true", help="into its report.md, too")
    parser.add_argument("--json", action="store_true", help="print how it ended, and the report, as JSON")


def run(arguments: argparse.Namespace) -> ExitCode:
    from launcher.paths import write_text_atomically
    from launcher.report import make_report

    paths = find_run(arguments.run, Path(arguments.runs_dir))
    text = make_report(paths)
    if arguments.write:
        write_text_atomically(paths.report, text)
        print(f"written: {paths.report}", file=sys.stderr)
    if arguments.json:
        _print_json(paths, text)
    else:
        sys.stdout.write(text)
    return ExitCode.DONE


def _print_json(paths: RunPaths, text: str) -> None:
    """Figures are in `launcher compare RUN --json`; here is what a script sends on."""
    from launcher.record import load_outcome

    outcome = load_outcome(paths.outcome)
    told = {
        "run_id": paths.run_id,
        "path": str(paths.root),
        "status": "not started" if outcome is None else outcome.status,
        "exit_code": None if outcome is None else outcome.exit_code,
        "markdown": text,
    }
    json.dump(told, sys.stdout, indent=2, ensure_ascii=False)
    print()
