"""`accelerate launch` with a preset and a manifest, without a plan: planned for what was started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher import metrics
from launcher.launch import ACCELERATE
from launcher.paths import RunPaths
from launcher.render import TRAIN_SCRIPT, Command
from tests.distributed.bench import Bench, Cell, Ended, Trained, change_json
from tests.distributed.conftest import Reference
from tests.distributed.test_matrix import LOSS, NORM, largest_difference

PRESETS = {"ddp_2gpu": "ddp", "fsdp2_2gpu": "fsdp2", "zero2_2gpu": "zero2", "zero3_2gpu": "zero3"}


def launch(bench: Bench, preset: str, manifest: Path, run_id: str) -> Ended:
    """As a user types it; only the port is any that is free."""
    config = ("--config_file", f"accelerate_configs/{preset}.yaml", "--main_process_port", "0")
    run = ("--profile", "full", "--runs-dir", str(bench.runs), "--run-id", run_id)
    argv = (*ACCELERATE, *config, TRAIN_SCRIPT, "--manifest", str(manifest), *run)
    return bench.launch(Command(argv=argv, environment={}))


SLOW_PRESETS = [pytest.param(name, marks=pytest.mark.slow) for name in ("ddp_2gpu", "zero2_2gpu", "zero3_2gpu")]


@pytest.mark.parametrize("preset", ["fsdp2_2gpu", *SLOW_PRESETS])
def test_a_preset_trains_what_one_process_trains(bench: Bench, reference: Reference, preset: str) -> None:
    cell = Cell(strategy="ddp")
    ended = launch(bench, preset, bench.manifest(cell), f"bare-{preset}")
    assert ended.returncode == 0, ended.console
    paths = RunPaths(bench.runs / f"bare-{preset}")
    plan = json.loads(paths.plan.read_text())
    assert (plan["strategy"], plan["batch"]["num_ranks"]) == (PRESETS[preset], 2)
    trained, alone = Trained(paths), reference(cell)
    assert trained.packs == alone.packs
    assert largest_difference(trained, alone, metrics.TRAIN_LOSS) < LOSS
    assert largest_difference(trained, alone, metrics.GRAD_NORM) < NORM
    assert trained.outcome.status == "done"


def test_a_wrong_manifest_is_told_once_and_ends_all_ranks(bench: Bench) -> None:
    manifest = bench.manifest(Cell(strategy="ddp"))
    change_json(manifest, {"training.config.rank": 0})
    ended = launch(bench, "ddp_2gpu", manifest, "wrong")
    assert ended.returncode != 0
    assert ended.console.count("training.config.rank: must be at least 1, not 0") == 1, ended.console
    assert ended.seconds < 60
    assert not (bench.runs / "wrong").exists()


def test_a_run_id_that_is_taken_is_told_once(bench: Bench) -> None:
    """Found by the first rank alone, while the others wait for its plan."""
    taken = bench.runs / "taken"
    taken.mkdir(parents=True, exist_ok=True)
    ended = launch(bench, "ddp_2gpu", bench.manifest(Cell(strategy="ddp")), "taken")
    assert ended.returncode != 0
    assert ended.console.count("error: ") == 1, ended.console
    assert ended.seconds < 60
    assert not list(taken.iterdir())
