"""What settings of the manifest cost that decide how to run and not what is learnt: the plan obeys, and says so."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from launcher.manifest.config import TrainingConfig
from launcher.plan.model import SpeedPlan
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

FindSpeed = Callable[[Situation], float | None]  # of the plan for it, in tokens a second


def tell_costly(situation: Situation, planned: SpeedPlan, find_speed: FindSpeed) -> Iterator[str]:
    speed = planned.tokens_per_second
    given = [name for name in _HOW_TO_RUN if getattr(situation.config, name) != _left_to_plan(name)]
    if situation.gpu is None or situation.is_smoke or speed is None or not given:
        return

    def find(freed: Collection[str]) -> float:
        config = situation.config.model_copy(update={name: _left_to_plan(name) for name in freed})
        return find_speed(replace(situation, config=config)) or 0.0

    best = find(given)
    if best < _WORTH_TELLING * speed:
        return
    costly = [name for name in given if find(set(given) - {name}) < (1 - _MATTERS) * best]
    if costly:
        verb, changes = ("costs" if len(costly) == 1 else "cost"), " ".join(_change(name) for name in costly)
        yield (
            f"{' and '.join(costly)} in the manifest {verb} speed: left to the plan it would be about "
            f"{format_count(best)} tokens/s, {best / speed:.1f} times as fast, and the same training: {changes}"
        )


def _left_to_plan(name: str) -> object:
    return TrainingConfig.model_fields[name].default


def _change(name: str) -> str:
    value = _left_to_plan(name)
    return f"--set training.config.{name}={'null' if value is None else value}"
