"""Whether answers are judged while an expert trains, and the reason that is given."""

from __future__ import annotations

import re
from typing import Any

import pytest

from launcher.core.errors import ManifestError
from launcher.plan.model import TaskEvalPlan
from tests.conftest import WriteManifest
from tests.unit.plan.conftest import decision, plan_for


def test_task_eval_is_limited_by_training_time_on_a_known_gpu() -> None:
    plan = plan_for()
    assert plan.task_eval == TaskEvalPlan(judge="cypher", num_rows=64, is_fixed=False, time_share=0.05)
    assert "up to 64 rows, before step 1 and at every evaluation" in decision(plan, "task eval")
    assert "at most 5.0 % of training time, measured on the first evaluation" in decision(plan, "task eval")


def test_manifest_fixes_the_number_of_rows() -> None:
    plan = plan_for(overrides=["evaluation.task_rows=100"])
    assert plan.task_eval == TaskEvalPlan(judge="cypher", num_rows=100, is_fixed=True, time_share=0.05)


def test_smoke_profile_evaluates_24_rows() -> None:
    plan = plan_for(gpu=None, profile="smoke")
    assert plan.task_eval is not None
    assert (plan.task_eval.num_rows, plan.task_eval.is_fixed) == (24, True)


def test_without_a_step_time_estimate_evaluations_take_30_seconds() -> None:
    plan = plan_for(gpu=None, profile="full", cpu_ranks_per_node=1, strategy="ddp")
    assert plan.speed.seconds_per_step is None
    assert plan.task_eval is not None
    assert (plan.task_eval.num_rows, plan.task_eval.is_fixed) == (16, False)
    assert "at most 30 s per evaluation" in decision(plan, "task eval")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"overrides": ["evaluation.task_rows=0"]}, "--set evaluation.task_rows"),
        ({"random_weights": True}, "the weights are random"),
        ({"gpus": 4, "strategy": "fsdp2"}, "no rank holds all weights; run `launcher eval`"),
        ({"gpus": 4, "strategy": "zero3"}, "no rank holds all weights; run `launcher eval`"),
        (
            {"config": {"evaluation_strategy": "no", "load_best_model_at_end": False}},
            "evaluation is off",
        ),
        (
            {"gpu": "h200", "config": {"max_steps": 20}},
            "training takes about 13 s, of which evaluation.task_share allows 5.0 %: too short to judge answers",
        ),
    ],
)
def test_task_eval_is_off_with_a_reason(more: dict[str, Any], reason: str) -> None:
    plan = plan_for(**more)
    assert plan.task_eval is None
    assert decision(plan, "task eval").startswith(f"off | {reason}")


def test_expert_without_a_judge(write_manifest: WriteManifest) -> None:
    path = write_manifest({"name": "expert-poetry"}, drop=("training.decoding",))
    plan = plan_for(str(path))
    assert plan.task_eval is None
    assert "set evaluation.judge" in decision(plan, "task eval")


def test_no_more_rows_than_the_validation_split_has_are_announced(write_manifest: WriteManifest) -> None:
    path = write_manifest({"training.dataset.path": "rows.jsonl", "training.dataset.validation_path": "held.jsonl"})
    row = '{{"question": "Who is {0}?", "schema": "s", "cypher": "MATCH (n) RETURN n.id"}}\n'
    (path.parent / "rows.jsonl").write_text("".join(map(row.format, range(50))))
    (path.parent / "held.jsonl").write_text("".join(map(row.format, range(50, 59))))
    text = decision(plan_for(str(path), gpu=None, profile="smoke"), "task eval")
    assert text.startswith("9 rows (all of the validation split), before step 1")


BEST = "training.config.metric_for_best_model="


def test_a_check_that_decides_is_evaluated_on_200_rows_and_the_plan_says_what_it_costs() -> None:
    plan = plan_for(overrides=[f"{BEST}eval/matches"])
    assert plan.schedule.metric_for_best_model == "eval/matches"
    assert plan.task_eval == TaskEvalPlan(judge="cypher", num_rows=200, is_fixed=True, time_share=0.05, min_rows=100)
    text = decision(plan, "task eval")
    assert "the checkpoint with the highest eval/matches is kept; a rate of 200 rows is within 7 points" in text
    assert re.search(r"generation takes about \d+ \w+ per evaluation, \d+ \w+ for \d+ of them", text)
    more = plan_for(overrides=[f"{BEST}eval/matches", "evaluation.task_rows=1000"])
    assert "a rate of 1000 rows is within 3 points" in decision(more, "task eval")


def test_smoke_profile_says_that_its_rows_cannot_decide() -> None:
    plan = plan_for(gpu=None, profile="smoke", overrides=[f"{BEST}eval/matches"])
    assert plan.task_eval is not None
    assert (plan.task_eval.num_rows, plan.task_eval.min_rows) == (24, 1)
    assert "too few to decide: the smoke profile only tests it" in decision(plan, "task eval")


def test_no_fallback_shards_the_weights_if_a_check_decides() -> None:
    many, fewer = (plan_for(gpus=4, overrides=more) for more in ([], [f"{BEST}eval/matches"]))
    assert {fallback.strategy for fallback in many.oom_fallbacks} > {"ddp"}
    assert {fallback.strategy for fallback in fewer.oom_fallbacks} == {"ddp"}


def test_loss_decides_with_random_weights() -> None:
    plan = plan_for(random_weights=True, overrides=[f"{BEST}eval/matches"])
    assert plan.schedule.metric_for_best_model == "eval/loss"
    assert plan.task_eval is None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"overrides": [f"{BEST}eval/match"]},
            "eval/match: the judge has no check of this name, only parses, reads, names, directions, result, matches, "
            "equal",
        ),
        ({"overrides": [f"{BEST}eval/matches", "evaluation.task_rows=0"]}, "task_rows is 0: no answer is judged"),
        (
            {"overrides": [f"{BEST}eval/matches", "evaluation.task_rows=8"]},
            "8 rows (evaluation.task_rows) cannot decide which checkpoint is best; at least 100 can",
        ),
        (
            {"overrides": [f"{BEST}eval/matches"], "gpus": 4, "strategy": "zero3"},
            "cannot be evaluated during training: no rank holds all weights",
        ),
    ],
)
def test_a_check_that_cannot_decide_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ManifestError) as raised:
        plan_for(**more)
    assert message in str(raised.value)
    assert "use metric_for_best_model eval_loss" in raised.value.hint


def test_a_check_needs_a_judge_and_rows(write_manifest: WriteManifest) -> None:
    path = write_manifest({"name": "expert-poetry"}, drop=("training.decoding",))
    with pytest.raises(ManifestError, match="no judge for this expert's answers"):
        plan_for(str(path), overrides=[f"{BEST}eval/right"])
    path = write_manifest({"training.dataset.path": "rows.jsonl", "training.dataset.validation_path": "held.jsonl"})
    row = '{{"question": "Who is {0}?", "schema": "s", "cypher": "MATCH (n) RETURN n.id"}}\n'
    (path.parent / "rows.jsonl").write_text("".join(map(row.format, range(50))))
    (path.parent / "held.jsonl").write_text("".join(map(row.format, range(50, 59))))
    with pytest.raises(ManifestError, match=re.escape("9 rows (the validation split) cannot decide")):
        plan_for(str(path), overrides=[f"{BEST}eval/matches"])
