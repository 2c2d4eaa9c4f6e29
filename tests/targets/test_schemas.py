"""Job files, accepted by the projects that read them, and the same files with typos, refused."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ALL_VARIABLE, ROOT
from tests.targets import validators
from tests.targets.jobs import TARGETS, write_job

PYTHON = Path(os.environ.get("LAUNCHER_TEST_TARGETS", "")) / "bin/python"
pytestmark = pytest.mark.skipif(
    "LAUNCHER_TEST_TARGETS" not in os.environ,
    reason="LAUNCHER_TEST_TARGETS names no environment with tests/targets/requirements.txt: make test-targets",
)
CLUSTER = ("--gpu", "h100", "--gpus", "8", "--nodes", "2", "--secrets", "HF_TOKEN,WANDB_API_KEY", "--price", "2.4")
HARDWARE = {
    "cluster": CLUSTER,
    "one": ("--gpu", "rtx4090", "--time-limit", "2-12:00:00"),
    "cpu": ("--nodes", "3", "--cpu-ranks", "1", "--cores", "4"),
}
TYPOS = (
    ("skypilot", "use_spot:", "use_spots:"),
    ("skypilot", "recover_on_exit_codes:", "recover_on_exit_code:"),
    ("skypilot", "num_nodes: 2", "num_nodes: two"),
    ("skypilot", "file_mounts:", "file_mount:"),
    ("dstack", "spot_policy: spot", "spot_policy: spots"),
    ("dstack", "shm_size:", "shm_sizes:"),
    ("dstack", "- interruption", "- interruptions"),
    ("dstack", "max_duration: ", "max_duration: about "),
    ("trainjob", "runtimeRef:", "runtimeReff:"),
    ("trainjob", "numProcPerNode:", "numProcsPerNode:"),
    ("trainjob", "mlPolicy:", "mlPolicies:"),
    ("trainjob", "terminationGracePeriodSeconds:", "terminationGraceSeconds:"),
    ("trainjob", "secretKeyRef:", "secretKeyReference:"),
    ("jobset", "restartStrategy:", "restartStrategies:"),
    ("jobset", "enableDNSHostnames:", "enableDnsHostnames:"),
    ("jobset", "nvidia.com/gpu: '8'", "nvidia.com/gpu: [8]"),
    ("job", "completionMode:", "completionModes:"),
    ("job", "backoffLimit: 10", "backoffLimit: ten"),
    ("job", "sizeLimit:", "sizeLimits:"),
    ("job", "publishNotReadyAddresses:", "publishNotReadyAddress:"),
)

# `make test` checks each target with a cluster and its first typo; `make test-targets` and `make test-all` check all.
IS_ALL = ALL_VARIABLE in os.environ
FAST_TYPOS = tuple(number for number, typo in enumerate(TYPOS) if typo[0] not in [one[0] for one in TYPOS[:number]])


def mark_slow(value: str | int, is_fast: bool) -> Any:
    return value if is_fast else pytest.param(value, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str | None]:
    """Return the validators' answers by folder. All in one process: importing SkyPilot takes seconds."""
    folder = tmp_path_factory.mktemp("jobs")
    files = {}
    for target in TARGETS:
        for name, flags in HARDWARE.items() if IS_ALL else [("cluster", CLUSTER)]:
            files[f"{target}-{name}"] = write_job(folder / f"{target}-{name}", target, *flags)
    if IS_ALL:
        files["skypilot-volume"] = write_job(
            folder / "volume", "skypilot", *CLUSTER, "--volume", "experts", "--on-demand", run_id="9.Long_id" * 9
        )
    for number in range(len(TYPOS)) if IS_ALL else FAST_TYPOS:
        target, right, wrong = TYPOS[number]
        text = files[f"{target}-cluster"].read_text()
        assert right in text
        file = folder / f"typo-{number}" / files[f"{target}-cluster"].name
        file.parent.mkdir()
        file.write_text(text.replace(right, wrong, 1))
        files[str(number)] = file
    command = [str(PYTHON), validators.__file__, *map(str, files.values())]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stderr
    answers = json.loads(result.stdout.splitlines()[-1])
    return {name: answers[str(file)] for name, file in files.items()}


def get_verdict(verdicts: Mapping[str, str | None], name: str) -> str | None:
    verdict = verdicts[name]
    if verdict is not None and verdict.startswith("missing"):
        pytest.skip(verdict)
    return verdict


@pytest.mark.parametrize("hardware", [mark_slow(name, name == "cluster") for name in HARDWARE])
@pytest.mark.parametrize("target", TARGETS)
def test_job_file_is_accepted(verdicts: Mapping[str, str | None], target: str, hardware: str) -> None:
    assert get_verdict(verdicts, f"{target}-{hardware}") is None


@pytest.mark.slow
def test_skypilot_volume_and_long_run_id_are_accepted(verdicts: Mapping[str, str | None]) -> None:
    assert get_verdict(verdicts, "skypilot-volume") is None


@pytest.mark.parametrize(
    "number",
    [mark_slow(number, number in FAST_TYPOS) for number in range(len(TYPOS))],
    ids=[f"{target}-{wrong}" for target, _, wrong in TYPOS],
)
def test_typo_is_refused(verdicts: Mapping[str, str | None], number: int) -> None:
    assert get_verdict(verdicts, str(number)) is not None
