"""Where the seconds went: recorded by the run, or added up from its steps."""

from __future__ import annotations

import pytest

from launcher import metrics
from launcher.compare.facts import RunFacts
from launcher.compare.shares import make_shares
from tests.unit.compare.made_facts import make_facts


def seconds(run: RunFacts) -> dict[str, float]:
    return {share.part: share.seconds for share in make_shares(run)[0]}


def test_recorded_parts_and_the_rest_make_the_whole() -> None:
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
    told = seconds(run)
    assert told == {
        "training": 60.0,
        "data wait": 2.0,
        "evaluation": 5.0,
        "checkpoints": 1.0,
        "compiling": 15.0,
        "start": 10.0,
        "restarts": 3.0,
        "rest": 4.0,
    }
    assert make_shares(run)[1]


def test_without_goodput_training_is_the_steps_without_their_waits() -> None:
    run = make_facts("a", {metrics.STEP_SECONDS: [10.0, 10.0]}, goodput={metrics.DATA_SECONDS: 3.0})
    assert seconds(run) == {"training": 17.0, "data wait": 3.0}


def test_old_runs_are_added_up() -> None:
    columns = {metrics.STEP_SECONDS: [10.0, 10.0], metrics.DATA_WAIT_SECONDS: [1.0, 99.0], metrics.EVAL_SECONDS: [5.0]}
    run = make_facts("a", columns, attempt_seconds=40.0)
    assert seconds(run) == {"training": 9.0, "data wait": 11.0, "evaluation": 5.0, "rest": 15.0}
    assert not make_shares(run)[1]


def test_the_devices_wait_counts_before_the_hosts() -> None:
    columns = {metrics.STEP_SECONDS: [10.0], metrics.DATA_WAIT_SHARE: [0.2], metrics.DATA_WAIT_SECONDS: [9.0]}
    assert seconds(make_facts("a", columns)) == pytest.approx({"training": 8.0, "data wait": 2.0})


def test_parts_that_outgrow_the_clock_leave_no_rest() -> None:
    run = make_facts("a", {metrics.STEP_SECONDS: [10.0]}, attempt_seconds=1.0)
    assert seconds(run) == {"training": 10.0}
    assert make_shares(make_facts("a")) == ((), False)
