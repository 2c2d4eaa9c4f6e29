"""Run directory of a planned run: inputs, plan, configs and command, for a new run or one that another node created."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launcher.core.errors import InputError
from launcher.core.run_paths import RunPaths, removed_on_failure, write_files
from launcher.launch.nodes import Node, find_run_to_join
from launcher.render import TRAIN_SCRIPT, JobOptions, Rendezvous, render, render_slurm
from launcher.render.targets import render_job
from launcher.request.request import PlannedRun
from launcher.request.run_directory import create_run_directory, input_texts


def write_run(
    planned: PlannedRun,
    runs_dir: Path,
    run_id: str | None,
    *,
    rendezvous: Rendezvous | None = None,
    job: JobOptions | None = None,
    script_args: Sequence[str] = (),
) -> RunPaths:
    """Create runs/<id>/ with the inputs, the plan, the configs and the command; with `job`, also the job file."""
    paths = create_run_directory(planned, runs_dir, run_id)
    with removed_on_failure(paths):
        write_run_files(planned, paths, rendezvous=rendezvous, job=job, script_args=script_args)
    return paths


def write_run_files(
    planned: PlannedRun,
    paths: RunPaths,
    *,
    rendezvous: Rendezvous | None = None,
    job: JobOptions | None = None,
    script_args: Sequence[str] = (),
) -> None:
    """Write all files of a run; plan.json last, so that nodes that share the directory know when it is complete."""
    script = find_train_script()
    texts = input_texts(planned, paths)
    texts |= render(planned.plan, paths, rendezvous=rendezvous, script=script)
    if job is not None and job.target == "slurm":
        texts[paths.slurm.name] = render_slurm(planned.plan, paths, options=job, script=script, script_args=script_args)
    elif job is not None:
        texts.pop(paths.slurm.name, None)
        texts |= render_job(planned.plan, paths, job, texts)
    plan = {paths.plan.name: texts.pop(paths.plan.name)}
    write_files(paths.root, texts | plan)


def join_run(planned: PlannedRun, runs_dir: Path, run_id: str, node: Node) -> RunPaths:
    """Return the directory that another node created on a shared file system, or create one for this node."""
    paths = find_run_to_join(runs_dir, run_id, planned.plan, node)
    if paths is not None:
        return paths
    # command.txt is for every node, so it must not contain what is set for this node only.
    rendezvous = replace(node.rendezvous, is_host=None)
    try:
        created = write_run(planned, runs_dir, run_id, rendezvous=rendezvous)
    except InputError:
        paths = find_run_to_join(runs_dir, run_id, planned.plan, node)  # another node was faster
        if paths is None:
            raise
        return paths
    return replace(created, node_rank=node.rank)


def find_train_script() -> str:
    """Return the path of this package's train.py: relative if the working directory is its checkout, else absolute."""
    own = Path(__file__).resolve().parent.with_name("train.py")
    # Another launcher/ in the working directory may have another version, or be a downloaded one.
    return TRAIN_SCRIPT if Path(TRAIN_SCRIPT).resolve() == own else str(own)
