"""`launcher train`: plan, prepare the data, write the run directory, start it and return how it ended."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.arguments import (
    add_node_arguments,
    add_request_arguments,
    add_resume_arguments,
    add_slurm_arguments,
    make_request,
)
from launcher.cli.finding import add_runs_dir
from launcher.cli.many_nodes import make_node, make_slurm_options
from launcher.errors import ExitCode, InputError, Problem, say

if TYPE_CHECKING:
    from launcher.corpus.prepare import Prepared
    from launcher.inputs import PlannedRun
    from launcher.nodes import Node
    from launcher.paths import RunPaths
    from launcher.record import Outcome
    from launcher.relay import Console
    from launcher.render import SlurmOptions

HELP = "train an expert: plan, prepare its data, write its run directory, run it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_request_arguments(parser)
    add_node_arguments(parser)
    add_slurm_arguments(parser)
    add_resume_arguments(parser)
    run = parser.add_argument_group("the run")
    run.add_argument("--dry-run", action="store_true", help="write runs/<id>/, prepare and start nothing")
    run.add_argument("--run-id", metavar="ID", help="name of the run directory (default: expert, time, hardware)")
    add_runs_dir(run)
    run.add_argument("--json", action="store_true", help="print the run directory and how the run ended as JSON")


def run(arguments: argparse.Namespace) -> int:
    from launcher.inputs import plan_request

    node, slurm = make_node(arguments), make_slurm_options(arguments)
    if arguments.resume is not None:
        from launcher.cli.resume import resume

        return resume(arguments, node, slurm)
    check_resume_flags(arguments)
    planned = plan_request(make_request(arguments))
    if arguments.dry_run or arguments.no_submit:
        return _write_only(arguments, planned, node, slurm)
    if slurm is not None:
        return _submit(arguments, planned, slurm)
    return _train(arguments, planned, node)


def _write_only(
    arguments: argparse.Namespace, planned: PlannedRun, node: Node | None, slurm: SlurmOptions | None
) -> int:
    from launcher.cli.show_plan import print_plan
    from launcher.launch import write_run

    rendezvous = None if node is None else node.rendezvous
    paths = write_run(planned, Path(arguments.runs_dir), arguments.run_id, rendezvous=rendezvous, slurm=slurm)
    if arguments.json:
        _print_json(paths, None)
        return ExitCode.DONE
    print_plan(planned.plan)
    print(f"\nWritten to {paths.root}/: {', '.join(_list_files(paths))}")
    if slurm is not None:
        print(f"Nothing was submitted. In the project root on the cluster: sbatch {paths.slurm}")
    else:
        print(f"Dry run: nothing was started. What would be: {paths.command}")
    return ExitCode.DONE


def _submit(arguments: argparse.Namespace, planned: PlannedRun, slurm: SlurmOptions) -> int:
    """Data is prepared here: nodes with GPUs have better things to do, and often no way to the hub."""
    from launcher.launch import check_packages, write_run
    from launcher.runs import check_run_id
    from launcher.submit import check_sbatch

    check_sbatch()
    check_packages(planned.plan)
    check_run_id(Path(arguments.runs_dir), arguments.run_id)
    show(arguments, planned)
    prepare(planned)
    paths = write_run(planned, Path(arguments.runs_dir), arguments.run_id, slurm=slurm)
    return submit(arguments, paths)


def submit(arguments: argparse.Namespace, paths: RunPaths) -> int:
    from launcher.submit import submit_job

    job = submit_job(paths)
    if arguments.json:
        _print_json(paths, None, {"job_id": job})
    else:
        print(f"submitted job {job}; its log: {paths.logs}/slurm-{job}.log\nrun directory: {paths.root}")
    return ExitCode.DONE


def _train(arguments: argparse.Namespace, planned: PlannedRun, node: Node | None) -> int:
    from launcher.attempts import StartOptions, run_to_end
    from launcher.launch import check_packages, check_startable

    check_startable(planned.plan, node)
    check_packages(planned.plan)
    _check_directory(arguments, planned, node)
    show(arguments, planned)
    prepare(planned)
    paths = _make_directory(arguments, planned, node)
    nodes = () if node is None else (node,)
    options = StartOptions(nodes=nodes, max_restarts=arguments.max_restarts or 0)
    outcome = run_to_end(planned, paths, make_console(arguments.json), options)
    return finish(arguments, paths, outcome)


def finish(arguments: argparse.Namespace, paths: RunPaths, outcome: Outcome) -> int:
    if arguments.json:
        _print_json(paths, outcome)
    else:
        print(f"run directory: {paths.root}")
    return ExitCode.RUN_FAILED if outcome.exit_code is None else outcome.exit_code


def check_resume_flags(arguments: argparse.Namespace) -> None:
    given = {"--allow-drift": arguments.allow_drift, "--verify": arguments.verify}
    problems = tuple(Problem(where=flag, what="it is for --resume") for flag, value in given.items() if value)
    if problems:
        raise InputError("these flags say nothing without --resume", problems)


def _check_directory(arguments: argparse.Namespace, planned: PlannedRun, node: Node | None) -> None:
    from launcher.nodes import find_run_to_join
    from launcher.runs import check_run_id

    if node is None:
        check_run_id(Path(arguments.runs_dir), arguments.run_id)
    else:
        find_run_to_join(Path(arguments.runs_dir), arguments.run_id, planned.plan, node)


def _make_directory(arguments: argparse.Namespace, planned: PlannedRun, node: Node | None) -> RunPaths:
    from launcher.launch import join_run, write_run
    from launcher.nodes import wait_for_head

    runs_dir = Path(arguments.runs_dir)
    if node is None:
        return write_run(planned, runs_dir, arguments.run_id)
    if node.rank > 0:
        say(f"waiting for node 0 at {node.address}")
        wait_for_head(node)
    return join_run(planned, runs_dir, arguments.run_id, node)


def show(arguments: argparse.Namespace, planned: PlannedRun) -> None:
    from launcher.cli.show_plan import print_plan

    if not arguments.json:
        print_plan(planned.plan)
        print()


def prepare(planned: PlannedRun) -> Prepared:
    from launcher.cli.progress import RowProgress
    from launcher.preparing import prepare_planned

    with RowProgress(planned.plan.data.num_rows) as progress:
        prepared = prepare_planned(planned, progress.report, progress.advance)
    state = "found" if prepared.was_there else f"made in {prepared.seconds:.1f} s"
    print(f"prepared data: {prepared.store.folder} ({state})", file=sys.stderr)
    return prepared


def make_console(is_json: bool) -> Console:
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


def _print_json(paths: RunPaths, outcome: Outcome | None, more: Mapping[str, object] | None = None) -> None:
    result: dict[str, object] = {
        "run_id": paths.run_id,
        "path": str(paths.root),
        "files": _list_files(paths),
        "started": outcome is not None,
        **(more or {}),
    }
    if outcome is not None:
        result |= {"exit_code": outcome.exit_code, "outcome": outcome.model_dump(mode="json")}
    json.dump(result, sys.stdout, indent=2)
    print()


def _list_files(paths: RunPaths) -> list[str]:
    return sorted(file.name for file in paths.root.iterdir())
