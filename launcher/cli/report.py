"""`launcher report`: print a run's report, rendered from its directory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from launcher.cli.run_lookup import add_run_arguments, find_run_or_newest
from launcher.cli.tables import print_json
from launcher.core.errors import ExitCode
from launcher.core.log import get_logger
from launcher.core.run_paths import RunPaths

log = get_logger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `launcher report`."""
    add_run_arguments(parser)
    parser.add_argument("--write", action="store_true", help="also write it to report.md of the run")
    parser.add_argument("--json", action="store_true", help="print status, exit code and report as JSON")


def run(arguments: argparse.Namespace) -> ExitCode:
    """Print the report of a run."""
    from launcher.analysis.report import make_report
    from launcher.core.run_paths import write_text_atomically

    paths = find_run_or_newest(arguments.run, Path(arguments.runs_dir))
    text = make_report(paths)
    if arguments.write:
        write_text_atomically(paths.report, text)
        log.info(f"wrote {paths.report}")
    if arguments.json:
        _print_json(paths, text)
    else:
        sys.stdout.write(text)
    return ExitCode.DONE


def _print_json(paths: RunPaths, text: str) -> None:
    # Metric values are in `launcher compare RUN --json`.
    from launcher.runs.record import load_outcome

    outcome = load_outcome(paths.outcome)
    summary = {
        "run_id": paths.run_id,
        "path": str(paths.root),
        "status": "not started" if outcome is None else outcome.status,
        "exit_code": None if outcome is None else outcome.exit_code,
        "markdown": text,
    }
    print_json(summary)
