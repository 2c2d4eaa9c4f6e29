"""Comparison of task metrics: which evaluation counts, and when a run is the best."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.analysis.compare import load_run_facts
from launcher.analysis.compare.curves import make_axis, make_shares
from launcher.analysis.compare.load_run import JudgedRun, RunFacts, make_columns
from launcher.analysis.compare.model import Comparison, Figure
from launcher.analysis.compare.summary_metrics import sum_recorded_seconds
from launcher.analysis.compare.tasks import choose_evaluations, list_main_checks
from launcher.core.metrics import EVAL_LOSS, EVAL_SECONDS, STEP_SECONDS, TASK_SECONDS, StepMetrics, is_task_metric
from tests.made_evaluations import make_evaluation
from tests.made_runs import MadeRun, write_evaluation, write_run
from tests.unit.analysis.compare.made_facts import (
    TRAITS,
    compare,
    make_column,
    make_facts,
    make_judged,
    with_answers,
)


def figure(key: str, *runs: RunFacts) -> Figure:
    return next(one for one in compare(*runs).figures if one.key == key)


def with_whole(run: RunFacts, rate: float, **changes: object) -> RunFacts:
    whole = make_judged({"parses": 1.0, "matches": rate}, split="test", first_row=900, **changes)
    return replace(run, judged=replace(run.judged, full_eval=whole))


def titles(comparison: Comparison) -> list[str]:
    return [caution.title for caution in comparison.cautions]


def test_highest_rate_is_best_and_has_an_interval() -> None:
    low, high = with_answers("low", 0.1, 0.5), with_answers("high", 0.1, 0.9)
    result = figure("task_matches", low, high)
    assert result.values == (0.5, 0.9)
    assert result.best == {1: 2}
    assert (result.title, result.unit, result.better) == ("eval/matches", "share", "higher")
    first = result.intervals[0]
    assert first is not None
    assert (first.low, first.high) == pytest.approx((0.352, 0.648), abs=1e-3)
    assert first.num_rows == 40
    assert "same query or same result; judged by made 1.0" in result.note


def test_insignificant_differences_share_the_mark_or_have_none() -> None:
    one, other = with_answers("one", 0.1, 0.8), with_answers("other", 0.1, 0.85)
    assert figure("task_matches", one, other).best == {}  # two rows of forty
    assert figure("task_matches", one, other, with_answers("low", 0.1, 0.3)).best == {0: 3, 1: 3}
    many = [with_answers(name, 0.1, rate, num_rows=1000) for name, rate in (("a", 0.8), ("b", 0.85))]
    assert figure("task_matches", *many).best == {1: 2}  # as much of a thousand is none


def test_different_rows_or_judges_have_no_best() -> None:
    low = with_answers("low", 0.1, 0.3)
    for other in (
        with_answers("other", 0.1, 0.9, checker="made 2.0"),
        with_answers("other", 0.1, 0.9, num_rows=64),
        with_answers("other", 0.1, 0.9, first_row=1),
        with_answers("other", 0.1, 0.9, greedy=False),
        with_answers("other", 0.1, 0.9, max_new_tokens=16, num_cut=1),
        replace(with_answers("other", 0.1, 0.9), traits=replace(TRAITS, random_weights=True)),
    ):
        assert figure("task_matches", low, other).best == {}
    elsewhere = replace(with_answers("b", 0.1, 0.9), traits=replace(TRAITS, data_key="f" * 64, base="other"))
    assert figure("task_matches", low, elsewhere).best == {1: 2}  # same rows, so comparable


def test_different_rows_or_judges_give_a_caveat() -> None:
    low = with_answers("low", 0.1, 0.3)
    judged = compare(low, with_answers("other", 0.1, 0.9, checker="made 2.0"))
    assert titles(judged) == ["Answers were judged by different judges (eval/matches)"]
    assert judged.cautions[0].spoils == ("task metrics",)
    assert "made 1.0: low; made 2.0: other." in judged.cautions[0].detail
    rows = compare(low, with_answers("other", 0.1, 0.9, num_rows=64))
    assert titles(rows) == ["Different rows were evaluated"]
    assert "40 of 480 validation rows" in rows.cautions[0].detail
    same_number = compare(low, with_answers("other", 0.1, 0.9, first_row=1))
    assert titles(same_number) == ["Different rows were evaluated"]
    assert titles(compare(low, with_answers("b", 0.1, 0.9, greedy=False))) == ["The decoding differs"]
    shorter = compare(low, with_answers("b", 0.1, 0.9, max_new_tokens=16, num_cut=3))
    assert titles(shorter) == ["The answers' length was limited differently"]
    assert "at most 16 new tokens (3 answers cut off): b" in shorter.cautions[0].detail
    assert titles(compare(low, with_answers("b", 0.1, 0.9, max_new_tokens=16))) == []
    assert titles(compare(low, with_answers("b", 0.1, 0.9))) == []
    assert titles(compare(low, make_facts("plain"))) == []


def test_launcher_eval_is_used_if_all_runs_have_it() -> None:
    one, other = with_answers("one", 0.1, 0.5), with_answers("other", 0.1, 0.6)
    assert figure("task_matches", with_whole(one, 0.2), with_whole(other, 0.3)).values == (0.2, 0.3)
    assert figure("task_matches", with_whole(one, 0.2), other).values == (0.5, 0.6)
    apart = (with_whole(one, 0.2), with_whole(other, 0.3, num_rows=100))  # other rows each, but the same on the way
    assert figure("task_matches", *apart).values == (0.5, 0.6)
    only = replace(one, judged=JudgedRun(full_eval=with_whole(one, 0.2).judged.full_eval))
    assert figure("task_matches", only, other).values == (0.2, 0.6)
    assert figure("task_matches", only, make_facts("plain")).values == (0.2, None)


def test_base_and_gain_follow_the_main_check() -> None:
    run = with_answers("one", 0.1, 0.5)
    keys = [one.key for one in compare(run).figures]
    assert keys[:4] == ["task_matches", "task_base_matches", "task_gain_matches", "task_parses"]
    assert keys[4] == "train_loss_final"
    assert figure("task_base_matches", run).values == (0.1,)
    gain = figure("task_gain_matches", run)
    assert (gain.values, gain.unit, gain.best) == ((0.4,), "points", {})
    interval = gain.intervals[0]
    assert interval is not None
    assert 0.2 < interval.low < 0.4 < interval.high < 0.6
    without = replace(run, judged=replace(run.judged, base=None))
    assert "task_gain_matches" not in [one.key for one in compare(without).figures]


def test_ungraded_check_has_no_value() -> None:
    run = with_answers("one", 0.1, 0.5, columns=False)
    assert run.judged.trained is not None
    ungraded = run.judged.trained.checks["parses"].model_copy(update={"num_judged": 0, "num_passed": 0})
    trained = replace(run.judged.trained, checks={**run.judged.trained.checks, "parses": ungraded})
    unjudged = replace(run, judged=replace(run.judged, trained=trained))
    assert "task_parses" not in [one.key for one in compare(unjudged).figures]
    both = figure("task_parses", unjudged, with_answers("other", 0.1, 0.5))
    assert both.values == (None, 0.75)
    assert both.intervals[0] is None


def test_intervals_are_explained_where_shown() -> None:
    assert "In parentheses" not in compare(make_facts("plain")).about_best
    assert "In parentheses" in compare(with_answers("a", 0.1, 0.2)).about_best


def test_main_check_is_drawn_from_step_0() -> None:
    result = compare(with_answers("one", 0.1, 0.5), make_facts("plain"))
    assert [chart.title for chart in result.charts] == ["same query or same result (eval/matches)", "training loss"]
    chart = result.charts[0]
    assert (chart.metric, chart.unit, chart.better, chart.is_sparse) == ("eval/matches", "share", "higher", True)
    assert result.runs[0].series[0].step == (0, 2, 4)
    assert result.runs[0].axis.step == (0, 1, 2, 3, 4)
    assert [series.metric for series in result.runs[1].series] == ["train/loss"]
    assert (result.runs[0].judged_by, result.runs[1].judged_by) == ("made 1.0", None)
    assert "40 of 480 validation rows" in str(result.runs[0].judged_on)


def test_each_kind_of_expert_has_its_own_chart() -> None:
    sql = with_answers("sql", 0.1, 0.5)
    judged = make_judged({"parses": 1.0, "result": 0.5}, main_check="result")
    sql = replace(sql, judged=JudgedRun(trained=judged), columns={"eval/result": make_column([0.5], [4])})
    runs = [with_answers("cypher", 0.1, 0.5), sql]
    assert list_main_checks(runs, choose_evaluations(runs)) == ["matches", "result"]
    assert [chart.metric for chart in compare(*runs).charts] == ["eval/matches", "eval/result", "train/loss"]


def test_runs_without_evaluation_have_no_task_metrics() -> None:
    result = compare(make_facts("one"), make_facts("other"))
    assert not any(one.key.startswith("task") for one in result.figures)
    assert "ask metric" not in result.about_best
    assert "ask metric" not in result.about_left_out


def test_losses_and_seconds_are_no_task_metrics() -> None:
    assert not any(map(is_task_metric, (EVAL_LOSS, "eval/", "train/x", TASK_SECONDS)))


def test_metrics_become_columns() -> None:
    rows = [StepMetrics(step=0, epoch=0.0, values={"eval/matches": 0.1, "goodput/fraction": 0.0, "other/x": 1.0})]
    columns = make_columns(rows)
    assert set(columns) == {"eval/matches", "goodput/fraction"}
    assert tuple(columns["eval/matches"].steps) == (0,)


def test_generation_time_counts_without_a_recorded_clock() -> None:
    columns = {
        STEP_SECONDS: make_column([2.0, 2.0]),
        EVAL_SECONDS: make_column([6.0], [2]),
        TASK_SECONDS: make_column([3.0, 4.0], [0, 2]),
    }
    run = replace(make_facts("a"), columns=columns)
    assert sum_recorded_seconds(run) == 17.0
    assert make_axis(run, 100).seconds == (0.0, 5.0, 7.0)
    shares, _ = make_shares(run)
    assert {share.part: share.seconds for share in shares} == {"training": 4.0, "evaluation": 13.0}


def test_evaluations_of_a_run_directory_are_loaded(tmp_path: Path) -> None:
    paths = write_run(tmp_path, MadeRun(run_id="made", num_steps=30, task_rates=(0.1, 0.6)))
    run = load_run_facts(paths)
    assert run.steps_done == 30
    assert tuple(run.column("eval/matches").steps) == (0, 10, 20, 30)
    assert run.judged.trained is not None
    assert figure("task_matches", run).values == (0.6,)
    write_evaluation(paths.evaluation, make_evaluation({"matches": 0.2}, num_rows=100, split="test"))
    assert figure("task_matches", load_run_facts(paths)).values == (0.2,)
    for file in (*paths.evaluations.iterdir(), paths.evaluation):
        file.write_text("torn")
    torn = load_run_facts(paths)
    assert torn.judged == JudgedRun()
    assert not any(one.key.startswith("task") for one in compare(torn).figures)


def test_evaluations_that_are_left_out_are_named(tmp_path: Path) -> None:
    paths = write_run(tmp_path, MadeRun(run_id="a", num_steps=20, task_rates=(0.1, 0.5)))
    paths.evaluation.write_text("{")
    damaged = compare(load_run_facts(paths))
    assert titles(damaged) == ["Evaluations were left out"]
    assert damaged.cautions[0].detail.startswith("a (eval.json cannot be read). ")
    write_evaluation(paths.evaluation, make_evaluation({"matches": 0.5}, made_at="2000-01-01T00:00:00+00:00"))
    assert load_run_facts(paths).left_out == "eval.json is older than the last resume"
