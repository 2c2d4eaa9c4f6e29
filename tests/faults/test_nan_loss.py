"""One rank of two computes a NaN loss: both skip the step, report it once, and stay in sync."""

from __future__ import annotations

import math

import pytest
import torch

from launcher.core import metrics
from launcher.core.choices import Strategy
from launcher.core.metrics import load_metrics
from launcher.launch.start import ACCELERATE
from launcher.render import render_command
from tests.conftest import ROOT
from tests.distributed.harness import Harness, TrainedRun, TrainingCase, make_harness

FAILING_TRAIN_SCRIPT = str(ROOT / "tests/faults/failing_train.py")
CONFIG = {"max_steps": 4, "eval_steps": 4, "save_steps": 4, "load_best_model_at_end": False}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return make_harness(tmp_path_factory.mktemp("nan-loss"))


@pytest.fixture(scope="module")
def single_process(harness: Harness) -> TrainedRun:
    """Train in one process with a NaN loss in the second step, so that the same step is skipped."""
    return train_with_nan(
        harness, TrainingCase(strategy="single", ranks_per_node=1, config=CONFIG, global_batch=4, micro_batch=4), "0:2"
    )


def train_with_nan(harness: Harness, case: TrainingCase, where: str) -> TrainedRun:
    planned, paths = harness.write(case)
    command = render_command(planned.plan, paths, script=FAILING_TRAIN_SCRIPT, accelerate=ACCELERATE)
    ended = harness.launch(command, LAUNCHER_TEST_POISON=where)
    assert ended.returncode == 0, ended.console[-3000:]
    assert "step 2: the loss is nan; step skipped. Its rows: " in ended.console
    return TrainedRun(paths)


@pytest.mark.parametrize("strategy", [pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "fsdp2", "zero2")])
def test_nan_on_second_rank_skips_the_step_on_both(
    harness: Harness, single_process: TrainedRun, strategy: Strategy
) -> None:
    trained = train_with_nan(
        harness, TrainingCase(strategy=strategy, config=CONFIG, global_batch=4, micro_batch=2), "1:2"
    )
    rows = [row for row in load_metrics(trained.paths.metrics) if metrics.TRAIN_LOSS in row.values]
    assert [row.values[metrics.SKIPPED] for row in rows] == [0, 1, 0, 0]
    assert math.isnan(rows[1].values[metrics.TRAIN_LOSS])
    losses, expected = (run.values(metrics.TRAIN_LOSS) for run in (trained, single_process))
    assert losses[2:] == pytest.approx(expected[2:], rel=1e-5), "later steps equal those of one process"
    assert all(torch.isfinite(weight).all() for weight in trained.weights.values())
