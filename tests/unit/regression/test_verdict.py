"""From two run records and two evaluations to one verdict: what is counted, and when the gate closes."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher import metrics
from launcher.metrics import StepMetrics
from launcher.paths import RunPaths
from launcher.quality.judging import Check, Verdict
from launcher.quality.results import AnswerResult, EvalResult, sum_up
from launcher.record import Outcome, RunRecord
from launcher.regression.verdict import make_verdict
from tests.made_runs import MadeRun, make_plan_of


def make_rows(rows_a_step: int, seconds: float, losses: tuple[float, ...] = ()) -> tuple[StepMetrics, ...]:
    """Three steps, the first of which took four times as long; then evaluations."""
    steps = [
        StepMetrics(
            step=step,
            epoch=0.0,
            values={
                metrics.TRAIN_LOSS: 1.0,
                metrics.STEP_SECONDS: taken,
                metrics.SAMPLES_PER_SECOND: rows_a_step / taken,
                metrics.TOKENS_PER_SECOND: 100 * rows_a_step / taken,
                metrics.TOTAL_SECONDS: 30.0 + 10.0 * step,
            },
        )
        for step, taken in ((1, 4 * seconds), (2, seconds), (3, seconds))
    ]
    told = [StepMetrics(step=3, epoch=1.0, values={metrics.EVAL_LOSS: loss}) for loss in losses]
    return (*steps, *told)


def make_record(rows: tuple[StepMetrics, ...], *, loads_best: bool = True, ended_because: str = "") -> RunRecord:
    plan = make_plan_of(MadeRun(run_id="a", expert="json"))
    schedule = plan.schedule.model_copy(update={"load_best_model_at_end": loads_best})
    outcome = Outcome(
        run_id="a", status="done", exit_code=0, started_at="2026-11-15", pid=1, ended_because=ended_because
    )
    return RunRecord(
        paths=RunPaths(Path("runs/a")), plan=plan.model_copy(update={"schedule": schedule}), outcome=outcome, rows=rows
    )


def make_result(right: int, total: int = 100, *, first: int = 0) -> EvalResult:
    """The rows from `first` on are right, as many as told."""
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
        checks=sum_up(checks, verdicts),
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


def test_speed_is_the_median_of_the_steps_and_counts_rows() -> None:
    verdict = make_verdict((OLD, NEW), (make_result(90), make_result(90)), 0.05)
    figures = {figure.key: (figure.old, figure.new) for figure in verdict.figures}
    assert figures == {
        "rows": (78.0, 75.0),
        "steps": (3.0, 3.0),
        metrics.SAMPLES_PER_SECOND: (13.0, 25.0),
        metrics.TOKENS_PER_SECOND: (1300.0, 2500.0),
        "step_seconds": (12.0, 6.0),
        metrics.TOTAL_SECONDS: (60.0, 60.0),
        metrics.EVAL_LOSS: (0.5, 0.3),  # of the best weights, which are the ones that were saved
    }
    assert verdict.speedup == pytest.approx(25 / 13)
    assert verdict.notes == ()


def test_without_the_best_weights_the_last_loss_counts() -> None:
    old = make_record(make_rows(26, 2.0, (0.5, 0.6)), loads_best=False)
    verdict = make_verdict((old, NEW), (make_result(90), make_result(90)), 0.05)
    assert next(figure.old for figure in verdict.figures if figure.key == metrics.EVAL_LOSS) == 0.6


def test_memory_is_told_where_there_is_a_gpu() -> None:
    rows = make_rows(25, 1.0)
    peaks = [row.values | {metrics.PEAK_ALLOCATED_GIB: 3.0 + row.step} for row in rows]
    on_gpu = tuple(StepMetrics(step=i, epoch=0.0, values=values) for i, values in enumerate(peaks))
    verdict = make_verdict((make_record(on_gpu), OLD), (make_result(1), make_result(1)), 0.05, (2.0, 1.0))
    assert "cpu_seconds" not in {figure.key for figure in verdict.figures}
    peak = next(figure for figure in verdict.figures if figure.key == metrics.PEAK_ALLOCATED_GIB)
    assert (peak.old, peak.new, peak.ratio) == (6.0, None, None)


@pytest.mark.parametrize(
    ("now", "max_drop", "is_open"),
    [
        (make_result(90), 0.05, True),  # nothing changed
        (make_result(70), 0.05, False),  # twenty lost
        (make_result(70), 0.25, True),  # allowed
        (make_result(84), 0.05, False),
        (make_result(86), 0.05, True),  # a drop of four is allowed
        (make_result(100), 0.05, True),
    ],
)
def test_the_gate_closes_on_a_real_drop_alone(now: EvalResult, max_drop: float, is_open: bool) -> None:
    verdict = make_verdict((OLD, NEW), (make_result(90), now), max_drop)
    assert verdict.gate.is_open is is_open


def test_each_check_stands_beside_its_old_self() -> None:
    verdict = make_verdict((OLD, NEW), (make_result(90), make_result(88, first=2)), 0.05)
    assert [(check.title, check.is_main) for check in verdict.checks] == [("parses", False), ("equals", True)]
    assert [(check.old.num_passed, check.new.num_passed) for check in verdict.checks] == [(100, 100), (90, 88)]


def test_runs_of_unlike_length_are_noted() -> None:
    short = make_record(make_rows(13, 1.0), ended_because="stopped early: no better for 3 evaluations")
    verdict = make_verdict((OLD, short), (make_result(90), make_result(90)), 0.05)
    assert verdict.notes == (
        "new: stopped early: no better for 3 evaluations",
        "78 rows were trained by the old one, 39 by the new one: their quality hardly compares",
    )


def test_a_run_without_numbers_has_no_speed() -> None:
    verdict = make_verdict((make_record(()), NEW), (make_result(1), make_result(1)), 0.05)
    assert verdict.speedup is None
