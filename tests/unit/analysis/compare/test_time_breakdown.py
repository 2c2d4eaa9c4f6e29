"""Where the seconds went: recorded by the run, or added up from its steps."""

from __future__ import annotations

import pytest

from launcher.analysis.compare.load_run import RunFacts
from launcher.analysis.compare.time_breakdown import make_shares
from launcher.core import metrics
from tests.unit.analysis.compare.made_facts import make_facts


def seconds(run: RunFacts) -> dict[str, float]:
    return {share.part: share.seconds for share in make_shares(run)[0]}


def test_parts_sum_to_the_wall_clock_time() -> None:
    run = make_facts(
        "a",
        {metrics.TOTAL_SECONDS: [50.0, 100.0]},
        goodput={
            metrics.GOODPUT: 0.6,
            metrics.START_SECONDS: 10.0,
            metrics.COMPILE_SECONDS: 15.0,
            metrics.DATA_SECONDS: 2.0,
            metrics.EVALUATION_SECONDS: 5.0,
            metrics.CHECKPOINT_SECONDS: 1.0,
            metrics.RESTART_SECONDS: 3.0,
            metrics.SKIPPED_SECONDS: 0.0,
        },
    )
    breakdown = seconds(run)
    assert breakdown == {
        "training": 60.0,
        "data wait": 2.0,
        "evaluation": 5.0,
        "checkpoints": 1.0,
        "compiling": 15.0,
        "start": 10.0,
        "restarts": 3.0,
        "other": 4.0,
    }
    assert make_shares(run)[1]


def test_without_goodput_training_is_the_steps_without_their_waits() -> None:
    run = make_facts("a", {metrics.STEP_SECONDS: [10.0, 10.0]}, goodput={metrics.DATA_SECONDS: 3.0})
    assert seconds(run) == {"training": 17.0, "data wait": 3.0}


def test_breakdown_falls_back_to_steps_and_evaluations() -> None:
    columns = {metrics.STEP_SECONDS: [10.0, 10.0], metrics.DATA_WAIT_SECONDS: [1.0, 99.0], metrics.EVAL_SECONDS: [5.0]}
    run = make_facts("a", columns, attempt_seconds=40.0)
    assert seconds(run) == {"training": 9.0, "data wait": 11.0, "evaluation": 5.0, "other": 15.0}
    assert not make_shares(run)[1]


def test_device_data_wait_is_preferred() -> None:
    columns = {metrics.STEP_SECONDS: [10.0], metrics.DATA_WAIT_SHARE: [0.2], metrics.DATA_WAIT_SECONDS: [9.0]}
    assert seconds(make_facts("a", columns)) == pytest.approx({"training": 8.0, "data wait": 2.0})


def test_parts_longer_than_the_clock_leave_no_other_time() -> None:
    run = make_facts("a", {metrics.STEP_SECONDS: [10.0]}, attempt_seconds=1.0)
    assert seconds(run) == {"training": 10.0}
    assert make_shares(make_facts("a")) == ((), False)
