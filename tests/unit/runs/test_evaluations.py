"""Evaluations of a run: which file represents the base model and the adapter, and which files are unreadable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.core.metrics import TRAIN_LOSS
from launcher.core.run_paths import RunPaths
from launcher.judges.results import load_result
from launcher.runs.evaluations import RunEvaluations, load_evaluations, order_steps
from launcher.runs.record import RunRecord, load_record
from tests.made_evaluations import make_evaluation
from tests.made_runs import MadeRun, write_evaluation, write_run

MADE = MadeRun(run_id="made", num_steps=30, task_rates=(0.1, 0.6))
RATES = {"parses": 0.9, "matches": 0.5}


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """Write a run evaluated at steps 0, 10, 20 and 30."""
    return write_run(tmp_path, MADE)


def load(paths: RunPaths) -> RunEvaluations:
    return load_evaluations(load_record(paths))


def with_best(paths: RunPaths, step: int, *, is_loaded: bool) -> RunRecord:
    record = load_record(paths)
    assert record.outcome is not None
    schedule = record.plan.schedule.model_copy(update={"load_best_model_at_end": is_loaded})
    plan = record.plan.model_copy(update={"schedule": schedule})
    return replace(record, plan=plan, outcome=record.outcome.model_copy(update={"best_step": step}))


def test_base_is_step_0_and_the_adapter_the_last_step(paths: RunPaths) -> None:
    found = load(paths)
    assert found.base is not None
    assert found.trained is not None
    assert (found.base.step, found.trained.step, found.kept_step) == (0, 30, 30)
    assert found.base.result.main.rate == pytest.approx(0.1)
    assert found.trained.result.main.rate == pytest.approx(0.6)
    assert (found.full_eval, found.unreadable, found.adapter) == (None, (), found.trained)


def test_best_weights_use_the_evaluation_of_their_step(paths: RunPaths) -> None:
    found = load_evaluations(with_best(paths, 20, is_loaded=True))
    assert found.trained is not None
    assert (found.trained.step, found.kept_step) == (20, 20)
    last = load_evaluations(with_best(paths, 20, is_loaded=False))  # the best step is known but was not loaded
    assert last.trained is not None
    assert (last.trained.step, last.kept_step) == (30, 30)


def test_last_evaluation_is_used_if_the_best_step_has_none(paths: RunPaths) -> None:
    paths.evaluation_at(20).unlink()
    found = load_evaluations(with_best(paths, 20, is_loaded=True))
    assert found.trained is not None
    assert (found.trained.step, found.kept_step, found.unreadable) == (30, 20, ())
    assert order_steps([10, 30, 20], 20) == [20, 30, 10]


def test_evaluation_with_the_most_answers_represents_the_adapter(paths: RunPaths) -> None:
    write_evaluation(paths.evaluation, make_evaluation(RATES, num_rows=200, split="test"))
    found = load(paths)
    assert found.full_eval is not None
    assert found.adapter is found.full_eval
    write_evaluation(paths.evaluation, make_evaluation(RATES, num_rows=8, split="test"))
    few = load(paths)
    assert few.adapter is few.trained


def test_evaluation_before_a_resume_is_outdated(paths: RunPaths) -> None:
    write_evaluation(paths.evaluation, make_evaluation(RATES, made_at="2026-11-15T09:00:00+00:00"))
    found = load(paths)
    assert (found.full_eval, found.is_outdated) == (None, True)
    write_evaluation(paths.evaluation, make_evaluation(RATES, made_at="some day"))
    assert load(paths).full_eval is not None


@pytest.mark.parametrize("text", ["", "{}", "\x00", '{"schema_version": 1}'])
def test_unreadable_files_are_listed(paths: RunPaths, text: str) -> None:
    paths.evaluation_at(0).write_text(text)
    paths.evaluation_at(30).write_text(text)
    paths.evaluation.write_text(text)
    found = load(paths)
    assert set(found.unreadable) == {"evaluations/step-000000.json", "evaluations/step-000030.json", "eval.json"}
    assert (found.base, found.full_eval) == (None, None)
    assert found.trained is not None
    assert found.trained.step == 20  # the last readable one


def test_evaluation_without_its_main_check_is_unreadable(paths: RunPaths) -> None:
    result = make_evaluation(RATES).model_copy(update={"main_check": "another"})
    write_evaluation(paths.evaluation, result)
    assert load(paths).unreadable == ("eval.json",)


def test_run_without_evaluations_has_none(tmp_path: Path) -> None:
    found = load(write_run(tmp_path, MadeRun(run_id="plain", num_steps=3)))
    assert found == RunEvaluations(kept_step=3)
    assert (found.adapter, found.gain) == (None, None)
    assert load(write_run(tmp_path, MadeRun(run_id="fresh", num_steps=0, status=None))) == RunEvaluations()


def test_steps_to_be_repeated_are_ignored(paths: RunPaths) -> None:
    """The files were written before the run was resumed from an earlier checkpoint."""
    record = load_record(paths)
    found = load_evaluations(replace(record, rows=tuple(row for row in record.rows if row.step <= 15)))
    assert found.trained is not None
    assert found.trained.step == 10


def test_other_files_are_ignored(paths: RunPaths) -> None:
    for name in ("slice.json", "step-x.json", "step-000030.json.tmp", ".step-000020.json.1.tmp"):
        (paths.evaluations / name).write_text("{}")
    assert load(paths).unreadable == ()


def test_gain_is_computed_on_the_same_rows(paths: RunPaths) -> None:
    gain = load(paths).gain
    assert gain is not None
    check, change, warnings = gain
    assert check == load_result(paths.evaluation_at(30)).main_check
    assert (change.num_rows, change.num_won, change.num_lost, warnings) == (40, 20, 0, ())
    for step in (10, 20, 30):
        paths.evaluation_at(step).unlink()
    assert load(paths).gain is None
    write_evaluation(paths.evaluation, make_evaluation(RATES, num_rows=60))
    of_whole = load(paths).gain
    assert of_whole is not None
    assert (of_whole[1].num_rows, of_whole[2]) == (40, ("40 rows in common, of 40 before and 60 now",))
    write_evaluation(paths.evaluation, make_evaluation(RATES, first_row=900, split="test"))
    assert load(paths).gain is None  # no row in common


def test_row_of_step_0_is_not_a_training_step(paths: RunPaths) -> None:
    record = load_record(paths)
    assert record.rows[0].step == 0
    assert TRAIN_LOSS not in record.rows[0].values
    assert [row.step for row in record.steps] == list(range(1, 31))
