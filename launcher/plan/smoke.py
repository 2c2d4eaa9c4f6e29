"""Sizes of the smoke profile: every stage of a training in a few minutes on two CPU cores.

A manifest's sizes are meant for a GPU: 48 sequences of 2,048 tokens take two cores half a minute. Values set on the
command line win over these sizes; everything else stays as in the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from launcher.core.choices import ALL_LINEAR
from launcher.manifest.config import Cadence, TrainingConfig
from launcher.plan.context import SMOKE_PREFIX, plan_decision
from launcher.plan.model import Decision
from launcher.plan.schedule import format_cadence, format_every_steps, format_warmup, loads_best

# Two cores train the tiny base with about 3,300 tokens/s: 60 steps of 8 x 512 tokens take 75 s.
SMOKE_LENGTHS = (512, 1024, 2048, 4096)  # the first that holds the sample's rows
_GLOBAL_BATCH = 8
# The tiny base has a small vocabulary: a row has nearly twice as many tokens as estimated for other bases.
_TOKENS_FACTOR = 2.0
_STEPS = 60
_LEARNING_RATE = 1e-3
_WARMUP_STEPS = 5
_EVERY_STEPS = 20  # evaluate and save three times per run
_LOGGING_STEPS = 5

# Modules of other model families -> the corresponding modules of the tiny base.
_TINY_MODULES = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "dense": ("o_proj",),
    "fc1": ("gate_proj", "up_proj"),
    "fc2": ("down_proj",),
    "out_proj": ("o_proj",),
    "query_key_value": ("q_proj", "k_proj", "v_proj"),
    "dense_h_to_4h": ("gate_proj", "up_proj"),
    "dense_4h_to_h": ("down_proj",),
    "c_fc": ("gate_proj", "up_proj"),
    "c_proj": ("down_proj",),
}

_PREFIX = "training.config."
_SHORT = "a few minutes on two CPU cores"

_Values = dict[str, str | int | float | tuple[str, ...] | None]  # keys of training.config -> values


class _Sizes:
    """Collects the values that replace the manifest's, and the reason of each decision about them."""

    def __init__(self, config: TrainingConfig, overridden: frozenset[str]) -> None:
        self.config, self.overridden = config, overridden
        self.values: _Values = {}
        self.reasons: dict[str, str] = {}

    def find_changed(self, **values: str | int | float | None) -> _Values:
        """Return the values that differ from the manifest and are not set on the command line."""
        config, fixed = self.config, self.overridden
        return {key: value for key, value in values.items() if key not in fixed and getattr(config, key) != value}

    def replace(self, decision: str, values: _Values, cause: str, original: str | None) -> None:
        """Record new values and the reason for them; `original` is the manifest's value, None if it has none."""
        if values:
            self.values |= values
            shown = "not in the manifest" if original is None else f"manifest: {original}"
            self.reasons[decision] = f"{SMOKE_PREFIX}{cause} ({shown})"


def choose_smoke_length(row_tokens: float) -> int:
    """Return the shortest sequence length that holds an average row, so that answers are not cut off."""
    return next((length for length in SMOKE_LENGTHS if length >= _TOKENS_FACTOR * row_tokens), SMOKE_LENGTHS[-1])


def make_smoke_sizes(
    config: TrainingConfig, overridden_keys: frozenset[str], row_tokens: float = 0.0
) -> tuple[TrainingConfig, dict[str, str]]:
    """Return the config with the smoke profile's sizes, and the reason for each changed value by decision name.

    `overridden_keys` are dotted keys set on the command line, which are kept; `row_tokens` is the mean length of rows.
    """
    sizes = _Sizes(config, frozenset(key.removeprefix(_PREFIX) for key in overridden_keys if key.startswith(_PREFIX)))
    _replace_batch(sizes, choose_smoke_length(row_tokens))
    _replace_length(sizes)
    _replace_rate(sizes)
    _replace_modules(sizes)
    _replace_cadence(sizes, "save")
    _replace_cadence(sizes, "evaluation")
    original = format_every_steps(config.logging_steps) if "logging_steps" in config.model_fields_set else None
    sizes.replace("logging", sizes.find_changed(logging_steps=_LOGGING_STEPS), "short run", original)
    return config.model_copy(update=sizes.values), sizes.reasons


def replace_reasons(decisions: Iterable[Decision], replaced: Mapping[str, str]) -> tuple[Decision, ...]:
    """Return the decisions, with new reasons for those whose values the smoke profile replaced."""
    return tuple(plan_decision(d.name, d.value, replaced[d.name]) if d.name in replaced else d for d in decisions)


def _replace_batch(sizes: _Sizes, length: int) -> None:
    """Replace the global batch, unless the command line sets one of its factors; longer sequences shrink the batch."""
    config = sizes.config
    values: _Values = {}
    batch = max(1, _GLOBAL_BATCH * SMOKE_LENGTHS[0] // length)
    sequences, from_length = "sequences", ""
    if config.global_batch_size > batch and not sizes.overridden & {"batch_size", "gradient_accumulation_steps"}:
        values |= {"batch_size": batch, "gradient_accumulation_steps": 1}
        sequences = f"{config.global_batch_size:,} sequences"
    if config.max_seq_length > length and "max_seq_length" not in sizes.overridden:
        values["max_seq_length"] = length
        from_length = f" of {config.max_seq_length:,} tokens"
    longer = f"; the rows of the sample need {length:,} tokens" if length > SMOKE_LENGTHS[0] else ""
    sizes.replace("global batch", values, _SHORT + longer, sequences + from_length)


def _replace_length(sizes: _Sizes) -> None:
    """Replace max_steps; epochs set on the command line also win over the manifest's max_steps."""
    config, overridden = sizes.config, sizes.overridden
    max_steps: int | None = min(config.max_steps or _STEPS, _STEPS)
    epochs = config.num_train_epochs
    if epochs is not None and overridden & {"epochs", "num_epochs"}:
        max_steps = None
    original = f"{config.max_steps:,} steps" if config.max_steps else f"{epochs:g} epochs"
    cause = _SHORT if max_steps else "epochs are set on the command line"
    if overridden & {"batch_size", "gradient_accumulation_steps", "max_seq_length"}:
        cause = "short run; with sizes set on the command line, it may take longer"
    sizes.replace("training length", sizes.find_changed(max_steps=max_steps), cause, original)


def _replace_rate(sizes: _Sizes) -> None:
    config, ratio = sizes.config, sizes.config.warmup_ratio
    values = sizes.find_changed(learning_rate=_LEARNING_RATE)
    cause = "a tiny base needs a larger learning rate" if values else "short run"
    original = [f"{config.learning_rate:g}"] if values else []
    if "warmup_ratio" not in sizes.overridden or ratio is None:
        warmup = sizes.find_changed(warmup_ratio=None, warmup_steps=_WARMUP_STEPS)
        original += [format_warmup(ratio, config.warmup_steps if ratio is None else None)] if warmup else []
        values |= warmup
    sizes.replace("learning rate", values, cause, ", ".join(original))


def _replace_modules(sizes: _Sizes) -> None:
    """Map target modules of other model families to the tiny base."""
    config = sizes.config
    targets = () if config.target_modules == ALL_LINEAR else config.target_modules
    values: _Values = {
        key: tuple(dict.fromkeys(layer for name in names for layer in _TINY_MODULES.get(name, (name,))))
        for key, names in (("target_modules", targets), ("feedforward_modules", config.feedforward_modules))
        if key not in sizes.overridden and any(name in _TINY_MODULES for name in names)
    }
    sizes.replace("adapter", values, "the tiny base has other module names", ", ".join(targets))


def _replace_cadence(sizes: _Sizes, what: Literal["save", "evaluation"]) -> None:
    """Replace how often to save or evaluate, unless a flag sets it; to load the best checkpoint, both must agree."""
    config, overridden = sizes.config, sizes.overridden
    saving, evaluation = {"save_strategy", "save_epochs"}, {"evaluation_strategy", "eval_epochs"}
    own, others = (saving, evaluation) if what == "save" else (evaluation, saving)
    strategy_key, steps_key = f"{what}_strategy", "save_steps" if what == "save" else "eval_steps"
    strategy: Cadence | None = getattr(config, strategy_key)
    is_kept = bool(own & overridden) or (bool(others & overridden) and loads_best(config))
    cadence = strategy if is_kept or strategy == "no" else "steps"
    values = sizes.find_changed(**{strategy_key: cadence})
    if cadence == "steps":
        values |= sizes.find_changed(**{steps_key: _EVERY_STEPS})
    original = None if strategy is None else format_cadence(strategy, getattr(config, steps_key))
    sizes.replace("checkpoints" if what == "save" else "evaluation", values, "short run", original)
