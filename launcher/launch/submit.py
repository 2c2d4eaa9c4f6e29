"""Submission of a written run directory to Slurm, SkyPilot, Kubernetes or dstack."""

from __future__ import annotations

import shlex
import shutil
import subprocess

from launcher.core.errors import InputError, RunFailedError
from launcher.core.run_paths import RunPaths
from launcher.render import JobOptions
from launcher.render.targets import make_submit_command
from launcher.render.targets.node import make_name

_SUBMIT_SECONDS = 120  # a busy controller may take long; one that is down never answers
_CLOUD_SECONDS = 1800  # SkyPilot may have to start its jobs controller


def check_submit(paths: RunPaths, job: JobOptions) -> None:
    """Raise InputError if the program that submits the job, such as sbatch, is not on the PATH."""
    command = make_submit_command(paths, job)
    if shutil.which(command[0]) is None:
        where = "copy it to the cluster and" if job.target == "slurm" else f"where {command[0]} is installed,"
        raise InputError(
            f"{command[0]} is not on the PATH of this machine",
            hint=f"--dry-run writes the run directory: {where} run `{shlex.join(command)}`",
        )


def submit_job(paths: RunPaths, job: JobOptions) -> str:
    """Submit the job file and return the job's id or name. Paths in the file are relative to the working directory."""
    command = make_submit_command(paths, job)
    program, by_hand = command[0], f"its files are complete; to submit by hand: {shlex.join(command)}"
    seconds = _SUBMIT_SECONDS if job.target == "slurm" else _CLOUD_SECONDS
    try:
        result = subprocess.run(
            [program, *(["--parsable"] if job.target == "slurm" else []), *command[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=seconds,
        )
    except OSError as error:
        raise InputError(f"{program} cannot be started: {error.strerror}", hint=by_hand) from None
    except subprocess.TimeoutExpired:
        raise RunFailedError(
            f"{program} did not answer for {seconds} s", hint=f"list your jobs before you submit again; {by_hand}"
        ) from None
    name = result.stdout.strip().partition(";")[0] if job.target == "slurm" else make_name(paths.run_id)
    if result.returncode or (job.target == "slurm" and not name.isdecimal()):  # ID;CLUSTER where there are several
        output = (result.stderr.strip() or result.stdout.strip() or f"exit code {result.returncode}")[-1000:]
        raise InputError(f"{program} refused the job: {output}", hint=by_hand)
    return name


def describe_log(paths: RunPaths, job: JobOptions, name: str) -> str:
    """Return a text that says where a submitted job's output is."""
    return {
        "slurm": f"its log: {paths.logs}/slurm-{name}.log",
        "skypilot": f"its log: sky jobs logs --name {name}",
        "kubernetes": f"its pods: kubectl get pods --selector launcher/run={name}",
        "dstack": f"its log: dstack logs {name}",
    }[job.target]
