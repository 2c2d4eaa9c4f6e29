"""A written run directory -> a job of Slurm's."""

from __future__ import annotations

import shutil
import subprocess

from launcher.errors import InputError, RunFailedError
from launcher.paths import RunPaths

SBATCH = "sbatch"
_SUBMIT_SECONDS = 120  # a busy controller may take long; one that is down answers never


def check_sbatch() -> None:
    """Before data is prepared and files are written."""
    if shutil.which(SBATCH) is None:
        raise InputError(
            "there is no sbatch on this machine's PATH",
            hint="--no-submit writes the run directory: copy it to the cluster, and `sbatch slurm.sbatch` there",
        )


def submit_job(paths: RunPaths) -> str:
    """The job's id. The script's paths count from here, which sbatch makes the job's directory."""
    by_hand = f"its files are whole: sbatch {paths.slurm}"
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
        said = (result.stderr.strip() or result.stdout.strip() or f"exit code {result.returncode}")[-1000:]
        raise InputError(f"sbatch refused the job: {said}", hint=by_hand)
    return job
