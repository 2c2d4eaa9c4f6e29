"""Submission of a written run directory to Slurm."""

from __future__ import annotations

import shutil
import subprocess

from launcher.core.errors import InputError, RunFailedError
from launcher.core.run_paths import RunPaths

SBATCH = "sbatch"
_SUBMIT_SECONDS = 120  # a busy controller may take long; one that is down never answers


def check_sbatch() -> None:
    """Refuse to continue without sbatch, before data is prepared and files are written."""
    if shutil.which(SBATCH) is None:
        raise InputError(
            "sbatch is not on the PATH of this machine",
            hint="--no-submit writes the run directory: copy it to the cluster and run `sbatch slurm.sbatch` there",
        )


def submit_job(paths: RunPaths) -> str:
    """Submit the script and return the job's id. Its paths are relative to the working directory, as sbatch runs it."""
    by_hand = f"its files are complete: sbatch {paths.slurm}"
    try:
        result = subprocess.run(
            [SBATCH, "--parsable", str(paths.slurm)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_SUBMIT_SECONDS,
        )
    except OSError as error:
        raise InputError(f"sbatch cannot be started: {error.strerror}", hint=by_hand) from None
    except subprocess.TimeoutExpired:
        raise RunFailedError(
            f"sbatch did not answer for {_SUBMIT_SECONDS} s", hint=f"see squeue before you submit again; {by_hand}"
        ) from None
    job = result.stdout.strip().partition(";")[0]  # ID;CLUSTER where there are several
    if result.returncode or not job.isdecimal():
        output = (result.stderr.strip() or result.stdout.strip() or f"exit code {result.returncode}")[-1000:]
        raise InputError(f"sbatch refused the job: {output}", hint=by_hand)
    return job
