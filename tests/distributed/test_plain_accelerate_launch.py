"""`accelerate launch` with a preset and a manifest, without a plan: the plan matches the started processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.core import metrics
from launcher.core.run_paths import RunPaths
from launcher.launch.start import ACCELERATE
from launcher.render import TRAIN_SCRIPT, Command
from tests.distributed.conftest import Reference
from tests.distributed.harness import Harness, TrainedRun, TrainingCase, change_json
from tests.distributed.test_matrix import LOSS, NORM, largest_difference
from tests.faults.fork_server import LIMIT_SECONDS, ForkServer, LaunchedProcesses

PRESETS = {"ddp_2gpu": "ddp", "fsdp2_2gpu": "fsdp2", "zero2_2gpu": "zero2", "zero3_2gpu": "zero3"}


def launch(
    harness: Harness, fork_server: ForkServer, preset: str, manifest: Path, run_id: str, seconds: float = LIMIT_SECONDS
) -> LaunchedProcesses:
    """Launch as a user would, on a free port."""
    config = ("--config_file", f"accelerate_configs/{preset}.yaml", "--main_process_port", "0")
    run = ("--profile", "full", "--runs-dir", str(harness.runs), "--run-id", run_id)
    argv = (*ACCELERATE, *config, TRAIN_SCRIPT, "--manifest", str(manifest), *run)
    with fork_server.started(Command(argv=argv, environment={})) as launched:
        launched.wait(seconds)
    return launched


SLOW_PRESETS = [pytest.param(name, marks=pytest.mark.slow) for name in ("ddp_2gpu", "zero2_2gpu", "zero3_2gpu")]


@pytest.mark.parametrize("preset", ["fsdp2_2gpu", *SLOW_PRESETS])
def test_preset_trains_like_one_process(
    harness: Harness, fork_server: ForkServer, reference: Reference, preset: str
) -> None:
    case = TrainingCase(strategy="ddp")
    ended = launch(harness, fork_server, preset, harness.manifest(case), f"plain-{preset}")
    assert ended.returncode == 0, ended.console
    paths = RunPaths(harness.runs / f"plain-{preset}")
    plan = json.loads(paths.plan.read_text())
    assert (plan["strategy"], plan["batch"]["num_ranks"]) == (PRESETS[preset], 2)
    trained, single_process = TrainedRun(paths), reference(case)
    assert trained.packs == single_process.packs
    assert largest_difference(trained, single_process, metrics.TRAIN_LOSS) < LOSS
    assert largest_difference(trained, single_process, metrics.GRAD_NORM) < NORM
    assert trained.outcome.status == "done"


def test_invalid_manifest_is_reported_once_and_all_ranks_exit(harness: Harness, fork_server: ForkServer) -> None:
    manifest = harness.manifest(TrainingCase(strategy="ddp"))
    change_json(manifest, {"training.config.rank": 0})
    ended = launch(harness, fork_server, "ddp_2gpu", manifest, "wrong", 150)
    assert ended.returncode != 0
    assert ended.console.count("training.config.rank: must be at least 1, not 0") == 1, ended.console
    assert not (harness.runs / "wrong").exists()


@pytest.mark.slow
def test_existing_run_id_is_reported_once(harness: Harness, fork_server: ForkServer) -> None:
    """Rank 0 finds the run, while the others wait for its plan."""
    taken = harness.runs / "taken"
    taken.mkdir(parents=True, exist_ok=True)
    ended = launch(harness, fork_server, "ddp_2gpu", harness.manifest(TrainingCase(strategy="ddp")), "taken", 150)
    assert ended.returncode != 0
    assert ended.console.count("error: ") == 1, ended.console
    assert not list(taken.iterdir())
