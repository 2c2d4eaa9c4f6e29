"""`launcher train`: plan, write the run directory, start it. This version ends after the files are written."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from launcher.cli.arguments import add_request_arguments, make_request
from launcher.errors import ExitCode

HELP = "plan an expert's training and write its run directory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_request_arguments(parser)
    run = parser.add_argument_group("the run")
    run.add_argument("--dry-run", action="store_true", help="write runs/<id>/ and start nothing")
    run.add_argument("--run-id", metavar="ID", help="name of the run directory (default: expert, time, hardware)")
    run.add_argument("--runs-dir", metavar="DIR", default="runs", help="where run directories lie (default: runs)")
    run.add_argument("--json", action="store_true", help="print the run directory and its files as JSON")


def run(arguments: argparse.Namespace) -> ExitCode:
    from launcher.inputs import plan_request
    from launcher.launch import write_run

    planned = plan_request(make_request(arguments))
    paths = write_run(planned, Path(arguments.runs_dir), arguments.run_id)
    files = sorted(file.name for file in paths.root.iterdir())
    if arguments.json:
        json.dump(
            {"run_id": paths.run_id, "path": str(paths.root), "files": files, "started": False}, sys.stdout, indent=2
        )
        print()
        return ExitCode.DONE
    from launcher.cli.show_plan import print_plan

    print_plan(planned.plan)
    print(f"\nWritten to {paths.root}/: {', '.join(files)}")
    if arguments.dry_run:
        print(f"Dry run: nothing was started. What would be: {paths.command}")
    else:
        print("Nothing was started: this version of the launcher ends here, training itself is not part of it yet.")
    return ExitCode.DONE
