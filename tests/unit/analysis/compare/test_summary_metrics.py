"""Results, and the mark of the best of comparable runs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from launcher.analysis.compare.comparability import collect_cautions
from launcher.analysis.compare.load_run import RunFacts, Traits
from launcher.analysis.compare.model import Figure
from launcher.analysis.compare.render_text import format_figure
from launcher.analysis.compare.summary_metrics import compute_wall_clock, make_figures
from launcher.core import metrics
from tests.unit.analysis.compare.made_facts import TRAITS, make_facts


def figure(key: str, *runs: RunFacts) -> Figure:
    return next(one for one in make_figures(runs) if one.key == key)


def with_eval(name: str, *losses: float, **changes: object) -> RunFacts:
    return make_facts(name, {metrics.EVAL_LOSS: losses}, **changes)  # type: ignore[arg-type]


def test_lowest_loss_is_best_and_last_is_final() -> None:
    one, other = with_eval("one", 3, 1, 2), with_eval("other", 3, 1.5, 1.4)
    assert figure("eval_loss_best", one, other).values == (1, 1.4)
    assert figure("eval_loss_best", one, other).best == {0: 2}
    assert figure("eval_loss_final", one, other).values == (2, 1.4)
    assert figure("eval_loss_final", one, other).best == {1: 2}


def test_final_training_loss_is_the_mean_of_the_last_twentieth() -> None:
    losses = [5.0] * 95 + [1.0, 2.0, 3.0, 2.0, 2.0]
    assert figure("train_loss_final", make_facts("a", {metrics.TRAIN_LOSS: losses})).values == (2.0,)
    skipped = [5.0] * 95 + [1.0, 2.0, 3.0, 2.0, math.nan]
    assert figure("train_loss_final", make_facts("a", {metrics.TRAIN_LOSS: skipped})).values == (2.0,)


def test_run_that_diverged_has_no_final_training_loss() -> None:
    diverged = make_facts("a", {metrics.TRAIN_LOSS: [4.0] * 30 + [math.nan] * 30})
    assert figure("train_loss_final", diverged, make_facts("b")).values == (None, 1.0)


def test_losses_on_different_data_have_no_best() -> None:
    other_data = replace(TRAITS, data_key="f" * 64)
    unknown = replace(TRAITS, data_key=None)
    runs = (with_eval("a", 2.0), with_eval("b", 1.0, traits=other_data), with_eval("c", 0.5, traits=unknown))
    assert figure("eval_loss_best", *runs).best == {}
    within = figure("eval_loss_best", *runs, with_eval("d", 0.9, traits=other_data))
    assert within.best == {3: 2}  # of the two of its data; c is better by a number that says nothing


@pytest.mark.parametrize("changes", [{"status": "stopped"}, {"traits": replace(TRAITS, base="other")}])
def test_losses_have_no_best_where_a_caveat_says_so(changes: dict[str, Any]) -> None:
    assert figure("eval_loss_final", with_eval("a", 2.0), with_eval("b", 1.0, **changes)).best == {}


@pytest.mark.parametrize("changes", [{"steps_done": 3}, {"oom_fallbacks": ("micro-batch 2",)}])
def test_speeds_have_no_best_where_a_caveat_says_so(changes: dict[str, Any]) -> None:
    slow, fast = ({metrics.TOKENS_PER_SECOND: [rate] * 3} for rate in (100.0, 900.0))
    assert figure("tokens_per_second", make_facts("a", slow), make_facts("b", fast, **changes)).best == {}


def test_random_weights_are_never_the_best() -> None:
    random = replace(TRAITS, random_weights=True)
    assert figure("eval_loss_best", with_eval("a", 2.0, traits=random), with_eval("b", 9.0, traits=random)).best == {}


def test_equal_runs_share_the_mark_or_have_none() -> None:
    assert figure("eval_loss_best", with_eval("a", 1.0), with_eval("b", 1.0)).best == {}
    assert figure("eval_loss_best", with_eval("a", 1.0), with_eval("b", 1.0005), with_eval("c", 2.0)).best == {
        0: 3,
        1: 3,
    }
    assert figure("eval_loss_best", with_eval("a", 1.0), with_eval("b", 1.01)).best == {0: 2}
    waits = [
        make_facts(str(wait), {metrics.DATA_WAIT_SHARE: [wait], metrics.STEP_SECONDS: [1.0]}) for wait in (0.020, 0.024)
    ]
    assert figure("data_wait_share", *waits).best == {}


def test_data_wait_is_the_share_of_the_time_of_all_steps() -> None:
    """One long stall counts, as in the report, in doctor and in the time breakdown: it is no median."""
    steps = {metrics.STEP_SECONDS: [1.0, 1.0, 8.0], metrics.DATA_WAIT_SHARE: [0.0, 0.0, 0.5]}
    assert figure("data_wait_share", make_facts("a", steps)).values[0] == pytest.approx(0.4)
    host = {metrics.STEP_SECONDS: [1.0, 3.0], metrics.DATA_WAIT_SECONDS: [0.0, 1.0]}
    assert figure("data_wait_share", make_facts("a", host)).values[0] == pytest.approx(0.25)


def test_speed_is_marked_among_runs_of_the_same_model() -> None:
    fast, slow = ({metrics.TOKENS_PER_SECOND: [100.0, rate, rate]} for rate in (9000.0, 5000.0))
    tiny = replace(TRAITS, base="tiny")
    runs = (make_facts("fast", fast), make_facts("slow", slow))
    assert figure("tokens_per_second", *runs).values == (9000, 5000)  # the first step compiles: medians
    assert figure("tokens_per_second", *runs).best == {0: 2}
    assert figure("tokens_per_second", runs[0], make_facts("other", slow, traits=tiny)).best == {}
    mfu = [make_facts(str(share), {metrics.DEVICE_MFU: [share]}, traits=tiny) for share in (0.3, 0.5)]
    assert figure("mfu", *mfu, make_facts("a", {metrics.DEVICE_MFU: [0.4]})).best == {1: 3}  # of any model


def test_mfu_is_not_marked_if_the_speed_changed_during_a_run() -> None:
    steady, slowed = [1800.0] * 40, [1800.0] * 20 + [800.0] * 20
    runs = [
        make_facts(name, {metrics.TOKENS_PER_SECOND: rates, metrics.DEVICE_MFU: [rate / 10_000 for rate in rates]})
        for name, rates in (("steady", steady), ("slower", [1500.0] * 40), ("slowed", slowed))
    ]
    assert figure("mfu", *runs[:2]).best == {0: 2}
    assert figure("mfu", runs[0], runs[2]).best == {}


def test_crashed_run_is_not_the_fastest() -> None:
    whole = make_facts("whole", {metrics.TOTAL_SECONDS: [10.0, 20.0]})
    dead = make_facts("dead", {metrics.TOTAL_SECONDS: [10.0]}, status="crashed", num_steps=2)
    slower = make_facts("slower", {metrics.TOTAL_SECONDS: [10.0, 30.0]})
    assert figure("wall_clock", whole, dead).best == {}
    assert figure("wall_clock", whole, dead, slower).best == {0: 2}


def test_cost_is_measured_time_at_the_planned_price() -> None:
    traits = replace(TRAITS, price_per_hour=3.0)
    assert figure("cost", make_facts("a", {metrics.TOTAL_SECONDS: [1800.0]}, traits=traits)).values == (1.5,)
    assert "cost" not in {one.key for one in make_figures([make_facts("a")])}


def test_costs_have_a_currency_and_are_compared_within_it() -> None:
    def make(name: str, currency: str, seconds: float) -> RunFacts:
        traits = replace(TRAITS, price_per_hour=3.0, currency=currency)
        return make_facts(name, {metrics.TOTAL_SECONDS: [seconds]}, traits=traits)

    same = figure("cost", make("a", "EUR", 1800.0), make("b", "EUR", 3600.0), make_facts("c"))
    assert (same.unit, same.best, format_figure(same, 0)) == ("EUR", {0: 2}, "1.50 EUR ★")
    mixed = figure("cost", make("a", "EUR", 1800.0), make("b", "USD", 3600.0))
    assert (mixed.unit, mixed.best, format_figure(mixed, 0)) == ("", {}, "1.50")
    titles = [caution.title for caution in collect_cautions([make("a", "EUR", 1.0), make("b", "", 1.0)])]
    assert titles == ["The prices are in different currencies"]


def test_wall_clock_falls_back_on_attempts_then_on_steps() -> None:
    steps = {metrics.STEP_SECONDS: [2.0, 2.0], metrics.EVAL_SECONDS: [6.0]}
    assert compute_wall_clock(make_facts("a", steps)) == 10.0
    assert compute_wall_clock(make_facts("a", steps, attempt_seconds=60.0)) == 60.0
    assert (
        compute_wall_clock(make_facts("a", {**steps, metrics.TOTAL_SECONDS: [5.0, 42.0]}, attempt_seconds=60.0)) == 42.0
    )
    assert compute_wall_clock(make_facts("a")) is None


def test_prediction_error_uses_the_peak() -> None:
    run = make_facts("a", {metrics.PEAK_ALLOCATED_GIB: [10.0, 15.0, 12.0]})
    assert figure("prediction_error", run).values == pytest.approx((0.2,))
    assert figure("prediction_error", run).best == {}
    assert figure("peak_allocated_gib", run).values == (15.0,)


def test_goodput_comes_from_the_outcome() -> None:
    run = make_facts("a", {metrics.GOODPUT: [0.2, 0.7]})
    assert figure("goodput", run).values == (0.7,)
    assert figure("goodput", replace(run, goodput={metrics.GOODPUT: 0.75})).values == (0.75,)


def test_results_of_no_run_are_omitted() -> None:
    keys = [one.key for one in make_figures([make_facts("a")])]
    assert keys == ["train_loss_final", "predicted_gib", "card_gib", "steps"]
    nothing = make_facts("a", {}, status="not started", traits=Traits())
    assert make_figures([nothing]) == ()
