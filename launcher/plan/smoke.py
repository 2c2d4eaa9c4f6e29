"""Sizes of the smoke profile: every stage of a training in a few minutes on two CPU cores.

A manifest's sizes are meant for a GPU: 48 sequences of 2,048 tokens take two cores half a minute. Values set on the
command line win over these sizes; everything else stays as in the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True, slots=True)
class SmokeSizes:
    """The config of the smoke profile, and what it replaces."""

    config: TrainingConfig
    replaced: Mapping[str, str]  # name of a decision -> why its value is not the manifest's


@dataclass(frozen=True, kw_only=True, slots=True)
class _Change:
    """One replaced decision: its new values, the reason, and the manifest's value."""

    decision: str  # its name
    cause: str
    original: str | None  # None: not in the manifest
    values: _Values

    @property
    def reason(self) -> str:
        original = "not in the manifest" if self.original is None else f"manifest: {self.original}"
        return f"{SMOKE_PREFIX}{self.cause} ({original})"


def choose_smoke_length(row_tokens: float) -> int:
    """Return the shortest sequence length that holds an average row, so that answers are not cut off."""
    return next((length for length in SMOKE_LENGTHS if length >= _TOKENS_FACTOR * row_tokens), SMOKE_LENGTHS[-1])


def make_smoke_sizes(config: TrainingConfig, overridden_keys: frozenset[str], row_tokens: float = 0.0) -> SmokeSizes:
    """Return the config with small sizes.

    `overridden_keys` are dotted keys set on the command line, which are kept; `row_tokens` is the mean length of rows.
    """
    overridden = frozenset(key.removeprefix(_PREFIX) for key in overridden_keys if key.startswith(_PREFIX))
    changes = [change for change in _list_changes(config, overridden, row_tokens) if change.values]
    values = {key: value for change in changes for key, value in change.values.items()}
    return SmokeSizes(
        config=config.model_copy(update=values), replaced={change.decision: change.reason for change in changes}
    )


def replace_reasons(decisions: Iterable[Decision], replaced: Mapping[str, str]) -> tuple[Decision, ...]:
    """Return the decisions with the reasons of replaced ones."""
    return tuple(plan_decision(d.name, d.value, replaced[d.name]) if d.name in replaced else d for d in decisions)


def _list_changes(config: TrainingConfig, overridden: frozenset[str], row_tokens: float) -> Iterator[_Change]:
    yield _change_batch(config, overridden, choose_smoke_length(row_tokens))
    yield _change_length(config, overridden)
    yield _change_rate(config, overridden)
    yield _change_modules(config, overridden)
    yield _change_cadence(config, overridden, "save")
    yield _change_cadence(config, overridden, "evaluation")
    values = _changed(config, overridden, logging_steps=_LOGGING_STEPS)
    original = format_every_steps(config.logging_steps) if "logging_steps" in config.model_fields_set else None
    yield _Change(decision="logging", cause="short run", original=original, values=values)


def _changed(config: TrainingConfig, overridden: frozenset[str], **values: str | int | float | None) -> _Values:
    """Return the values that differ from the manifest and are not set on the command line."""
    return {key: value for key, value in values.items() if key not in overridden and getattr(config, key) != value}


def _change_batch(config: TrainingConfig, overridden: frozenset[str], length: int) -> _Change:
    """Replace the global batch, unless the command line sets one of its factors. Longer sequences are fewer."""
    values: _Values = {}
    batch = max(1, _GLOBAL_BATCH * SMOKE_LENGTHS[0] // length)
    sequences, from_length = "sequences", ""
    if config.global_batch_size > batch and not overridden & {"batch_size", "gradient_accumulation_steps"}:
        values |= {"batch_size": batch, "gradient_accumulation_steps": 1}
        sequences = f"{config.global_batch_size:,} sequences"
    if config.max_seq_length > length and "max_seq_length" not in overridden:
        values["max_seq_length"] = length
        from_length = f" of {config.max_seq_length:,} tokens"
    longer = f"; the rows of the sample need {length:,} tokens" if length > SMOKE_LENGTHS[0] else ""
    return _Change(decision="global batch", cause=_SHORT + longer, original=sequences + from_length, values=values)


def _change_length(config: TrainingConfig, overridden: frozenset[str]) -> _Change:
    """Replace max_steps; epochs set on the command line also win over the manifest's max_steps."""
    max_steps: int | None = min(config.max_steps or _STEPS, _STEPS)
    epochs = config.num_train_epochs
    if epochs is not None and overridden & {"epochs", "num_epochs"}:
        max_steps = None
    original = f"{config.max_steps:,} steps" if config.max_steps else f"{epochs:g} epochs"
    cause = _SHORT if max_steps else "epochs are set on the command line"
    if overridden & {"batch_size", "gradient_accumulation_steps", "max_seq_length"}:
        cause = "short run; with sizes set on the command line, it may take longer"
    values = _changed(config, overridden, max_steps=max_steps)
    return _Change(decision="training length", cause=cause, original=original, values=values)


def _change_rate(config: TrainingConfig, overridden: frozenset[str]) -> _Change:
    values = _changed(config, overridden, learning_rate=_LEARNING_RATE)
    original = [f"{config.learning_rate:g}"] if values else []
    if "warmup_ratio" not in overridden or config.warmup_ratio is None:
        warmup = _changed(config, overridden, warmup_ratio=None, warmup_steps=_WARMUP_STEPS)
        ratio = config.warmup_ratio
        original += [format_warmup(ratio, config.warmup_steps if ratio is None else None)] if warmup else []
        values |= warmup
    return _Change(
        decision="learning rate",
        cause="a tiny base needs a larger learning rate" if "learning_rate" in values else "short run",
        original=", ".join(original),
        values=values,
    )


def _change_modules(config: TrainingConfig, overridden: frozenset[str]) -> _Change:
    """Map target modules of other model families to the tiny base."""
    targets = () if config.target_modules == ALL_LINEAR else config.target_modules
    values: _Values = {
        key: tuple(dict.fromkeys(layer for name in names for layer in _TINY_MODULES.get(name, (name,))))
        for key, names in (
            ("target_modules", targets),
            ("feedforward_modules", config.feedforward_modules),
        )
        if key not in overridden and any(name in _TINY_MODULES for name in names)
    }
    original = ", ".join(targets)
    return _Change(decision="adapter", cause="the tiny base has other module names", original=original, values=values)


def _change_cadence(config: TrainingConfig, overridden: frozenset[str], what: Literal["save", "evaluation"]) -> _Change:
    """Replace a cadence; one set on the command line also keeps the other, as the best checkpoint needs both equal."""
    strategy_key, other_key = f"{what}_strategy", "evaluation_strategy" if what == "save" else "save_strategy"
    steps_key = "save_steps" if what == "save" else "eval_steps"
    strategy: Cadence | None = getattr(config, strategy_key)
    is_kept = strategy_key in overridden or (other_key in overridden and loads_best(config))
    cadence = strategy if is_kept or strategy == "no" else "steps"
    values = _changed(config, overridden, **{strategy_key: cadence})
    if cadence == "steps":
        values |= _changed(config, overridden, **{steps_key: _EVERY_STEPS})
    return _Change(
        decision="checkpoints" if what == "save" else "evaluation",
        cause="short run",
        original=None if strategy is None else format_cadence(strategy, getattr(config, steps_key)),
        values=values,
    )
