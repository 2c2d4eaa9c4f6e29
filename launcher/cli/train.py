"""`launcher train`: plan, prepare the data, write the run directory, start it and return how it ended."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.arguments import add_request_arguments, make_request
from launcher.cli.output import reader_may_leave
from launcher.errors import ExitCode

if TYPE_CHECKING:
    from launcher.inputs import PlannedRun
    from launcher.paths import RunPaths
    from launcher.record import Outcome
    from launcher.relay import Console

HELP = "train an expert: plan, prepare its data, write its run directory, run it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_request_arguments(parser)
    run = parser.add_argument_group("the run")
    run.add_argument("--dry-run", action="store_true", help="write runs/<id>/, prepare and start nothing")
    run.add_argument("--run-id", metavar="ID", help="name of the run directory (default: expert, time, hardware)")
    run.add_argument("--runs-dir", metavar="DIR", default="runs", help="where run directories lie (default: runs)")
    run.add_argument("--json", action="store_true", help="print the run directory and how the run ended as JSON")


def run(arguments: argparse.Namespace) -> int:
    from launcher.inputs import plan_request

    planned = plan_request(make_request(arguments))
    return _write_only(arguments, planned) if arguments.dry_run else _train(arguments, planned)


def _write_only(arguments: argparse.Namespace, planned: PlannedRun) -> int:
    from launcher.cli.show_plan import print_plan
    from launcher.launch import write_run

    paths = write_run(planned, Path(arguments.runs_dir), arguments.run_id)
    if arguments.json:
        _print_json(paths, None)
        return ExitCode.DONE
    print_plan(planned.plan)
    print(f"\nWritten to {paths.root}/: {', '.join(_list_files(paths))}")
    print(f"Dry run: nothing was started. What would be: {paths.command}")
    return ExitCode.DONE


def _train(arguments: argparse.Namespace, planned: PlannedRun) -> int:
    from launcher.cli.show_plan import print_plan
    from launcher.launch import check_packages, check_startable, start_run, write_run
    from launcher.runs import check_run_id

    check_startable(planned.plan)
    check_packages(planned.plan)
    check_run_id(Path(arguments.runs_dir), arguments.run_id)
    if not arguments.json:
        with reader_may_leave():
            print_plan(planned.plan)
            print()
    _prepare(planned)
    paths = write_run(planned, Path(arguments.runs_dir), arguments.run_id)
    outcome = start_run(planned.plan, paths, _make_console(arguments.json))
    with reader_may_leave():
        if arguments.json:
            _print_json(paths, outcome)
        else:
            print(f"run directory: {paths.root}")
    return ExitCode.RUN_FAILED if outcome.exit_code is None else outcome.exit_code


def _prepare(planned: PlannedRun) -> None:
    from launcher.cli.progress import RowProgress
    from launcher.preparing import prepare_planned

    with RowProgress(planned.plan.data.num_rows) as progress:
        prepared = prepare_planned(planned, progress.report, progress.advance)
    state = "found" if prepared.was_there else f"made in {prepared.seconds:.1f} s"
    print(f"prepared data: {prepared.store.folder} ({state})", file=sys.stderr)


def _make_console(is_json: bool) -> Console:
    from launcher.relay import Console

    sys.stdout.flush()
    sys.stderr.flush()
    out, error = sys.stdout.buffer, sys.stderr.buffer
    return Console(stdout=error if is_json else out, stderr=error, columns=_count_columns())


def _count_columns() -> int | None:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:  # not a terminal
        return None


def _print_json(paths: RunPaths, outcome: Outcome | None) -> None:
    result: dict[str, object] = {
        "run_id": paths.run_id,
        "path": str(paths.root),
        "files": _list_files(paths),
        "started": outcome is not None,
    }
    if outcome is not None:
        result |= {"exit_code": outcome.exit_code, "outcome": outcome.model_dump(mode="json")}
    json.dump(result, sys.stdout, indent=2)
    print()


def _list_files(paths: RunPaths) -> list[str]:
    return sorted(file.name for file in paths.root.iterdir())
