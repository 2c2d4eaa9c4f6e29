"""Task evaluation while training: whether generated answers are judged, how many, and how long it may take."""

from __future__ import annotations

from math import ceil

from launcher.core.choices import SHARDED_STRATEGIES
from launcher.core.errors import ManifestError
from launcher.core.metrics import EVAL_LOSS
from launcher.core.units import format_duration, format_percent
from launcher.judges.registry import list_check_names, resolve_judge_name
from launcher.judges.statistics import compute_rate
from launcher.manifest.model import Evaluation, Manifest
from launcher.manifest.suggest import find_closest
from launcher.plan.context import PlanContext, manifest_decision, plan_decision
from launcher.plan.model import Decision, OomFallback, SchedulePlan, SpeedPlan, TaskEvalPlan
from launcher.plan.schedule import estimate_run_length
from launcher.plan.search import Layout

NO_JUDGE = "no judge for this expert's answers; set evaluation.judge"
_NAME = "task eval"
_WHEN = "before step 1 and at every evaluation"
_MAX_ROWS = 64
_SMOKE_ROWS = 24  # some seconds on two CPU cores
_MAX_ROWS_WITHOUT_ESTIMATE = 16  # if the training time is unknown
# If a check decides which checkpoint is best: a difference on fewer rows is chance.
_DECIDING_ROWS, _MIN_DECIDING_ROWS = 200, 100
_ANSWER_TOKENS = 128  # assumed length of an answer
_GENERATION_BATCH = 64  # the most that training/evaluation generates at once
_MIN_SECONDS = 2.0  # for all evaluations; to measure how long they take takes as long
_SECONDS_PER_LAYER = 0.001  # to launch one layer's kernels for one token in eager mode; assumed


def decide_task_eval(
    context: PlanContext, schedule: SchedulePlan, speed: SpeedPlan, layout: Layout
) -> tuple[TaskEvalPlan | None, Decision]:
    """Return the settings of task evaluation, or None if answers are not judged, and the decision."""
    evaluation = context.manifest.evaluation or Evaluation()
    judge = "evaluation.judge_command" if evaluation.judge_command else resolve_judge_name(context.manifest)
    rows, share = evaluation.task_rows, evaluation.task_share
    if schedule.metric_for_best_model != EVAL_LOSS:
        return _decide_deciding_eval(context, schedule, layout, judge, evaluation)
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
    length = estimate_run_length(context)
    if speed.seconds_per_step is not None and length.num_steps is not None:
        seconds = length.num_steps * speed.seconds_per_step
        if share * seconds < _MIN_SECONDS:
            limit = f"training takes about {format_duration(seconds)}, of which evaluation.task_share allows "
            limit += f"{format_percent(share)}: too short to judge answers"
            return None, plan_decision(_NAME, "off", f"{limit}; `launcher eval` judges them afterwards")
    if speed.seconds_per_step is None:
        most, limit = _MAX_ROWS_WITHOUT_ESTIMATE, "at most 30 s per evaluation, because the step time is unknown"
    else:
        most = _MAX_ROWS
        limit = f"at most {format_percent(share)} of training time, measured on the first evaluation"
    plan = TaskEvalPlan(judge=judge, num_rows=most, is_fixed=False, time_share=share)
    return plan, plan_decision(_NAME, f"up to {_describe_rows(context, most)}", f"{judge}; {limit}")


def check_best_metric(manifest: Manifest) -> None:
    """Refuse metric_for_best_model eval/<check> if the judge has no such check, or if no answers are judged."""
    check, rows = manifest.training.config.best_check, (manifest.evaluation or Evaluation()).task_rows
    if check is None:
        return
    known = list_check_names(manifest)
    if known == ():
        raise _refuse_metric(check, "there is no judge for this expert's answers", "set evaluation.judge, or")
    if known is not None and check not in known:
        closest = find_closest(check, known) or known[-1]
        what = f"the judge has no check of this name, only {', '.join(known)}"
        raise _refuse_metric(check, what, f"set it to eval/{closest}, or")
    if rows == 0:
        raise _refuse_metric(check, "evaluation.task_rows is 0: no answer is judged", "remove task_rows, or")


def _refuse_metric(check: str, what: str, way_out: str) -> ManifestError:
    hint = f"{way_out} use metric_for_best_model eval_loss"
    return ManifestError(f"training.config.metric_for_best_model: eval/{check}: {what}", hint=hint)


def _decide_deciding_eval(
    context: PlanContext, schedule: SchedulePlan, layout: Layout, judge: str | None, evaluation: Evaluation
) -> tuple[TaskEvalPlan, Decision]:
    """Return the settings of a task evaluation that decides which checkpoint is best: a fixed number of rows."""
    check_best_metric(context.manifest)
    check = context.config.best_check
    assert check is not None
    obstacle = _find_obstacle(context, schedule, layout, judge)
    if obstacle or judge is None:
        raise _refuse_metric(check, f"cannot be evaluated during training: {obstacle}", "change that, or")
    rows = evaluation.task_rows or (_SMOKE_ROWS if context.is_smoke else _DECIDING_ROWS)
    available = context.rows.num_validation_rows
    judged = rows if available is None else min(rows, available)
    if judged < _MIN_DECIDING_ROWS and not context.is_smoke:
        where = "evaluation.task_rows" if judged == rows else "the validation split"
        what = f"{judged} rows ({where}) cannot decide which checkpoint is best; at least {_MIN_DECIDING_ROWS} can"
        raise _refuse_metric(check, what, "judge more rows, or")
    plan = TaskEvalPlan(
        judge=judge,
        num_rows=rows,
        is_fixed=True,
        time_share=evaluation.task_share,
        min_rows=1 if context.is_smoke else _MIN_DECIDING_ROWS,
    )
    rate = compute_rate([row % 2 == 0 for row in range(judged)])
    reason = f"metric_for_best_model in the manifest: the checkpoint with the highest {schedule.metric_for_best_model} "
    reason += f"is kept; a rate of {judged} rows is within {50 * (rate.high - rate.low):.0f} points"
    if context.is_smoke:
        reason += ", too few to decide: the smoke profile only tests it"
    reason += f"; {_describe_cost(context, schedule, judged)}"
    return plan, manifest_decision(_NAME, _describe_rows(context, rows), reason)


def _describe_cost(context: PlanContext, schedule: SchedulePlan, rows: int) -> str:
    """Return how long the evaluations take, as text; kernel launches or reading the weights limit generation."""
    gpu, length = context.gpu, estimate_run_length(context)
    every = schedule.evaluate_every_steps
    if every is None and schedule.evaluate_every_epochs and length.steps_per_epoch:
        every = max(1, round(schedule.evaluate_every_epochs * length.steps_per_epoch))
    times = None if every is None or length.num_steps is None else 1 + length.num_steps // every
    if gpu is None or gpu.memory_gb_per_second is None:
        return "the first evaluation shows what each of them costs"
    weights = 2 * context.base.num_parameters / (1e9 * gpu.memory_gb_per_second)
    token = max(weights, context.base.num_layers * _SECONDS_PER_LAYER)
    seconds = ceil(rows / (_GENERATION_BATCH * context.num_ranks)) * _ANSWER_TOKENS * token
    total = "" if times is None else f", {format_duration(times * seconds)} for {times} of them"
    each = f"generation takes about {format_duration(seconds)} per evaluation"
    return f"{each}{total}, if answers have {_ANSWER_TOKENS} tokens"


def keep_evaluable(fallbacks: tuple[OomFallback, ...], task_eval: TaskEvalPlan | None) -> tuple[OomFallback, ...]:
    """Return the OOM fallbacks that can run the task evaluation if it selects the best checkpoint; else all of them."""
    if task_eval is None or not task_eval.min_rows:
        return fallbacks
    return tuple(filter(_holds_all_weights, fallbacks))


def _holds_all_weights(layout: Layout | OomFallback) -> bool:
    """Return whether every rank holds all weights, which generation during training needs."""
    return layout.strategy not in SHARDED_STRATEGIES and layout.offload == "none"


def _describe_rows(context: PlanContext, most: int) -> str:
    """Return how many rows are judged, at most all of the validation split, and when."""
    available = context.rows.num_validation_rows
    if available is None or available >= most:
        return f"{most} rows, {_WHEN}"
    return f"{available} rows (all of the validation split), {_WHEN}"


def _find_obstacle(context: PlanContext, schedule: SchedulePlan, layout: Layout, judge: str | None) -> str:
    if judge is None:
        return NO_JUDGE
    if context.options.random_weights:
        return "the weights are random"
    if schedule.evaluate_every_steps is None and schedule.evaluate_every_epochs is None:
        return "evaluation is off"
    if not _holds_all_weights(layout):
        return "no rank holds all weights; run `launcher eval` after training"
    return ""
