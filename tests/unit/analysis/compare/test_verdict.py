"""One line per pair of runs, and what it refuses to compare."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from launcher.analysis.compare.comparability import collect_cautions
from launcher.analysis.compare.load_run import JudgedRun, RunFacts
from launcher.analysis.compare.summary_metrics import find_speed_change
from launcher.analysis.compare.verdict import format_verdict
from launcher.core import metrics
from tests.unit.analysis.compare.made_facts import TRAITS, compare, make_facts, make_judged, with_answers


def lines(*runs: RunFacts) -> list[str]:
    comparison = compare(*runs)
    return ["".join(format_verdict(comparison, verdict)) for verdict in comparison.verdicts]


def judged(
    name: str, passed: int, total: int = 24, columns: dict[str, list[float]] | None = None, **more: Any
) -> RunFacts:
    """The first rows pass, so that two runs differ in as many rows as their numbers differ."""
    result = make_judged({"matches": 1.0}, num_rows=total, **more)
    verdicts = {key: {"matches": at < passed} for at, key in enumerate(sorted(result.verdicts))}
    facts = make_facts(name, columns)
    return replace(facts, judged=JudgedRun(trained=replace(result, verdicts=verdicts)))


def steady(speed: float, count: int = 40) -> dict[str, list[float]]:
    return {metrics.TOKENS_PER_SECOND: [speed] * count, metrics.TRAIN_LOSS: [3.0] * (count - 1) + [0.5]}


def test_answers_that_differ_in_one_row_tie() -> None:
    slowed = {**steady(1800), metrics.TOKENS_PER_SECOND: [1800.0] * 20 + [800.0] * 20}
    lower = {**slowed, metrics.TRAIN_LOSS: [3.0] * 37 + [0.4] * 3}
    (line,) = lines(judged("r8", 23, columns=steady(1000)), judged("r16", 24, columns=lower))
    assert line == (
        "r16 against r8: answers tie (1 of 24 differs), training loss lower (0.4000 against 1.750), "
        "speed not comparable (the speed changed during the run)"
    )


def test_answers_that_differ_significantly_are_better_or_worse() -> None:
    low, high = with_answers("low", 0.1, 0.5), with_answers("high", 0.1, 0.9)
    (line,) = lines(low, high)
    assert line.startswith("high against low: answers better (90.0 % against 50.0 %, ")
    (line,) = lines(high, low)
    assert line.startswith("low against high: answers worse (50.0 % against 90.0 %, ")


def test_several_rows_may_differ_by_chance() -> None:
    (line,) = lines(judged("a", 20), judged("b", 23))
    assert "answers tie (3 of 24 differ, may be chance)" in line


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (with_answers("b", 0.1, 0.9, checker="made 2.0"), "answers not comparable (different judges)"),
        (
            with_answers("b", 0.1, 0.9, max_new_tokens=16, num_cut=3),
            "answers not comparable (different limits of the answers' length)",
        ),
        (with_answers("b", 0.1, 0.9, max_new_tokens=16), "answers better"),
        (with_answers("b", 0.1, 0.9, num_rows=30), "answers not comparable (different rows)"),
        (make_facts("b"), "answers not comparable (b has none)"),
    ],
)
def test_different_evaluations_are_not_compared(other: RunFacts, words: str) -> None:
    (line,) = lines(with_answers("a", 0.1, 0.5), other)
    assert words in line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data_key": "f" * 64}, "training loss not comparable (the runs were trained on different data)"),
        ({"random_weights": True}, "training loss not comparable (trained from random weights)"),
        ({"hardware": "8 x H100"}, "speed not comparable (the hardware differs)"),
        ({"sequence_length": 4096}, "speed not comparable (the sequence length differs)"),
        ({"base": "tiny"}, "speed not comparable (the runs have different base models)"),
        ({"precision": "fp16"}, "speed higher by 50 %"),
        ({}, "training loss equal, speed higher by 50 %"),
    ],
)
def test_losses_and_speed_are_compared_where_it_is_fair(changes: dict[str, Any], words: str) -> None:
    (line,) = lines(make_facts("a", steady(1000)), make_facts("b", steady(1500), traits=replace(TRAITS, **changes)))
    assert words in line
    assert "answers" not in line


def test_held_out_loss_is_preferred() -> None:
    one, other = ({**steady(1000), metrics.EVAL_LOSS: [loss]} for loss in (1.0, 2.0))
    (line,) = lines(make_facts("a", one), make_facts("b", other))
    assert line == "b against a: validation loss higher (2.000 against 1.000), speed equal"


@pytest.mark.parametrize("metric", [metrics.EVAL_LOSS, metrics.TRAIN_LOSS])
@pytest.mark.parametrize("is_second", [False, True])
def test_run_that_diverged_is_not_better(metric: str, is_second: bool) -> None:
    good, bad = (
        make_facts(name, {**steady(1000), metric: [2.0] * 37 + [loss] * 3})
        for name, loss in (("a", 1.0), ("b", math.nan))
    )
    (line,) = lines(*((good, bad) if is_second else (bad, good)))
    title = "validation loss" if metric == metrics.EVAL_LOSS else "training loss"
    assert f"{title} not comparable (the {title} at the end is not a number)" in line


def test_speed_of_zero_is_not_compared() -> None:
    (line,) = lines(make_facts("a", steady(0)), make_facts("b", steady(1000)))
    assert "speed not comparable" in line


def test_unfinished_run_has_no_final_loss() -> None:
    (line,) = lines(make_facts("a", steady(1000)), make_facts("b", steady(1000), status="crashed"))
    assert "training loss not comparable (not finished)" in line


def test_few_runs_are_compared_in_pairs_and_many_with_the_best() -> None:
    few = [make_facts(str(at), steady(1000.0 + at)) for at in range(5)]
    assert len(lines(*few)) == 10
    losses = [{**steady(1000.0), metrics.EVAL_LOSS: [1.0 + abs(at - 7)]} for at in range(12)]
    comparison = compare(*(make_facts(f"r{at}", loss) for at, loss in enumerate(losses)))
    assert [verdict.against for verdict in comparison.verdicts] == [7] * 11
    assert comparison.about_verdicts == "Each run against r7, the best by validation loss, final."
    assert compare(make_facts("one")).verdicts == ()


def test_tie_is_marked_on_the_main_metric() -> None:
    comparison = compare(judged("r8", 23), judged("r16", 24))
    (main,) = [figure for figure in comparison.figures if figure.key == "task_matches"]
    assert comparison.figures[0] == main
    assert (main.best, main.ties) == ({}, (0, 1))


@pytest.mark.parametrize(
    ("speeds", "step"),
    [
        ([100.0] + [1800.0] * 19 + [800.0] * 20, 21),  # the first step compiles
        ([100.0] + [800.0] * 20 + [1800.0] * 20, 22),
        ([1800.0] * 10 + [700.0] + [1800.0] * 20, None),  # one slow step
        ([1800.0] * 10 + [1300.0] * 20, None),
        ([1800.0, 800.0], None),
        ([], None),
    ],
)
def test_speed_that_halves_is_a_caveat(speeds: list[float], step: int | None) -> None:
    run = make_facts("a", {metrics.TOKENS_PER_SECOND: speeds})
    change = find_speed_change(run)
    cautions = [caution for caution in collect_cautions([run]) if caution.title == "The speed changed during the run"]
    assert (change is not None, len(cautions)) == (step is not None, int(step is not None))
    if change is not None and step is not None:
        assert abs(change[2] - step) <= 3
        assert f"a ({'1.8k to 800' if speeds[1] > 1000 else '800 to 1.8k'} tokens per second" in cautions[0].detail


def best(key: str, *runs: RunFacts) -> dict[int, int]:
    return next(figure.best for figure in compare(*runs).figures if figure.key == key)


def test_goodput_has_a_star_only_at_equal_speed() -> None:
    def run(name: str, speed: float, goodput: float) -> RunFacts:
        return make_facts(name, {**steady(speed), metrics.GOODPUT: [goodput] * 40})

    assert best("goodput", run("r8", 700, 0.557), run("r16", 870, 0.517)) == {}
    assert best("goodput", run("r8", 870, 0.557), run("r16", 865, 0.517)) == {0: 2}
    assert best("tokens_per_second", run("r8", 700, 0.557), run("r16", 870, 0.517)) == {1: 2}


def test_disturbed_run_has_no_star_for_speed_and_time() -> None:
    slow = {**steady(1800), metrics.TOKENS_PER_SECOND: [1800.0] * 20 + [800.0] * 20}
    runs = [
        make_facts("a", {**columns, metrics.TOTAL_SECONDS: [t] * 40})
        for columns, t in ((steady(900), 9.0), (slow, 8.0))
    ]
    assert best("tokens_per_second", *runs) == best("wall_clock", *runs) == {}


def test_hardware_decides_whether_speeds_are_comparable() -> None:
    other = make_facts("b", steady(9000), traits=replace(TRAITS, hardware="8 x H100"))
    assert best("tokens_per_second", make_facts("a", steady(1000)), other) == {}


def test_loss_that_falls_far_is_drawn_on_a_logarithmic_axis() -> None:
    def is_log(*losses: float) -> bool:
        return compare(make_facts("a", {metrics.TRAIN_LOSS: losses})).charts[0].is_log

    assert is_log(3.0, 0.1, 0.05)
    assert not is_log(3.0, 0.1, 0.07)
    assert not is_log(3.0, -0.1, 0.05)
    assert not is_log(3.0)
