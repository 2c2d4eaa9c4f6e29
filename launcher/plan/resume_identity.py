"""Settings that affect what is learned. A resumed run must not change them; all others may change."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.core.errors import Problem, show_value
from launcher.core.frozen_model import Frozen, flatten
from launcher.core.metrics import EVAL_LOSS
from launcher.plan.model import AdapterPlan, DataPlan, OptimizerPlan, Plan

# Groups of the plan -> keys in them that do not affect learning.
_GROUPS: Mapping[str, frozenset[str]] = {
    "adapter": frozenset({"trainable_parameters"}),
    "precision": frozenset({"use_tf32"}),
    "quantization": frozenset({"storage_dtype"}),
    "data": frozenset({"folder", "cache_dir", "num_rows", "mean_tokens", "basis", "streaming"}),
    "optimizer": frozenset({"name", "in_backward"}),  # see optimizer_rule: a fused implementation is the same
}
_MODELS: Mapping[str, type[Frozen]] = {"adapter": AdapterPlan, "data": DataPlan, "optimizer": OptimizerPlan}
_RULES = {"adamw_torch_fused": "adamw_torch", "paged_adamw_8bit": "adamw_bnb_8bit"}  # implementations of the same
_BATCH = ("global_batch_size", "sequence_length", "packed", "group_by_length")
_SCHEDULE = ("lr_scheduler", "scheduler_kwargs", "epochs", "max_steps", "warmup_ratio", "seed")


def collect_learning_settings(plan: Plan) -> dict[str, object]:
    """Return the settings that affect learning, by dotted key."""
    tree = plan.model_dump(mode="json")
    picked: dict[str, object] = {
        "base": {"name": plan.base.name, "revision": plan.base_revision, "random_weights": plan.random_weights},
        "loss_on": plan.loss_on,
        "batch": {name: tree["batch"][name] for name in _BATCH},
        "schedule": {name: tree["schedule"][name] for name in _SCHEDULE},
        "optimizer_rule": _RULES.get(plan.optimizer.name, plan.optimizer.name),
    }
    for group, ignored in _GROUPS.items():
        value = tree[group]
        picked[group] = {key: below for key, below in value.items() if key not in ignored} if value else value
    values = flatten(picked)
    if plan.schedule.metric_for_best_model != EVAL_LOSS:  # the default is left out: older checkpoints do not have it
        values["schedule.metric_for_best_model"] = plan.schedule.metric_for_best_model
    if plan.schedule.warmup_ratio is None:
        values["schedule.warmup_steps"] = plan.schedule.warmup_steps
    return values


def find_changed_settings(before: Mapping[str, object], now: Mapping[str, object]) -> tuple[Problem, ...]:
    """Return one problem per setting that differs between the checkpoint and the resumed run."""
    return tuple(
        Problem(where=key, what=f"{show_value(_get(before, key))} before, {show_value(_get(now, key))} now")
        for key in sorted(before.keys() | now.keys())
        if _get(before, key) != _get(now, key)
    )


def _get(settings: Mapping[str, object], key: str) -> object:
    """Return a setting, or its default in the plan if an older version did not write it."""
    group, _, name = key.partition(".")
    field = _MODELS[group].model_fields.get(name) if group in _MODELS else None
    default = None if field is None or field.is_required() else field.default
    return settings.get(key, list(default) if isinstance(default, tuple) else default)
