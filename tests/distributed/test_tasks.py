"""Answers that are judged on the way, with several ranks: each answers its share, and all of them know the result."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.choices import Strategy
from launcher.metrics import find_task_metrics, load_metrics
from launcher.quality.results import EvalResult, load_result
from tests.distributed.bench import Bench, Cell, Trained

pytest.importorskip("jsonschema_rs", reason="pip install 'expert-launcher[quality]'")
ROWS = 3  # two ranks do not divide them
CELL = Cell(strategy="ddp", task_rows=ROWS, config={"max_steps": 2, "eval_steps": 2, "save_steps": 2})


def read(trained: Trained, step: int) -> EvalResult:
    return load_result(trained.paths.evaluation_at(step))


@pytest.fixture(scope="module")
def alone(bench: Bench) -> Trained:
    return bench.train_here(CELL.alone)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_ranks_answer_what_one_process_answers(bench: Bench, alone: Trained, strategy: Strategy) -> None:
    ended, trained = bench.train(replace(CELL, strategy=strategy))
    assert ended.returncode == 0, ended.console
    assert "were not judged" not in ended.console
    rows = {row.step: row for row in load_metrics(trained.paths.metrics) if find_task_metrics(row)}
    assert sorted(rows) == [0, 2]
    for step in rows:
        assert [answer.key for answer in read(trained, step).answers] == [a.key for a in read(alone, step).answers]
    # Before anything is trained the weights are the same, and so is every word, in the order of the rows.
    assert [answer.answer for answer in read(trained, 0).answers] == [a.answer for a in read(alone, 0).answers]
    assert len({answer.key for answer in read(trained, 0).answers}) == ROWS
    assert trained.values("train/loss") == pytest.approx(alone.values("train/loss"), rel=1e-4)


@pytest.mark.slow
def test_where_no_rank_has_all_weights_nobody_is_asked(bench: Bench) -> None:
    ended, trained = bench.train(replace(CELL, strategy="fsdp2"))
    assert ended.returncode == 0, ended.console
    assert not trained.paths.evaluations.exists()
    assert trained.values("eval/loss")
