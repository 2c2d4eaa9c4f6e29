"""Length of the run, learning-rate schedule, and when to save, evaluate and log."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from launcher.core.errors import InputError
from launcher.core.metrics import EVAL_LOSS, EVAL_PREFIX
from launcher.core.units import format_duration
from launcher.manifest.adapter_override import ADAPTER_KEY, FULL_LEARNING_RATE
from launcher.manifest.config import Cadence, TrainingConfig
from launcher.plan.context import PlanContext, manifest_decision, plan_decision
from launcher.plan.model import Decision, SchedulePlan

# Packing leaves at most 0.2 % of the positions empty if rows are short compared to a sequence (corpus/bin_packing.py).
PACKING_EFFICIENCY = 0.998
# If the manifest does not set it: the most that a crash may cost.
_MAX_LOST_SECONDS = 30 * 60


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLength:
    """Number of optimizer steps; None if the number of rows is unknown."""

    steps_per_epoch: int | None
    num_steps: int | None
    sequences: int | None = None  # of an epoch


def estimate_run_length(context: PlanContext) -> RunLength:
    """Return the expected length of the run."""
    config, rows = context.config, context.rows
    if rows.num_rows == 0:
        raise InputError(f"no training rows: {rows.basis}")
    if rows.num_rows is None:
        return RunLength(steps_per_epoch=None, num_steps=config.max_steps or None)
    sequences = rows.num_rows if rows.num_sequences is None else rows.num_sequences
    if config.packing and rows.num_sequences is None:
        document = min(rows.mean_tokens, config.max_seq_length)
        sequences = ceil(rows.num_rows * document / (config.max_seq_length * PACKING_EFFICIENCY))
    per_epoch = max(1, ceil(sequences / config.global_batch_size))
    num_steps = config.max_steps or ceil(per_epoch * (config.num_train_epochs or 1.0))
    return RunLength(steps_per_epoch=per_epoch, num_steps=max(1, num_steps), sequences=max(1, sequences))


def count_step_sequences(context: PlanContext) -> int:
    """Return the number of sequences per step: the global batch, or those of an epoch if it has fewer."""
    batch, sequences = context.config.global_batch_size, estimate_run_length(context).sequences
    return batch if sequences is None else min(batch, sequences)


def decide_schedule(context: PlanContext, seconds_per_step: float | None) -> tuple[SchedulePlan, list[Decision]]:
    """Return the schedule, and the decisions about it."""
    config, length = context.config, estimate_run_length(context)
    saving, save_decision = _decide_saving(config, length, seconds_per_step)
    evaluating, eval_decision = _decide_evaluation(config)
    plan = SchedulePlan(
        lr_scheduler=config.lr_scheduler,
        scheduler_kwargs={k: v for k, v in config.lr_scheduler_kwargs.model_dump().items() if v is not None},
        epochs=config.num_train_epochs or 1.0,
        max_steps=config.max_steps or None,
        num_steps=length.num_steps,
        warmup_steps=_warmup_steps(config, length),
        warmup_ratio=config.warmup_ratio if _has_warmup(config) else None,
        save_every_steps=saving.steps,
        save_every_epochs=saving.epochs,
        save_total_limit=config.save_total_limit,
        evaluate_every_steps=evaluating.steps,
        evaluate_every_epochs=evaluating.epochs,
        logging_steps=config.logging_steps,
        load_best_model_at_end=loads_best(config),
        metric_for_best_model=_name_best_metric(context),
        early_stopping_patience=config.early_stopping_patience,
        early_stopping_threshold=config.early_stopping_threshold,
        seed=config.seed,
    )
    return plan, [
        _explain_length(context, length),
        _explain_rate(context, plan),
        save_decision,
        eval_decision,
        *_explain_best(config, plan),
        _explain_logging(config),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Every:
    steps: int | None = None
    epochs: float | None = None


_DEFAULT_STEPS = 500  # the default of transformers, and so of the published trainer


def _every(cadence: Cadence, steps: int | None, epochs: float | None) -> _Every:
    if cadence == "no":
        return _Every()
    return _Every(steps=steps or _DEFAULT_STEPS) if cadence == "steps" else _Every(epochs=epochs or 1.0)


def _read_cadence(strategy: Cadence | None, steps: int | None, epochs: float | None) -> _Every | None:
    """Return how often the manifest saves or evaluates, if it says so; a number without a strategy implies it."""
    if strategy is None and steps is None and epochs is None:
        return None
    return _every(strategy or ("steps" if epochs is None else "epoch"), steps, epochs)


def _name_cadence_key(what: Literal["save", "eval"], strategy: Cadence | None, epochs: float | None) -> str:
    prefix = "evaluation" if what == "eval" else what
    key = f"{prefix}_strategy" if strategy else f"{what}_steps" if epochs is None else f"{what}_epochs"
    return f"{key} in the manifest"


def _decide_saving(
    config: TrainingConfig, length: RunLength, seconds_per_step: float | None
) -> tuple[_Every, Decision]:
    keep = "keep all" if config.save_total_limit is None else f"keep the last {config.save_total_limit}"
    requested = _read_cadence(config.save_strategy, config.save_steps, config.save_epochs)
    if requested is not None:
        every, reason = requested, _name_cadence_key("save", config.save_strategy, config.save_epochs)
        return every, manifest_decision("checkpoints", f"{_format_every(every)}; {keep}", reason)
    if length.steps_per_epoch and seconds_per_step:
        epoch_seconds = length.steps_per_epoch * seconds_per_step
        if epoch_seconds > _MAX_LOST_SECONDS:
            every = _Every(steps=max(1, int(_MAX_LOST_SECONDS / seconds_per_step)))
            reason = f"an epoch takes {format_duration(epoch_seconds)}; a crash then costs at most half an hour"
            return every, plan_decision("checkpoints", f"{_format_every(every)}; {keep}", reason)
    return _Every(epochs=1.0), plan_decision("checkpoints", f"every epoch; {keep}", "default of the manifest format")


def _decide_evaluation(config: TrainingConfig) -> tuple[_Every, Decision]:
    every = _read_cadence(config.evaluation_strategy, config.eval_steps, config.eval_epochs)
    if every is not None:
        reason = _name_cadence_key("eval", config.evaluation_strategy, config.eval_epochs)
        return every, manifest_decision("evaluation", _format_every(every), reason)
    return _Every(epochs=1.0), plan_decision("evaluation", "every epoch", "default of the manifest format")


def _format_every(every: _Every) -> str:
    if every.steps is not None:
        return format_every_steps(every.steps)
    if every.epochs is None:
        return "never"
    return "every epoch" if every.epochs == 1.0 else f"every {every.epochs:g} epochs"


def format_every_steps(steps: int) -> str:
    """Return "every step" or, for example, "every 10 steps"."""
    return "every step" if steps == 1 else f"every {steps} steps"


def format_warmup(ratio: float | None, steps: int | None) -> str:
    """Return the warm-up as text: in steps, or as a ratio if the number of steps is unknown."""
    if steps is None:
        return f"{ratio:g} of the steps of warm-up"
    return f"{steps} step{'s' * (steps != 1)} of warm-up"


def format_cadence(cadence: Cadence, steps: int | None) -> str:
    """Return how often to save or evaluate as text, such as "every 500 steps"."""
    return _format_every(_every(cadence, steps, None))


def loads_best(config: TrainingConfig) -> bool:
    """Return whether the adapter of the best evaluation is kept at the end."""
    if config.load_best_model_at_end is not None:
        return config.load_best_model_at_end
    return config.evaluation_strategy != "no"


def _name_best_metric(context: PlanContext) -> str:
    """Return the metric that decides which checkpoint is best; with random weights always the validation loss."""
    check = context.config.best_check
    return EVAL_LOSS if check is None or context.options.random_weights else f"{EVAL_PREFIX}{check}"


def _has_warmup(config: TrainingConfig) -> bool:
    """Return whether the schedule warms up: the constant one of transformers ignores the number of steps."""
    return config.lr_scheduler != "constant"


def _warmup_steps(config: TrainingConfig, length: RunLength) -> int | None:
    """Return the warm-up steps; warmup_ratio takes precedence: published manifests with it also set warmup_steps 0."""
    if not _has_warmup(config):
        return 0
    if config.warmup_ratio is None:
        return config.warmup_steps
    return None if length.num_steps is None else ceil(config.warmup_ratio * length.num_steps)


def _explain_rate(context: PlanContext, plan: SchedulePlan) -> Decision:
    config, overridden = context.config, context.options.overridden_keys
    warmup = format_warmup(plan.warmup_ratio, plan.warmup_steps)
    kwargs = ", ".join(f"{name} {value:g}" for name, value in plan.scheduler_kwargs.items())
    schedule = plan.lr_scheduler + (f" ({kwargs})" if kwargs else "")
    value = f"{config.learning_rate:g}, {schedule}, {warmup}, seed {plan.seed}"
    reason, decide = "training.config", manifest_decision
    is_full_default = config.adapter_type == "full" and config.learning_rate == FULL_LEARNING_RATE
    if is_full_default and ADAPTER_KEY in overridden and "training.config.learning_rate" not in overridden:
        reason, decide = "default of full fine-tuning: about a tenth of a LoRA learning rate", plan_decision
    if not _has_warmup(config) and (config.warmup_ratio or config.warmup_steps):
        reason += "; lr_scheduler constant has no warm-up, constant_with_warmup has one"
    elif config.warmup_ratio is not None and config.warmup_steps:
        reason += f"; warmup_ratio {config.warmup_ratio:g} wins over warmup_steps {config.warmup_steps}"
    return decide("learning rate", value, reason)


_BEST_KEYS = ("load_best_model_at_end", "metric_for_best_model", "early_stopping_patience", "early_stopping_threshold")


def _explain_best(config: TrainingConfig, plan: SchedulePlan) -> list[Decision]:
    """Return the decision about which checkpoint is the result, and when to stop early; none without evaluations."""
    if config.evaluation_strategy == "no":
        return []
    metric = plan.metric_for_best_model
    best = "the lowest validation loss" if metric == EVAL_LOSS else f"the highest {metric}"
    value = f"that with {best}" if plan.load_best_model_at_end else "the last one"
    if plan.early_stopping_patience is not None:
        count = plan.early_stopping_patience
        by = f" by more than {plan.early_stopping_threshold:g}" if plan.early_stopping_threshold else ""
        value += f"; stops after {count} evaluation{'s' * (count != 1)} without improvement{by}"
    keys = [key for key in _BEST_KEYS if key in config.model_fields_set]
    if not keys:
        return [plan_decision("exported checkpoint", value, "default of the manifest format")]
    return [manifest_decision("exported checkpoint", value, f"{keys[0]} in the manifest")]


def _explain_logging(config: TrainingConfig) -> Decision:
    value = format_every_steps(config.logging_steps)
    if "logging_steps" in config.model_fields_set:
        return manifest_decision("logging", value, "logging_steps in the manifest")
    return plan_decision("logging", value, "default of the manifest format")


def _explain_length(context: PlanContext, length: RunLength) -> Decision:
    config = context.config
    if length.num_steps is None:
        return plan_decision("training length", f"{config.num_train_epochs:g} epochs", context.rows.basis)
    steps = f"{length.num_steps:,} step{'s' * (length.num_steps != 1)}"
    if config.max_steps:
        return manifest_decision("training length", steps, "max_steps")
    value = f"{steps} ({config.num_train_epochs:g} epochs of {length.steps_per_epoch:,})"
    return plan_decision("training length", value, context.rows.basis)
