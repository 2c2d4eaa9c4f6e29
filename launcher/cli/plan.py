"""`launcher plan`: what would run, with which settings and why, does it fit, how long, what does it cost."""

from __future__ import annotations

import argparse
import sys

from launcher.core.errors import ExitCode
from launcher.request.arguments import add_request_arguments, make_request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a plan."""
    add_request_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(arguments: argparse.Namespace) -> ExitCode:
    """Print the plan of an expert."""
    from launcher.request.request import plan_request

    planned = plan_request(make_request(arguments))
    if arguments.json:
        sys.stdout.write(planned.plan.model_dump_json(indent=2) + "\n")
        return ExitCode.DONE
    from launcher.cli.print_plan import print_plan

    print_plan(planned.plan)
    return ExitCode.DONE
