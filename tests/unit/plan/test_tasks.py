"""Whether answers are judged while an expert trains, and the reason that is given."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.plan.model import TaskPlan
from tests.conftest import WriteManifest
from tests.unit.plan.conftest import decision, plan_for


def test_on_a_known_gpu_the_time_decides() -> None:
    plan = plan_for()
    assert plan.tasks == TaskPlan(judge="cypher", num_rows=64, is_fixed=False, share=0.05)
    assert "up to 64, before the first step and at each evaluation" in decision(plan, "answers judged")
    assert "as many as 5.0 % of the time allow" in decision(plan, "answers judged")


def test_the_manifest_may_fix_the_number() -> None:
    plan = plan_for(overrides=["evaluation.task_rows=100"])
    assert plan.tasks == TaskPlan(judge="cypher", num_rows=100, is_fixed=True, share=0.05)


def test_in_the_smoke_profile_a_few_are_seen() -> None:
    plan = plan_for(gpu=None, profile="smoke")
    assert plan.tasks is not None
    assert (plan.tasks.num_rows, plan.tasks.is_fixed) == (24, True)


def test_where_no_step_was_ever_timed_half_a_minute_is_the_limit() -> None:
    plan = plan_for(gpu=None, profile="full", cpu_ranks_per_node=1, strategy="ddp")
    assert plan.speed.seconds_per_step is None
    assert plan.tasks is not None
    assert (plan.tasks.num_rows, plan.tasks.is_fixed) == (16, False)
    assert "half a minute each time at most" in decision(plan, "answers judged")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"overrides": ["evaluation.task_rows=0"]}, "evaluation.task_rows is 0"),
        ({"random_weights": True}, "random weights have nothing to say"),
        ({"gpus": 4, "strategy": "fsdp2"}, "no rank has all weights at hand; `launcher eval`"),
        ({"gpus": 4, "strategy": "zero3"}, "no rank has all weights at hand; `launcher eval`"),
        (
            {"config": {"evaluation_strategy": "no", "load_best_model_at_end": False}},
            "there is no evaluation on the way",
        ),
    ],
)
def test_why_none_are(more: dict[str, Any], reason: str) -> None:
    plan = plan_for(**more)
    assert plan.tasks is None
    assert decision(plan, "answers judged").startswith(f"none | {reason}")


def test_an_expert_that_nobody_can_judge(write_manifest: WriteManifest) -> None:
    path = write_manifest({"name": "expert-poetry"}, drop=("training.decoding",))
    plan = plan_for(str(path))
    assert plan.tasks is None
    assert "evaluation.judge names somebody" in decision(plan, "answers judged")
