"""Launch environment that accelerate sets for each process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.core.choices import Strategy
from launcher.core.errors import InputError
from launcher.hardware.launch_env import LaunchEnv, RankInfo, read_launch_env, read_rank_info

TWO_RANKS = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}
FSDP = {"ACCELERATE_USE_FSDP": "true"}


def test_single_process_without_variables() -> None:
    assert read_launch_env({}) == LaunchEnv(rank=0, num_ranks=1, ranks_per_node=1, strategy="single", on_cpu=False)


@pytest.mark.parametrize(
    ("more", "strategy"),
    [
        ({}, "ddp"),
        ({**FSDP, "FSDP_VERSION": "2"}, "fsdp2"),
        ({**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, "zero1"),
        (DEEPSPEED, "zero2"),
        ({**DEEPSPEED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": "none", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "zero3"),
        # Only a misconfigured environment sets both; accelerate prefers DeepSpeed.
        ({**DEEPSPEED, **FSDP, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "zero3"),
        ({"ACCELERATE_USE_FSDP": "false", "ACCELERATE_USE_DEEPSPEED": "0"}, "ddp"),
    ],
)
def test_strategy_follows_from_variables(more: dict[str, str], strategy: Strategy) -> None:
    started = read_launch_env({**TWO_RANKS, **more})
    assert started.strategy == strategy
    assert (started.rank, started.num_ranks, started.num_nodes) == (1, 2, 1)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_config_file_overrides_the_variable(tmp_path: Path, stage: int) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    variables = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file), "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
    assert read_launch_env({**TWO_RANKS, **DEEPSPEED, **variables}).strategy == f"zero{stage}"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b"{}", b'{"zero_optimization": 3}', b'{"zero_optimization": {}}'],
)
def test_broken_deepspeed_config_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "ds.json"
    file.write_bytes(content)
    variables = {**TWO_RANKS, **DEEPSPEED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    with pytest.raises(InputError, match=r"ds\.json: the DeepSpeed config is not readable JSON with a zero_opt"):
        read_launch_env(variables)


def test_missing_deepspeed_config_is_refused(tmp_path: Path) -> None:
    variables = {**TWO_RANKS, **DEEPSPEED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "none.json")}
    with pytest.raises(InputError, match=r"none\.json: .* cannot be read: No such file") as caught:
        read_launch_env(variables)
    assert "run accelerate launch in the project root" in caught.value.hint


@pytest.mark.parametrize("stage", ["0", "4", "true", "", "1.0"])
def test_unsupported_zero_stage_is_refused(stage: str) -> None:
    variables = {**TWO_RANKS, **DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": stage}
    with pytest.raises(InputError, match="DeepSpeed is configured for ZeRO stage") as refused:
        read_launch_env(variables)
    assert "stages 1, 2 and 3 are supported" in str(refused.value)


@pytest.mark.parametrize("version", [{}, {"FSDP_VERSION": "1"}])
def test_fsdp_1_is_refused_with_a_hint(version: dict[str, str]) -> None:
    with pytest.raises(InputError, match="FSDP version 1") as refused:
        read_launch_env({**TWO_RANKS, **FSDP, **version})
    assert "fsdp_version: 2" in str(refused.value)


MESH = {
    **FSDP,
    "FSDP_VERSION": "2",
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
}


def make_mesh(replicas: int, shards: int) -> dict[str, str]:
    sizes = {"DP_REPLICATE_SIZE": replicas, "DP_SHARD_SIZE": shards}
    return MESH | {f"PARALLELISM_CONFIG_{name}": str(size) for name, size in sizes.items()}


def test_replicas_of_whole_nodes_are_hsdp() -> None:
    assert read_launch_env(make_mesh(2, 4)).strategy == "hsdp"
    assert read_launch_env(make_mesh(1, 8)).strategy == "fsdp2"


@pytest.mark.parametrize(("replicas", "shards"), [(4, 2), (1, 4), (2, 3)])
def test_other_meshes_are_refused(replicas: int, shards: int) -> None:
    with pytest.raises(InputError, match=f"{replicas} replicas of {shards} shards, on nodes of 4") as refused:
        read_launch_env(make_mesh(replicas, shards))
    assert "dp_shard_size to the GPUs of a node" in refused.value.hint


def test_nodes_are_counted_and_must_have_equal_ranks() -> None:
    four = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}
    assert (read_launch_env(four).num_nodes, read_launch_env(four).ranks_per_node) == (4, 2)
    with pytest.raises(InputError, match="8 processes cannot be divided into nodes of 3"):
        read_launch_env({**four, "LOCAL_WORLD_SIZE": "3"})
    with pytest.raises(InputError, match="8 processes cannot be divided into nodes of 0"):
        read_launch_env({**four, "LOCAL_WORLD_SIZE": "0"})


@pytest.mark.parametrize(
    ("more", "on_cpu"),
    [
        ({"ACCELERATE_USE_CPU": "1"}, True),
        ({"ACCELERATE_USE_CPU": "True"}, True),
        ({"ACCELERATE_USE_CPU": "False"}, False),
        ({"ACCELERATE_TORCH_DEVICE": "cpu"}, True),
        ({"ACCELERATE_TORCH_DEVICE": "cuda"}, False),
        ({}, False),
    ],
)
def test_cpu_only_launch_is_detected(more: dict[str, str], on_cpu: bool) -> None:
    assert read_launch_env({**TWO_RANKS, **more}).on_cpu is on_cpu


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("value", ["", "two", "-1", "1.5"])
def test_non_numeric_variable_is_refused(name: str, value: str) -> None:
    """Left over in a shell, or set by a scheduler that means something else."""
    with pytest.raises(InputError, match=name):
        read_launch_env({**TWO_RANKS, name: value})


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK"])
def test_missing_rank_variable_is_refused(missing: str) -> None:
    """With WORLD_SIZE alone, every process would act as rank 0."""
    variables = {name: value for name, value in TWO_RANKS.items() if name != missing}
    with pytest.raises(InputError, match=missing):
        read_launch_env(variables)


def test_rank_info_of_a_single_process() -> None:
    alone = RankInfo(rank=0, num_ranks=1, ranks_per_node=1, node=0, num_nodes=1, is_first=True)
    assert read_rank_info({}) == alone


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (1, 0, False)),
        ({"RANK": "5", "WORLD_SIZE": "8"}, (4, 2, False)),
        ({"RANK": "4", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}, (4, 2, True)),
        # The agent's variables take precedence: its nodes may differ in size and order.
        ({"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}, (2, 1, True)),
    ],
)
def test_rank_info_across_nodes(variables: dict[str, str], expected: tuple[int, int, bool]) -> None:
    place = read_rank_info({**TWO_RANKS, **variables})
    assert (place.num_nodes, place.node, place.is_first) == expected
