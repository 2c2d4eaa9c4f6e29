"""Task metrics with several ranks: each generates a share of the answers, and all get the result."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.core.choices import Strategy
from launcher.core.metrics import find_task_metrics, load_metrics
from launcher.judges.results import EvalResult, load_result
from tests.distributed.harness import Harness, TrainedRun, TrainingCase

pytest.importorskip("jsonschema_rs", reason="pip install 'expert-launcher[quality]'")
ROWS = 3  # not divisible by two ranks
CASE = TrainingCase(strategy="ddp", task_rows=ROWS, config={"max_steps": 2, "eval_steps": 2, "save_steps": 2})


def read(trained: TrainedRun, step: int) -> EvalResult:
    return load_result(trained.paths.evaluation_at(step))


@pytest.fixture(scope="module")
def single_process(harness: Harness) -> TrainedRun:
    return harness.train_in_process(CASE.single_process)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_ranks_generate_the_answers_of_one_process(
    harness: Harness, single_process: TrainedRun, strategy: Strategy
) -> None:
    ended, trained = harness.train(replace(CASE, strategy=strategy))
    assert ended.returncode == 0, ended.console
    assert "no task metrics" not in ended.console
    rows = {row.step: row for row in load_metrics(trained.paths.metrics) if find_task_metrics(row)}
    assert sorted(rows) == [0, 2]
    for step in rows:
        assert [answer.key for answer in read(trained, step).answers] == [
            a.key for a in read(single_process, step).answers
        ]
    # Before training the weights are equal, and so are the answers, in the order of the rows.
    assert [answer.answer for answer in read(trained, 0).answers] == [a.answer for a in read(single_process, 0).answers]
    assert len({answer.key for answer in read(trained, 0).answers}) == ROWS
    assert trained.values("train/loss") == pytest.approx(single_process.values("train/loss"), rel=1e-4)


@pytest.mark.slow
def test_no_task_metrics_with_sharded_weights(harness: Harness) -> None:
    ended, trained = harness.train(replace(CASE, strategy="fsdp2"))
    assert ended.returncode == 0, ended.console
    assert not trained.paths.evaluations.exists()
    assert trained.values("eval/loss")
