"""What of a plan decides what is learnt: the same wherever it runs. A training that is taken up again must keep it."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.errors import Problem, show_value
from launcher.plan.model import Plan
from launcher.values import flatten

# Groups of the plan, and of each the keys that only tell, measure, or say where something lies.
_GROUPS: Mapping[str, frozenset[str]] = {
    "adapter": frozenset({"trainable_parameters"}),
    "precision": frozenset({"use_tf32"}),
    "quantization": frozenset({"storage_dtype"}),
    "data": frozenset({"folder", "cache_dir", "num_rows", "mean_tokens", "basis", "streaming"}),
    "optimizer": frozenset({"name"}),  # fused or not is the same rule; which rule it is stands below
}
_BATCH = ("global_batch_size", "sequence_length", "packed", "group_by_length")
_SCHEDULE = ("lr_scheduler", "scheduler_kwargs", "epochs", "max_steps", "warmup_ratio", "seed")


def learning_values(plan: Plan) -> dict[str, object]:
    """Dotted key -> value. How often is saved, evaluated or logged may change on the way."""
    tree = plan.model_dump(mode="json")
    picked: dict[str, object] = {
        "base": {"name": plan.base.name, "revision": plan.base_revision, "random_weights": plan.random_weights},
        "loss_on": plan.loss_on,
        "batch": {name: tree["batch"][name] for name in _BATCH},
        "schedule": {name: tree["schedule"][name] for name in _SCHEDULE},
        "optimizer_rule": plan.optimizer.name.removesuffix("_fused"),
    }
    for group, told in _GROUPS.items():
        value = tree[group]
        picked[group] = {key: below for key, below in value.items() if key not in told} if value else value
    values = flatten(picked)
    if plan.schedule.warmup_ratio is None:
        values["schedule.warmup_steps"] = plan.schedule.warmup_steps
    return values


def find_drift(before: Mapping[str, object], now: Mapping[str, object]) -> tuple[Problem, ...]:
    """Every value that is not what it was."""
    return tuple(
        Problem(where=key, what=f"{show_value(before.get(key))} before, {show_value(now.get(key))} now")
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    )
