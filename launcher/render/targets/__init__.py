"""Job files of SkyPilot, Kubernetes and dstack. Pure text from the plan, like every other rendered file."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.core.run_paths import RunPaths
from launcher.plan.model import Plan
from launcher.render.job import JobOptions
from launcher.render.targets import dstack, kubernetes, skypilot


def render_job(plan: Plan, paths: RunPaths, options: JobOptions, files: Mapping[str, str]) -> dict[str, str]:
    """Return the text of the job file by its name. `files` are the other files of the run directory, by name."""
    if options.target == "skypilot":
        return {paths.skypilot.name: skypilot.render_skypilot(plan, paths, options)}
    if options.target == "dstack":
        return {paths.dstack.name: dstack.render_dstack(plan, paths, options)}
    return {paths.kubernetes.name: kubernetes.render_kubernetes(plan, paths, options, files)}


def make_submit_command(paths: RunPaths, options: JobOptions) -> list[str]:
    """Return the command that submits the job file, to be run in the project root."""
    return {
        "slurm": ["sbatch", str(paths.slurm)],
        "skypilot": skypilot.make_submit_command(paths, options),
        "kubernetes": kubernetes.make_submit_command(paths),
        "dstack": dstack.make_submit_command(paths),
    }[options.target]
