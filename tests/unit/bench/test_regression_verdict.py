"""The verdict on two runs and their evaluations: rows, speedup, and when the quality gate closes."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.bench.regression import make_verdict
from launcher.core import metrics
from launcher.core.metrics import StepMetrics
from launcher.core.run_paths import RunPaths
from launcher.judges.base import Check, Verdict
from launcher.judges.results import AnswerResult, EvalResult, summarize_checks
from launcher.runs.record import Outcome, RunRecord
from tests.made_runs import MadeRun, make_plan_of


def make_rows(rows_per_step: int, seconds: float, losses: tuple[float, ...] = ()) -> tuple[StepMetrics, ...]:
    """Three steps, the first four times as long as the others; then evaluations."""
    steps = [
        StepMetrics(
            step=step,
            epoch=0.0,
            values={
                metrics.TRAIN_LOSS: 1.0,
                metrics.STEP_SECONDS: taken,
                metrics.SAMPLES_PER_SECOND: rows_per_step / taken,
                metrics.TOKENS_PER_SECOND: 100 * rows_per_step / taken,
                metrics.TOTAL_SECONDS: 30.0 + 10.0 * step,
            },
        )
        for step, taken in ((1, 4 * seconds), (2, seconds), (3, seconds))
    ]
    evaluations = [StepMetrics(step=3, epoch=1.0, values={metrics.EVAL_LOSS: loss}) for loss in losses]
    return (*steps, *evaluations)


def make_record(rows: tuple[StepMetrics, ...], *, ended_because: str = "") -> RunRecord:
    plan = make_plan_of(MadeRun(run_id="a", expert="json"))
    outcome = Outcome(
        run_id="a", status="done", exit_code=0, started_at="2026-11-15", pid=1, ended_because=ended_because
    )
    return RunRecord(paths=RunPaths(Path("runs/a")), plan=plan, outcome=outcome, rows=rows)


def make_result(right: int, total: int = 100, *, first: int = 0) -> EvalResult:
    """`right` rows from `first` on are correct."""
    passed = [first <= index < first + right for index in range(total)]
    checks = (Check(name="parses", title="parses", checker="c"), Check(name="equal", title="equals", checker="c"))
    verdicts = [Verdict(checks={"parses": True, "equal": one}) for one in passed]
    answers = tuple(
        AnswerResult(
            key=f"{index:03d}",
            instruction="?",
            reference="a",
            answer="a",
            checks={"parses": True, "equal": one},
            reason="",
            num_tokens=1,
            end="stop",
        )
        for index, one in enumerate(passed)
    )
    return EvalResult(
        expert="json",
        subject="run a",
        base="tiny",
        split="test",
        source="test.jsonl",
        num_rows=total,
        main_check="equal",
        checks=summarize_checks(checks, verdicts),
        answers=answers,
        greedy=True,
        seed=42,
        max_new_tokens=512,
        seconds=1.0,
        judging_seconds=1.0,
        versions={},
        made_at="2026-11-15",
    )


OLD, NEW = make_record(make_rows(26, 2.0, (0.5, 0.6))), make_record(make_rows(25, 1.0, (0.4, 0.3)))


def test_speedup_is_the_ratio_of_median_rows_per_second() -> None:
    verdict = make_verdict((OLD, NEW), (make_result(90), make_result(90)), 0.05)
    assert verdict.rows == (78.0, 75.0)
    assert verdict.speedup == pytest.approx(25 / 13)
    assert verdict.notes == ()


@pytest.mark.parametrize(
    ("new", "max_regression", "is_open"),
    [
        (make_result(90), 0.05, True),  # nothing changed
        (make_result(70), 0.05, False),  # twenty lost
        (make_result(70), 0.25, True),  # allowed
        (make_result(84), 0.05, False),
        (make_result(86), 0.05, True),  # a drop of four is allowed
        (make_result(100), 0.05, True),
    ],
)
def test_gate_closes_beyond_the_allowed_regression(new: EvalResult, max_regression: float, is_open: bool) -> None:
    verdict = make_verdict((OLD, NEW), (make_result(90), new), max_regression)
    assert verdict.gate.is_open is is_open


def test_different_row_counts_are_noted() -> None:
    short = make_record(make_rows(13, 1.0), ended_because="stopped early: no better for 3 evaluations")
    verdict = make_verdict((OLD, short), (make_result(90), make_result(90)), 0.05)
    assert verdict.notes == (
        "new: stopped early: no better for 3 evaluations",
        "the old run trained 78 rows, the new one 39: their quality is not comparable",
    )


def test_run_without_steps_has_no_speedup() -> None:
    verdict = make_verdict((make_record(()), NEW), (make_result(1), make_result(1)), 0.05)
    assert verdict.speedup is None
