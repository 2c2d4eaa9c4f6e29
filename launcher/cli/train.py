"""`launcher train`: plan, prepare the data, write the run directory, start it and return how it ended."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.node_flags import check_unset, make_job_options, make_node
from launcher.cli.plan import print_plan
from launcher.cli.prepare import describe_rejected
from launcher.cli.run_lookup import add_runs_dir
from launcher.cli.tables import print_json
from launcher.core.errors import ExitCode, InputError
from launcher.core.file_lock import check_unlocked
from launcher.core.log import get_logger
from launcher.core.progress import Progress
from launcher.core.run_paths import RunPaths
from launcher.judges.registry import describe_missing_judge
from launcher.launch.console import Console
from launcher.launch.nodes import Node, find_differences, find_run_to_join, wait_for_head
from launcher.launch.restart import StartOptions, run_with_restarts
from launcher.launch.resume import ResumedRun, check_unchanged, plan_resumed, rewrite_run
from launcher.launch.start import check_packages, check_startable
from launcher.launch.submit import check_submit, describe_log, submit_job
from launcher.launch.write_run import join_run, write_run
from launcher.manifest import list_experts
from launcher.manifest.trust import check_trust, is_trust_granted, list_code
from launcher.plan import load_plan
from launcher.render import JobOptions
from launcher.render.targets import make_submit_command
from launcher.request.arguments import (
    add_node_arguments,
    add_request_arguments,
    add_resume_arguments,
    add_target_arguments,
    make_request,
)
from launcher.request.request import PlannedRun, load_request, plan_request
from launcher.request.run_directory import check_new_run, find_run_to_resume
from launcher.runs.record import Outcome

if TYPE_CHECKING:
    from launcher.corpus.prepare import Prepared

log = get_logger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a training."""
    add_request_arguments(parser, default_shown="that of --resume RUN")
    add_node_arguments(parser)
    add_target_arguments(parser)
    add_resume_arguments(parser)
    group = parser.add_argument_group("run")
    group.add_argument("--dry-run", action="store_true", help="write runs/<id>/ only; prepare and start nothing")
    group.add_argument("--run-id", metavar="ID", help="name of the run directory (default: expert, time, hardware)")
    add_runs_dir(group)
    group.add_argument("--json", action="store_true", help="print the run directory and the outcome as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Train, resume or submit a run, or with --dry-run only write its files; return the exit code."""
    if arguments.expert is None:
        arguments.expert = _find_expert(arguments)
    node, job = make_node(arguments), make_job_options(arguments)
    if arguments.resume is not None:
        _check_one_run(arguments)
        return _resume(arguments, node, job)
    flags = {"--allow-changed-inputs": arguments.allow_changed_inputs or None, "--verify": arguments.verify or None}
    check_unset(flags, "--resume")
    planned = plan_request(make_request(arguments))
    if job is not None:
        job = _complete(job, planned, arguments)
    if arguments.dry_run:
        return _write_only(arguments, planned, node, job)
    if job is not None:
        return _submit_new(arguments, planned, job)
    return _train(arguments, planned, node)


def _check_one_run(arguments: argparse.Namespace) -> None:
    """Refuse --resume and --run-id if they name different runs."""
    if arguments.resume and arguments.run_id and Path(arguments.resume).name != arguments.run_id:
        raise InputError(
            f"--resume {arguments.resume} and --run-id {arguments.run_id} name different runs",
            hint="a resumed run keeps its id: omit --run-id",
        )


def _find_expert(arguments: argparse.Namespace) -> str:
    """Return the expert of the run to resume, for a command line that names no expert."""
    name = None if arguments.resume is None else arguments.resume or arguments.run_id
    if not name:
        raise InputError("no expert given", hint=f"known experts: {', '.join(list_experts())}; --resume RUN needs none")
    return load_request(find_run_to_resume(Path(arguments.runs_dir), name, "").request).expert


def _write_only(arguments: argparse.Namespace, planned: PlannedRun, node: Node | None, job: JobOptions | None) -> int:
    rendezvous = None if node is None else node.rendezvous
    paths = write_run(
        planned,
        Path(arguments.runs_dir),
        arguments.run_id,
        rendezvous=rendezvous,
        job=job,
        script_args=_make_script_args(arguments),
    )
    if arguments.json:
        _print_json(paths, None)
        return ExitCode.DONE
    print_plan(planned.plan)
    print(f"\nWritten to {paths.root}/: {', '.join(_list_files(paths))}")
    if job is not None:
        print(_describe_submit(paths, job))
    else:
        print(f"Dry run: nothing was started. The command is in {paths.command}")
    return ExitCode.DONE


def _submit_new(arguments: argparse.Namespace, planned: PlannedRun, job: JobOptions) -> int:
    runs_dir = Path(arguments.runs_dir)
    check_submit(RunPaths(runs_dir / (arguments.run_id or "RUN")), job)
    check_trust(list_code(planned.loaded.manifest), planned.loaded.path)
    if job.target == "slurm":
        check_packages(planned.plan)
    check_new_run(runs_dir, arguments.run_id)
    _print_plan(arguments, planned)
    if job.target == "slurm":
        prepare(planned)  # here: GPU nodes should not wait for it, and often have no network
    paths = write_run(planned, runs_dir, arguments.run_id, job=job, script_args=_make_script_args(arguments))
    return _submit(arguments, paths, job)


def _submit(arguments: argparse.Namespace, paths: RunPaths, job: JobOptions) -> int:
    name = submit_job(paths, job)
    if arguments.json:
        _print_json(paths, None, {"job_id": name})
    else:
        print(f"submitted job {name}; {describe_log(paths, job, name)}\nrun directory: {paths.root}")
    return ExitCode.DONE


def _complete(job: JobOptions, planned: PlannedRun, arguments: argparse.Namespace) -> JobOptions:
    """Add to a job's options what containers need besides the plan: the expert's folder, and flags of this command."""
    if arguments.verify:
        raise InputError("--verify trains recorded steps again on this machine: it cannot be used with --on")
    if planned.plan.hardware.gpu is None and planned.request.cpu_ranks_per_node is None:
        raise InputError(
            f"--on {job.target}: this machine has no GPU, and without --gpu the plan is for this machine",
            hint="name type and number of a node's GPUs, such as --gpu h100 --gpus 8; --nodes 2 for two nodes",
        )
    if job.target == "slurm":
        return job
    speed = planned.plan.speed
    if job.target in ("skypilot", "dstack") and speed.currency not in ("", "USD"):
        log.warning(
            f"the job has no price limit: {job.target} has prices in dollars, and the price is in {speed.currency}"
        )
    manifest = planned.loaded.path
    is_installed = manifest.is_absolute() and not Path(planned.request.expert).is_absolute()  # the image has it, too
    return replace(
        job,
        expert=planned.request.expert,
        expert_folder="" if is_installed else str(manifest.parent),
        flags=_make_script_args(arguments),
    )


def _describe_submit(paths: RunPaths, job: JobOptions) -> str:
    where = "In the project root on the cluster" if job.target == "slurm" else "In this folder"
    return f"Nothing was submitted. {where}: {shlex.join(make_submit_command(paths, job))}"


def _print_unstarted(arguments: argparse.Namespace, paths: RunPaths, text: str) -> None:
    """Print why nothing was started; with --json, log it to stderr and print the run directory as JSON."""
    if arguments.json:
        log.info(text)
        _print_json(paths, None)
    else:
        print(text)


def _train(arguments: argparse.Namespace, planned: PlannedRun, node: Node | None) -> int:
    runs_dir = Path(arguments.runs_dir)
    check_trust(list_code(planned.loaded.manifest), planned.loaded.path)
    if planned.plan.task_eval is not None and (note := describe_missing_judge(planned.loaded.manifest)):
        raise InputError(
            note, hint="correct the command, or train without grading answers: --set evaluation.task_rows=0"
        )
    check_startable(planned.plan, node)
    check_packages(planned.plan)
    if node is None:
        check_new_run(runs_dir, arguments.run_id)
    else:
        find_run_to_join(runs_dir, arguments.run_id, planned.plan, node)
    _print_plan(arguments, planned)
    prepare(planned)
    if node is None:
        paths = write_run(planned, runs_dir, arguments.run_id)
    else:
        if node.rank > 0:
            log.info(f"waiting for node 0 at {node.address}")
            wait_for_head(node)
        paths = join_run(planned, runs_dir, arguments.run_id, node)
    return _start(arguments, planned, paths, node)


def _start(
    arguments: argparse.Namespace,
    planned: PlannedRun,
    paths: RunPaths,
    node: Node | None,
    script_args: tuple[str, ...] = (),
) -> int:
    options = StartOptions(
        nodes=() if node is None else (node,), script_args=script_args, max_restarts=arguments.max_restarts or 0
    )
    outcome = run_with_restarts(planned, paths, make_console(arguments.json), options)
    if arguments.json:
        _print_json(paths, outcome)
    else:
        print(f"run directory: {paths.root}")
        if outcome.exit_code == ExitCode.DONE:
            print(_describe_next(paths, has_model=not planned.plan.random_weights))
    return ExitCode.RUN_FAILED if outcome.exit_code is None else outcome.exit_code


def _describe_next(paths: RunPaths, *, has_model: bool) -> str:
    """Return commands for a finished run, which can be copied as they are."""
    verbs = {"report": "the results, and how to reproduce them"}
    if has_model:
        verbs |= {"ask": "its answer to a held-out row", "export": "one model for other programs"}
    commands = {f"{_find_program()} {verb} {shlex.quote(str(paths.root))}": what for verb, what in verbs.items()}
    width = max(map(len, commands))
    return "\n".join(("\nnext:", *(f"  {command:<{width}}  # {what}" for command, what in commands.items())))


def _find_program() -> str:
    """Return the command that calls the launcher in the user's shell: its name, or a path if it is not on the PATH."""
    program = Path(sys.argv[0])
    return "launcher" if program.name != "launcher" or shutil.which("launcher") else os.path.relpath(program)


def _resume(arguments: argparse.Namespace, node: Node | None, job: JobOptions | None) -> int:
    name = arguments.resume or arguments.run_id or ""
    flags = make_request(arguments)
    resumed = plan_resumed(Path(arguments.runs_dir), name, flags)
    check_trust(resumed.list_code(arguments.expert, executes=not arguments.dry_run), resumed.paths.root)
    if resumed.is_done and arguments.verify:
        raise InputError(
            f"--verify trains recorded steps again before a run continues, and {resumed.paths.root} is done",
            hint="`launcher regression` compares a new training with recorded ones",
        )
    if resumed.is_done and not arguments.allow_changed_inputs:
        if flags.max_steps or flags.overrides or flags.base:  # they must not be ignored
            check_unchanged(resumed)
        _print_unstarted(
            arguments, resumed.paths, f"{resumed.paths.root}: this run is done; its adapter: {resumed.paths.adapter}"
        )
        return ExitCode.DONE
    if not arguments.allow_changed_inputs:
        check_unchanged(resumed)
    log.info(resumed.describe())
    check_unlocked(resumed.paths)
    if job is not None:
        return _resume_job(arguments, resumed, job)
    if arguments.dry_run:
        _print_plan(arguments, resumed.planned)
        _print_unstarted(arguments, resumed.paths, "Dry run: nothing was written or started.")
        return ExitCode.DONE
    return _resume_here(arguments, resumed, node)


def _resume_job(arguments: argparse.Namespace, resumed: ResumedRun, job: JobOptions) -> int:
    job = _complete(job, resumed.planned, arguments)
    if not arguments.dry_run:
        check_submit(resumed.paths, job)
        if job.target == "slurm":
            check_packages(resumed.planned.plan)
    _print_plan(arguments, resumed.planned)
    rewrite_run(resumed, job=job, script_args=_make_script_args(arguments))
    if arguments.dry_run:
        _print_unstarted(arguments, resumed.paths, _describe_submit(resumed.paths, job))
        return ExitCode.DONE
    if job.target == "slurm":
        prepare(resumed.planned)
    return _submit(arguments, resumed.paths, job)


def _resume_here(arguments: argparse.Namespace, resumed: ResumedRun, node: Node | None) -> int:
    plan, paths = resumed.planned.plan, resumed.paths
    check_startable(plan, node)
    check_packages(plan)
    _print_plan(arguments, resumed.planned)
    prepare(resumed.planned)
    if node is not None:
        paths = replace(paths, node_rank=node.rank)
        if node.rank > 0:
            wait_for_head(node)
    # Nodes that share the directory find the files that node 0 wrote there, and leave them unchanged.
    if node is None or node.rank == 0 or find_differences(load_plan(paths.plan), plan):
        rewrite_run(resumed, rendezvous=None if node is None else replace(node.rendezvous, is_host=None))
    return _start(arguments, resumed.planned, paths, node, _make_script_args(arguments))


def _make_script_args(arguments: argparse.Namespace) -> tuple[str, ...]:
    verify = ("--verify", str(arguments.verify)) if arguments.verify else ()
    trust = ("--trust",) if is_trust_granted() else ()  # batch systems need not pass the environment on
    return (*verify, *(("--allow-changed-inputs",) if arguments.allow_changed_inputs else ()), *trust)


def _print_plan(arguments: argparse.Namespace, planned: PlannedRun) -> None:
    if not arguments.json:
        print_plan(planned.plan)
        print()


def prepare(planned: PlannedRun) -> Prepared:
    """Tokenize and pack a run's data unless it is cached, and show the progress."""
    from launcher.launch.prepare_data import prepare_planned  # needs numpy and tokenizers; a dry run does not

    with Progress(planned.plan.data.num_rows) as progress:
        prepared = prepare_planned(planned, progress.report, progress.advance)
    state = "found" if prepared.was_cached else f"prepared in {prepared.seconds:.1f} s"
    log.info(f"prepared data: {prepared.store.folder} ({state})")
    for line in describe_rejected(prepared.store.audit):
        log.info(line)
    return prepared


def make_console(is_json: bool) -> Console:
    """Return the destinations of a training's output: our stdout and stderr or, with --json, stderr for both."""
    sys.stdout.flush()
    sys.stderr.flush()
    out, error = sys.stdout.buffer, sys.stderr.buffer
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:  # not a terminal
        columns = None
    return Console(stdout=error if is_json else out, stderr=error, columns=columns)


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
    print_json(result)


def _list_files(paths: RunPaths) -> list[str]:
    return sorted(file.name for file in paths.root.iterdir())
