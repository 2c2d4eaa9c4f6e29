"""What settings of the manifest cost that decide how to run and not what is learnt: the plan obeys, and says so."""

from __future__ import annotations

from collections.abc import Callable

from launcher.manifest.config import TrainingConfig
from launcher.plan.model import Plan
from launcher.plan.situation import Situation
from launcher.units import format_count

# Whatever they are, a training ends with the same weights, but for rounding and what dropout draws.
_HOW_TO_RUN = (
    "gradient_checkpointing",
    "torch_compile",
    "torch_compile_mode",
    "attention",
    "flash_attention_2",
    "use_sdpa",
)
_WORTH_TELLING = 1.1  # times as fast
_MATTERS = 0.02  # of the speed, for a setting to be named

Again = Callable[[TrainingConfig], Plan]


def tell_costly(situation: Situation, plan: Plan, again: Again) -> str | None:
    """`again` makes the plan for another configuration."""
    speed = plan.speed.tokens_per_second
    given = [name for name in _HOW_TO_RUN if getattr(situation.config, name) != _left_to_plan(name)]
    if situation.gpu is None or situation.is_smoke or speed is None or not given:
        return None
    best = _find_speed(situation, given, again)
    if best < _WORTH_TELLING * speed:
        return None
    costly = [
        name
        for name in given
        if _find_speed(situation, [other for other in given if other != name], again) < (1 - _MATTERS) * best
    ]
    if not costly:
        return None
    verb, changes = ("costs" if len(costly) == 1 else "cost"), " ".join(_change(name) for name in costly)
    return (
        f"{' and '.join(costly)} in the manifest {verb} speed: left to the plan it would be about {format_count(best)} "
        f"tokens/s, {best / speed:.1f} times as fast, and the same training: {changes}"
    )


def _left_to_plan(name: str) -> object:
    return TrainingConfig.model_fields[name].default


def _find_speed(situation: Situation, freed: list[str], again: Again) -> float:
    config = situation.config.model_copy(update={name: _left_to_plan(name) for name in freed})
    return again(config).speed.tokens_per_second or 0.0


def _change(name: str) -> str:
    value = _left_to_plan(name)
    return f"--set training.config.{name}={'null' if value is None else value}"
