"""Whether an expert's answers are judged while it trains, how many of them, and what it may cost."""

from __future__ import annotations

from launcher.manifest.metadata import Evaluation
from launcher.plan.fit import Layout
from launcher.plan.model import Decision, SchedulePlan, SpeedPlan, TaskPlan
from launcher.plan.situation import Situation, asked, decided
from launcher.quality.judges import name_judge
from launcher.units import format_percent

_NAME = "answers judged"
_MOST_ROWS = 64
_SMOKE_ROWS = 24  # some seconds on two CPU cores
_UNTIMED_ROWS = 16  # where nobody knows how long a training takes


def decide_tasks(
    situation: Situation, schedule: SchedulePlan, speed: SpeedPlan, layout: Layout
) -> tuple[TaskPlan | None, Decision]:
    wanted = situation.manifest.evaluation or Evaluation()
    judge = "a command of its own" if wanted.judge_command else name_judge(situation.manifest)
    if wanted.task_rows == 0:
        return None, asked(_NAME, "none", "evaluation.task_rows is 0")
    reason = _find_obstacle(situation, schedule, layout, judge)
    if reason or judge is None:
        return None, decided(_NAME, "none", reason)
    when = "before the first step and at each evaluation"
    if wanted.task_rows is not None:
        value = f"{wanted.task_rows}, {when}"
        plan = TaskPlan(judge=judge, num_rows=wanted.task_rows, is_fixed=True, share=wanted.task_share)
        return plan, asked(_NAME, value, "evaluation.task_rows in the manifest")
    if situation.is_smoke:
        plan = TaskPlan(judge=judge, num_rows=_SMOKE_ROWS, is_fixed=True, share=wanted.task_share)
        return plan, decided(_NAME, f"{_SMOKE_ROWS}, {when}", f"{judge}; a short run, to see it learn")
    is_timed = speed.seconds_per_step is not None
    most = _MOST_ROWS if is_timed else _UNTIMED_ROWS
    plan = TaskPlan(judge=judge, num_rows=most, is_fixed=False, share=wanted.task_share)
    if not is_timed:
        reason = f"{judge}; how long a step takes is not known here, so half a minute each time at most"
        return plan, decided(_NAME, f"up to {most}, {when}", reason)
    share = format_percent(wanted.task_share)
    value = f"up to {_MOST_ROWS}, {when}"
    return plan, decided(_NAME, value, f"{judge}; as many as {share} of the time allow, which the first ones tell")


def _find_obstacle(situation: Situation, schedule: SchedulePlan, layout: Layout, judge: str | None) -> str:
    if judge is None:
        return "nobody here can judge them; evaluation.judge names somebody"
    if situation.options.random_weights:
        return "random weights have nothing to say"
    if schedule.evaluate_every_steps is None and schedule.evaluate_every_epochs is None:
        return "there is no evaluation on the way"
    if layout.strategy in ("fsdp2", "zero3") or layout.offload != "none":
        return "no rank has all weights at hand; `launcher eval` asks the expert when it is trained"
    return ""
