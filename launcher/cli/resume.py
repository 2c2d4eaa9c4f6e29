"""`launcher train --resume`: the run that is meant, what has changed since, and on it goes."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.arguments import make_request
from launcher.cli.train import finish, make_console, prepare, show, submit
from launcher.errors import ExitCode, InputError

if TYPE_CHECKING:
    from launcher.nodes import Node
    from launcher.render import SlurmOptions
    from launcher.resume import ResumedRun


def resume(arguments: argparse.Namespace, node: Node | None, slurm: SlurmOptions | None) -> int:
    from launcher.locking import check_unlocked
    from launcher.resume import check_drift, plan_resumed

    named = arguments.resume or arguments.run_id or ""
    resumed = plan_resumed(Path(arguments.runs_dir), named, make_request(arguments))
    if resumed.is_done and not arguments.allow_drift:
        print(f"{resumed.paths.root}: this run is done; its adapter: {resumed.paths.adapter}")
        return ExitCode.DONE
    if not arguments.allow_drift:
        check_drift(resumed)
    print(resumed.describe(), file=sys.stderr)
    check_unlocked(resumed.paths)
    if arguments.dry_run:
        show(arguments, resumed.planned)
        print("Dry run: nothing was written or started.")
        return ExitCode.DONE
    return _resume_slurm(arguments, resumed, slurm) if slurm is not None else _resume_here(arguments, resumed, node)


def _resume_slurm(arguments: argparse.Namespace, resumed: ResumedRun, slurm: SlurmOptions) -> int:
    from launcher.launch import check_packages
    from launcher.resume import rewrite_run
    from launcher.submit import check_sbatch

    if not arguments.no_submit:
        check_sbatch()
        check_packages(resumed.planned.plan)
    show(arguments, resumed.planned)
    if arguments.verify:
        raise InputError("--verify trains recorded steps again, here: it excludes --slurm")
    rewrite_run(resumed, slurm=slurm, script_args=make_script_args(arguments))
    if arguments.no_submit:
        print(f"Nothing was submitted. In the project root on the cluster: sbatch {resumed.paths.slurm}")
        return ExitCode.DONE
    prepare(resumed.planned)
    return submit(arguments, resumed.paths)


def _resume_here(arguments: argparse.Namespace, resumed: ResumedRun, node: Node | None) -> int:
    from launcher.attempts import StartOptions, run_to_end
    from launcher.launch import check_packages, check_startable
    from launcher.nodes import find_differences, wait_for_head
    from launcher.plan import load_plan
    from launcher.resume import rewrite_run

    plan, paths = resumed.planned.plan, resumed.paths
    check_startable(plan, node)
    check_packages(plan)
    show(arguments, resumed.planned)
    prepare(resumed.planned)
    if node is not None:
        paths = replace(paths, node_rank=node.rank)
        if node.rank > 0:
            wait_for_head(node)
    # Nodes that share the directory find there what node 0 wrote, and leave it as it is.
    if node is None or node.rank == 0 or find_differences(load_plan(paths.plan), plan):
        rewrite_run(resumed, rendezvous=None if node is None else replace(node.rendezvous, is_host=None))
    options = StartOptions(
        nodes=() if node is None else (node,),
        script_args=make_script_args(arguments),
        max_restarts=arguments.max_restarts or 0,
    )
    outcome = run_to_end(resumed.planned, paths, make_console(arguments.json), options)
    return finish(arguments, paths, outcome)


def make_script_args(arguments: argparse.Namespace) -> tuple[str, ...]:
    verify = ("--verify", str(arguments.verify)) if arguments.verify else ()
    return (*verify, *(("--allow-drift",) if arguments.allow_drift else ()))
