"""`launcher doctor`: is this machine well, will this expert train on it, what holds that run up."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from launcher.cli.finding import add_runs_dir, find_run
from launcher.errors import ExitCode, say

HELP = "look for what is wrong: with this machine, with an expert's plan on it, with a run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("expert", metavar="EXPERT", nargs="?", help="also: would this expert train here as planned?")
    parser.add_argument("--run", metavar="RUN", help="also: how is this run doing? Its id, or its directory")
    add_runs_dir(parser)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override a manifest value"
    )
    parser.add_argument(
        "--profile", choices=("auto", "full", "smoke"), default="auto", help="auto: full with a GPU, smoke without"
    )
    parser.add_argument("--quick", action="store_true", help="without the micro-test, which imports torch")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> ExitCode:
    from launcher.doctor.examine import Examination, examine
    from launcher.inputs import Request
    from launcher.processes import make_dependent_environment

    request = None
    if arguments.expert is not None:
        request = Request(expert=arguments.expert, overrides=tuple(arguments.overrides), profile=arguments.profile)
    paths = find_run(arguments.run, Path(arguments.runs_dir)) if arguments.run is not None else None
    report = examine(
        Examination(
            request=request,
            run=paths,
            runs_dir=Path(arguments.runs_dir) if paths is None else paths.root.parent,
            is_quick=arguments.quick,
            environment=make_dependent_environment(),
        ),
        _say,
    )
    if arguments.json:
        sys.stdout.write(report.model_dump_json(indent=2) + "\n")
    else:
        from launcher.cli.show_doctor import print_report

        print_report(report)
    return report.exit_code


def _say(text: str) -> None:
    """Only to somebody who waits for it."""
    if sys.stderr.isatty():
        say(text)
