"""The smoke profile's own sizes: the whole path, in about two minutes on two CPU cores.

A manifest's sizes are made for a GPU: 48 sequences of 2,048 tokens take two cores half a minute. What the command line
gives wins over these sizes; what is not named here stays the manifest's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from launcher.manifest.config import Cadence, TrainingConfig
from launcher.plan.model import Decision
from launcher.plan.schedule import format_cadence, loads_best
from launcher.plan.situation import decided

# Two cores train the tiny base with about 3,300 tokens a second: 60 steps of 8 x 512 tokens take 75 s.
SMOKE_LENGTHS = (512, 1024, 2048, 4096)  # the first, unless the sample's rows are longer
_GLOBAL_BATCH = 8
# The tiny base's vocabulary is small: it makes nearly twice as many tokens of a row as are estimated for others.
_TINY_TOKENS = 2.0
_STEPS = 60
_LEARNING_RATE = 1e-3
_WARMUP_STEPS = 5
_EVERY_STEPS = 20  # evaluating and saving: three times in such a run
_LOGGING_STEPS = 5

# Layers of other families -> those of the tiny base that do the same.
_TINY_LAYERS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "dense": ("o_proj",),
    "fc1": ("gate_proj", "up_proj"),
    "fc2": ("down_proj",),
}

_PREFIX = "training.config."
_TWO_MINUTES = "two CPU cores shall be done in about two minutes"

_Values = dict[str, str | int | float | tuple[str, ...] | None]  # of training.config, by key


@dataclass(frozen=True, kw_only=True, slots=True)
class SmokeSizes:
    config: TrainingConfig
    replaced: Mapping[str, str]  # the name of a decision -> why its value is not the manifest's


@dataclass(frozen=True, kw_only=True, slots=True)
class _Change:
    """What one line of the plan tells: the new values, why, and what the manifest says."""

    line: str
    why: str
    said: str | None  # None: nothing
    values: _Values

    @property
    def reason(self) -> str:
        manifest = "leaves it open" if self.said is None else f"says {self.said}"
        return f"smoke profile: {self.why}; the manifest {manifest}"


def find_smoke_length(row_tokens: float) -> int:
    """The shortest sequence that holds a row as the sample has them: beyond it, answers would be cut off."""
    return next((length for length in SMOKE_LENGTHS if length >= _TINY_TOKENS * row_tokens), SMOKE_LENGTHS[-1])


def make_smoke_sizes(config: TrainingConfig, given_keys: frozenset[str], row_tokens: float = 0.0) -> SmokeSizes:
    """Given keys are those of the command line, dotted from the top; `row_tokens` the mean of the sample's rows."""
    given = frozenset(key.removeprefix(_PREFIX) for key in given_keys if key.startswith(_PREFIX))
    changes = [change for change in _list_changes(config, given, row_tokens) if change.values]
    values = {key: value for change in changes for key, value in change.values.items()}
    return SmokeSizes(
        config=config.model_copy(update=values), replaced={change.line: change.reason for change in changes}
    )


def restate(decisions: Iterable[Decision], replaced: Mapping[str, str]) -> tuple[Decision, ...]:
    """The lines of what was replaced, no longer told as the manifest's."""
    return tuple(decided(d.name, d.value, replaced[d.name]) if d.name in replaced else d for d in decisions)


def _list_changes(config: TrainingConfig, given: frozenset[str], row_tokens: float) -> Iterator[_Change]:
    yield _change_batch(config, given, find_smoke_length(row_tokens))
    yield _change_length(config, given)
    yield _change_rate(config, given)
    yield _change_layers(config, given)
    yield _change_cadence(config, given, "save")
    yield _change_cadence(config, given, "evaluation")
    values = _changed(config, given, logging_steps=_LOGGING_STEPS)
    said = f"every {config.logging_steps} steps" if "logging_steps" in config.model_fields_set else None
    yield _Change(line="logging", why="a short run", said=said, values=values)


def _changed(config: TrainingConfig, given: frozenset[str], **wanted: str | int | float | None) -> _Values:
    """Of the values wanted, those that the command line leaves open and that differ from the manifest's."""
    return {key: value for key, value in wanted.items() if key not in given and getattr(config, key) != value}


def _change_batch(config: TrainingConfig, given: frozenset[str], wanted: int) -> _Change:
    """A command line that gives one factor of the global batch has given the batch. Longer sequences are fewer."""
    values: _Values = {}
    batch = max(1, _GLOBAL_BATCH * SMOKE_LENGTHS[0] // wanted)
    sequences, length = "sequences", ""
    if config.global_batch_size > batch and not given & {"batch_size", "gradient_accumulation_steps"}:
        values |= {"batch_size": batch, "gradient_accumulation_steps": 1}
        sequences = f"{config.global_batch_size:,} sequences"
    if config.max_seq_length > wanted and "max_seq_length" not in given:
        values["max_seq_length"] = wanted
        length = f" of {config.max_seq_length:,} tokens"
    longer = f", though the sample's rows need {wanted:,} tokens" if wanted > SMOKE_LENGTHS[0] else ""
    return _Change(line="global batch", why=_TWO_MINUTES + longer, said=sequences + length, values=values)


def _change_length(config: TrainingConfig, given: frozenset[str]) -> _Change:
    """Epochs of the command line win over the manifest's steps too, which would otherwise win over them."""
    wanted: int | None = min(config.max_steps or _STEPS, _STEPS)
    epochs = config.num_train_epochs
    if epochs is not None and given & {"epochs", "num_epochs"}:
        wanted = None
    said = f"{config.max_steps:,} steps" if config.max_steps else f"{epochs:g} epochs"
    why = _TWO_MINUTES if wanted else "the command line gives epochs"
    return _Change(line="length", why=why, said=said, values=_changed(config, given, max_steps=wanted))


def _change_rate(config: TrainingConfig, given: frozenset[str]) -> _Change:
    values = _changed(config, given, learning_rate=_LEARNING_RATE)
    said = [f"{config.learning_rate:g}"] if values else []
    if "warmup_ratio" not in given or config.warmup_ratio is None:
        warmup = _changed(config, given, warmup_ratio=None, warmup_steps=_WARMUP_STEPS)
        ratio = config.warmup_ratio
        steps = f"{config.warmup_steps} steps" if ratio is None else f"{ratio:g} of the steps"
        said += [f"{steps} of warm-up"] if warmup else []
        values |= warmup
    return _Change(
        line="learning rate",
        why="a tiny base takes larger steps than a large one",
        said=", ".join(said),
        values=values,
    )


def _change_layers(config: TrainingConfig, given: frozenset[str]) -> _Change:
    """A manifest for a base whose layers are built otherwise: the adapter sits where it would there."""
    values: _Values = {
        key: tuple(dict.fromkeys(layer for name in names for layer in _TINY_LAYERS.get(name, (name,))))
        for key, names in (
            ("target_modules", config.target_modules),
            ("feedforward_modules", config.feedforward_modules),
        )
        if key not in given and any(name in _TINY_LAYERS for name in names)
    }
    said = ", ".join(config.target_modules)
    return _Change(line="adapter", why="the tiny base has other layers", said=said, values=values)


def _change_cadence(config: TrainingConfig, given: frozenset[str], what: Literal["save", "evaluation"]) -> _Change:
    """The best checkpoint needs both in step: a cadence that the command line gives to one holds for the other too."""
    strategy_key, other_key = f"{what}_strategy", "evaluation_strategy" if what == "save" else "save_strategy"
    steps_key = "save_steps" if what == "save" else "eval_steps"
    strategy: Cadence | None = getattr(config, strategy_key)
    is_held = strategy_key in given or (other_key in given and loads_best(config))
    wanted = strategy if is_held or strategy == "no" else "steps"
    values = _changed(config, given, **{strategy_key: wanted})
    if wanted == "steps":
        values |= _changed(config, given, **{steps_key: _EVERY_STEPS})
    return _Change(
        line="checkpoints" if what == "save" else "evaluation",
        why="a short run",
        said=None if strategy is None else format_cadence(strategy, getattr(config, steps_key)),
        values=values,
    )
