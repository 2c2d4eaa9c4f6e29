"""Task evaluation while training: whether generated answers are judged, how many, and how long it may take."""

from __future__ import annotations

from launcher.core.units import format_percent
from launcher.judges.registry import resolve_judge_name
from launcher.manifest.model import Evaluation
from launcher.plan.context import PlanContext, manifest_decision, plan_decision
from launcher.plan.model import Decision, SchedulePlan, SpeedPlan, TaskEvalPlan
from launcher.plan.search import Layout

_NAME = "task eval"
_WHEN = "before step 1 and at every evaluation"
_MAX_ROWS = 64
_SMOKE_ROWS = 24  # some seconds on two CPU cores
_MAX_ROWS_WITHOUT_ESTIMATE = 16  # if the training time is unknown


def decide_task_eval(
    context: PlanContext, schedule: SchedulePlan, speed: SpeedPlan, layout: Layout
) -> tuple[TaskEvalPlan | None, Decision]:
    """Return the settings of task evaluation, or None if answers are not judged, and the decision."""
    evaluation = context.manifest.evaluation or Evaluation()
    judge = "evaluation.judge_command" if evaluation.judge_command else resolve_judge_name(context.manifest)
    rows, share = evaluation.task_rows, evaluation.task_share
    if rows == 0:
        return None, manifest_decision(_NAME, "off", "evaluation.task_rows is 0")
    obstacle = _find_obstacle(context, schedule, layout, judge)
    if obstacle or judge is None:
        return None, plan_decision(_NAME, "off", obstacle)
    if rows is not None:
        plan = TaskEvalPlan(judge=judge, num_rows=rows, is_fixed=True, time_share=share)
        return plan, manifest_decision(_NAME, _describe_rows(context, rows), "task_rows in the manifest")
    if context.is_smoke:
        plan = TaskEvalPlan(judge=judge, num_rows=_SMOKE_ROWS, is_fixed=True, time_share=share)
        return plan, plan_decision(_NAME, _describe_rows(context, _SMOKE_ROWS), f"{judge}; few rows for a short run")
    if speed.seconds_per_step is None:
        most, limit = _MAX_ROWS_WITHOUT_ESTIMATE, "at most 30 s per evaluation, because the step time is unknown"
    else:
        most = _MAX_ROWS
        limit = f"at most {format_percent(share)} of training time, measured on the first evaluation"
    plan = TaskEvalPlan(judge=judge, num_rows=most, is_fixed=False, time_share=share)
    return plan, plan_decision(_NAME, f"up to {_describe_rows(context, most)}", f"{judge}; {limit}")


def _describe_rows(context: PlanContext, most: int) -> str:
    """Return how many rows are judged, at most all of the validation split, and when."""
    available = context.rows.num_validation_rows
    if available is None or available >= most:
        return f"{most} rows, {_WHEN}"
    return f"{available} rows (all of the validation split), {_WHEN}"


def _find_obstacle(context: PlanContext, schedule: SchedulePlan, layout: Layout, judge: str | None) -> str:
    if judge is None:
        return "no judge for this expert's answers; set evaluation.judge"
    if context.options.random_weights:
        return "the weights are random"
    if schedule.evaluate_every_steps is None and schedule.evaluate_every_epochs is None:
        return "evaluation is off"
    if layout.strategy in ("fsdp2", "zero3") or layout.offload != "none":
        return "no rank holds all weights; run `launcher eval` after training"
    return ""
