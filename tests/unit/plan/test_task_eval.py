"""Whether answers are judged while an expert trains, and the reason that is given."""

from __future__ import annotations

from typing import Any

import pytest

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
