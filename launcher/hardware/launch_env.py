"""The launch environment: rank, world size and strategy from the variables that accelerate and torchrun set."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.core.choices import Strategy
from launcher.core.errors import InputError

_STAGES: Mapping[int, Strategy] = {1: "zero1", 2: "zero2", 3: "zero3"}


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchEnv:
    """What accelerate launched, read from its environment variables."""

    rank: int
    num_ranks: int
    ranks_per_node: int
    strategy: Strategy
    on_cpu: bool  # ACCELERATE_USE_CPU, or a CPU torch device

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return self.num_ranks // self.ranks_per_node


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """Position of this process among all ranks and nodes."""

    rank: int
    num_ranks: int
    ranks_per_node: int  # of this node; other nodes may differ
    node: int
    num_nodes: int
    is_first: bool  # local rank 0


def read_rank_info(environment: Mapping[str, str]) -> RankInfo:
    """Read the position of this process from torchrun's variables. Without them it is the only process."""
    num_ranks = _read(environment, "WORLD_SIZE", 1)
    per_node = max(1, _read(environment, "LOCAL_WORLD_SIZE", num_ranks))
    rank = _read(environment, "RANK", 0)
    return RankInfo(
        rank=rank,
        num_ranks=num_ranks,
        ranks_per_node=per_node,
        node=_read(environment, "GROUP_RANK", rank // per_node),
        num_nodes=_read(environment, "GROUP_WORLD_SIZE", max(1, num_ranks // per_node)),
        is_first=_read(environment, "LOCAL_RANK", rank % per_node) == 0,
    )


def read_launch_env(environment: Mapping[str, str]) -> LaunchEnv:
    """Read what accelerate launched; raise InputError if the variables are inconsistent."""
    num_ranks = _read(environment, "WORLD_SIZE", 1)
    per_node = _read(environment, "LOCAL_WORLD_SIZE", num_ranks)
    if per_node < 1 or num_ranks % per_node:
        what = f"{num_ranks} processes cannot be divided into nodes of {per_node}"
        raise InputError(f"{what}: all nodes must have the same number of processes")
    if num_ranks > 1:
        _check_rank_variables(environment, num_ranks)
    return LaunchEnv(
        rank=_read(environment, "RANK", 0),
        num_ranks=num_ranks,
        ranks_per_node=per_node,
        strategy=_find_strategy(environment, num_ranks),
        on_cpu=_is_on(environment, "ACCELERATE_USE_CPU") or environment.get("ACCELERATE_TORCH_DEVICE") == "cpu",
    )


def find_missing_rank_variable(environment: Mapping[str, str]) -> str | None:
    """Return the name of the first rank variable that is not set (RANK, LOCAL_RANK), or None.

    Without it every process would act as rank 0 and train alone, or wait forever for the others.
    """
    return next((name for name in ("RANK", "LOCAL_RANK") if name not in environment), None)


def _check_rank_variables(environment: Mapping[str, str], num_ranks: int) -> None:
    missing = find_missing_rank_variable(environment)
    if missing is not None:
        raise InputError(
            f"WORLD_SIZE is {num_ranks}, but {missing} is not set",
            hint="start it with accelerate launch, or unset WORLD_SIZE if it is left over in the shell",
        )


def _read(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name, str(default))
    if not (value.isascii() and value.isdecimal()):
        raise InputError(
            f"the environment variable {name} is {value!r}, not a number",
            hint="unset it; accelerate launch sets it correctly",
        )
    return int(value)


def _find_strategy(environment: Mapping[str, str], num_ranks: int) -> Strategy:
    if _is_on(environment, "ACCELERATE_USE_DEEPSPEED"):
        return _find_stage(environment)
    if _is_on(environment, "ACCELERATE_USE_FSDP"):
        if environment.get("FSDP_VERSION", "1") != "2":
            raise InputError(
                "accelerate is configured for FSDP version 1, which is not supported",
                hint="set fsdp_version: 2 in its config file, as the presets in accelerate_configs/ do",
            )
        return _find_sharding(environment, num_ranks)
    return "ddp" if num_ranks > 1 else "single"


def _find_sharding(environment: Mapping[str, str], num_ranks: int) -> Strategy:
    """Return hsdp if each node holds one replica, fsdp2 if all ranks hold one; raise InputError for other meshes."""
    if not _is_on(environment, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        return "fsdp2"
    shards, per_node = (
        _read(environment, name, default)
        for name, default in (("PARALLELISM_CONFIG_DP_SHARD_SIZE", 1), ("LOCAL_WORLD_SIZE", num_ranks))
    )
    replicas = _read(environment, "PARALLELISM_CONFIG_DP_REPLICATE_SIZE", 1)
    if shards == num_ranks:
        return "fsdp2"
    if shards != per_node or replicas * shards != num_ranks:
        raise InputError(
            f"accelerate is configured for {replicas} replicas of {shards} shards, on nodes of {per_node} processes: "
            "HSDP needs one replica per node",
            hint="set dp_replicate_size to the number of nodes and dp_shard_size to the GPUs of a node, without "
            "tensor, context and sequence parallelism",
        )
    return "hsdp"


def _find_stage(environment: Mapping[str, str]) -> Strategy:
    file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")
    if file and file != "none":
        try:
            config = json.loads(Path(file).read_text(encoding="utf-8"))
            stage = config["zero_optimization"]["stage"]
        except OSError as error:
            raise InputError(
                f"{file}: the DeepSpeed config that the accelerate config names cannot be read: {error.strerror}",
                hint="its path is relative to the current folder: run accelerate launch in the project root, or set "
                "deepspeed_config_file to an absolute path",
            ) from None
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f"{file}: the DeepSpeed config is not readable JSON with a zero_optimization.stage",
                hint="set the stage to 1, 2 or 3 in this file, or name another one in the accelerate config",
            ) from None
    else:
        stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    if str(stage) not in ("1", "2", "3"):
        raise InputError(
            f"DeepSpeed is configured for ZeRO stage {stage}, which is not supported",
            hint="stages 1, 2 and 3 are supported",
        )
    return _STAGES[int(stage)]


def _is_on(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").lower() in ("1", "true", "yes", "on")
