"""What accelerate started, told by its environment: the input of a plan that is made inside a bare launch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.choices import Strategy
from launcher.errors import InputError

_STAGES: Mapping[int, Strategy] = {1: "zero1", 2: "zero2", 3: "zero3"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    rank: int
    num_ranks: int
    ranks_per_node: int
    strategy: Strategy
    on_cpu: bool  # told to leave the GPUs alone, or to stand in for them

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.ranks_per_node


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Of one rank among the nodes."""

    rank: int
    num_ranks: int
    ranks_per_node: int  # on this one; whether the others have as many is not known here
    node: int
    num_nodes: int
    is_first: bool  # of its node


def find_place(environment: Mapping[str, str]) -> Place:
    """By the agent's own count of nodes, where there is an agent. A process that is told nothing is alone."""
    num_ranks = _read(environment, "WORLD_SIZE", 1)
    per_node = max(1, _read(environment, "LOCAL_WORLD_SIZE", num_ranks))
    rank = _read(environment, "RANK", 0)
    return Place(
        rank=rank,
        num_ranks=num_ranks,
        ranks_per_node=per_node,
        node=_read(environment, "GROUP_RANK", rank // per_node),
        num_nodes=_read(environment, "GROUP_WORLD_SIZE", max(1, num_ranks // per_node)),
        is_first=_read(environment, "LOCAL_RANK", rank % per_node) == 0,
    )


def find_started(environment: Mapping[str, str]) -> Started:
    num_ranks = _read(environment, "WORLD_SIZE", 1)
    per_node = _read(environment, "LOCAL_WORLD_SIZE", num_ranks)
    if per_node < 1 or num_ranks % per_node:
        raise InputError(f"{num_ranks} processes do not spread over nodes of {per_node}: all nodes must be alike")
    if num_ranks > 1:
        _check_told_apart(environment, num_ranks)
    return Started(
        rank=_read(environment, "RANK", 0),
        num_ranks=num_ranks,
        ranks_per_node=per_node,
        strategy=_find_strategy(environment, num_ranks),
        on_cpu=_is_on(environment, "ACCELERATE_USE_CPU") or environment.get("ACCELERATE_TORCH_DEVICE") == "cpu",
    )


def find_unknown_rank(environment: Mapping[str, str]) -> str | None:
    """The variable that is missing where there are many processes and this one is not told which of them it is.

    Each of them would believe that it is the first and train alone, or wait for others that never come.
    """
    return next((name for name in ("RANK", "LOCAL_RANK") if name not in environment), None)


def _check_told_apart(environment: Mapping[str, str], num_ranks: int) -> None:
    missing = find_unknown_rank(environment)
    if missing is not None:
        raise InputError(
            f"WORLD_SIZE says {num_ranks} processes, and {missing} does not say which of them this is",
            hint="start it with accelerate launch, or unset WORLD_SIZE where it is left over in the shell",
        )


def _read(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name, str(default))
    if not (value.isascii() and value.isdecimal()):
        raise InputError(f"the variable {name} is {value!r}, not a number", hint="accelerate launch sets it; unset it")
    return int(value)


def _find_strategy(environment: Mapping[str, str], num_ranks: int) -> Strategy:
    if _is_on(environment, "ACCELERATE_USE_DEEPSPEED"):
        return _find_stage(environment)
    if _is_on(environment, "ACCELERATE_USE_FSDP"):
        if environment.get("FSDP_VERSION", "1") != "2":
            raise InputError(
                "accelerate was told to use FSDP version 1",
                hint="set fsdp_version: 2 in its file; presets here have it",
            )
        return "fsdp2"
    return "ddp" if num_ranks > 1 else "single"


def _find_stage(environment: Mapping[str, str]) -> Strategy:
    file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")
    if file and file != "none":
        try:
            config = json.loads(Path(file).read_text(encoding="utf-8"))
            stage = config["zero_optimization"]["stage"]
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(f"{file}: DeepSpeed's file cannot be read, or names no ZeRO stage") from None
    else:
        stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    if str(stage) not in ("1", "2", "3"):
        raise InputError(f"DeepSpeed is told to run ZeRO stage {stage}", hint="stages 1, 2 and 3 can be trained")
    return _STAGES[int(stage)]


def _is_on(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").lower() in ("1", "true", "yes", "on")
