"""One rank of two computes nonsense: the step is passed over on both, once, told, and the training goes on alike."""

from __future__ import annotations

import math

import pytest
import torch

from launcher import metrics
from launcher.choices import Strategy
from launcher.launch import ACCELERATE
from launcher.metrics import load_metrics
from launcher.render import render_command
from tests.conftest import ROOT
from tests.distributed.bench import Bench, Cell, Trained, write_bench

FAILING = str(ROOT / "tests/faults/failing_train.py")
CONFIG = {"max_steps": 4, "eval_steps": 4, "save_steps": 4, "load_best_model_at_end": False}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return write_bench(tmp_path_factory.mktemp("poison"))


@pytest.fixture(scope="module")
def alone(bench: Bench) -> Trained:
    """In one process the second step's only micro-batch is poisoned: the same step is passed over."""
    return poison(bench, Cell(strategy="single", ranks_per_node=1, config=CONFIG, global_batch=4, micro_batch=4), "0:2")


def poison(bench: Bench, cell: Cell, where: str) -> Trained:
    planned, paths = bench.write(cell)
    command = render_command(planned.plan, paths, script=FAILING, accelerate=ACCELERATE)
    ended = bench.launch(command, LAUNCHER_TEST_POISON=where)
    assert ended.returncode == 0, ended.console[-3000:]
    assert "step 2: the loss is nan; the step was passed over. Its rows: " in ended.console
    return Trained(paths)


@pytest.mark.parametrize("strategy", [pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "fsdp2", "zero2")])
def test_the_second_rank_is_poisoned(bench: Bench, alone: Trained, strategy: Strategy) -> None:
    trained = poison(bench, Cell(strategy=strategy, config=CONFIG, global_batch=4, micro_batch=2), "1:2")
    rows = [row for row in load_metrics(trained.paths.metrics) if metrics.TRAIN_LOSS in row.values]
    assert [row.values[metrics.SKIPPED] for row in rows] == [0, 1, 0, 0]
    assert math.isnan(rows[1].values[metrics.TRAIN_LOSS])
    losses, expected = (run.values(metrics.TRAIN_LOSS) for run in (trained, alone))
    assert losses[2:] == pytest.approx(expected[2:], rel=1e-5), "the steps behind it are those of one process"
    assert all(torch.isfinite(weight).all() for weight in trained.weights.values())
