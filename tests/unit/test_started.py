"""What accelerate started, read from the environment that it gives to a process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.choices import Strategy
from launcher.errors import InputError
from launcher.started import Place, Started, find_place, find_started

TWO_RANKS = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}
FSDP = {"ACCELERATE_USE_FSDP": "true"}


def test_a_process_of_its_own() -> None:
    assert find_started({}) == Started(rank=0, num_ranks=1, ranks_per_node=1, strategy="single", on_cpu=False)


@pytest.mark.parametrize(
    ("more", "strategy"),
    [
        ({}, "ddp"),
        ({**FSDP, "FSDP_VERSION": "2"}, "fsdp2"),
        ({**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, "zero1"),
        (DEEPSPEED, "zero2"),
        ({**DEEPSPEED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": "none", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "zero3"),
        # Both are set by nobody but a mixed-up environment; accelerate lets DeepSpeed win.
        ({**DEEPSPEED, **FSDP, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "zero3"),
        ({"ACCELERATE_USE_FSDP": "false", "ACCELERATE_USE_DEEPSPEED": "0"}, "ddp"),
    ],
)
def test_strategies(more: dict[str, str], strategy: Strategy) -> None:
    started = find_started({**TWO_RANKS, **more})
    assert started.strategy == strategy
    assert (started.rank, started.num_ranks, started.num_nodes) == (1, 2, 1)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_file_wins_over_the_variable(tmp_path: Path, stage: int) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    told = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file), "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
    assert find_started({**TWO_RANKS, **DEEPSPEED, **told}).strategy == f"zero{stage}"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b"{}", b'{"zero_optimization": 3}', b'{"zero_optimization": {}}'],
)
def test_a_broken_deepspeed_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "ds.json"
    file.write_bytes(content)
    told = {**TWO_RANKS, **DEEPSPEED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    with pytest.raises(InputError, match=r"ds\.json: DeepSpeed's file cannot be read, or names no ZeRO stage"):
        find_started(told)


def test_a_deepspeed_file_that_is_not_there(tmp_path: Path) -> None:
    told = {**TWO_RANKS, **DEEPSPEED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "none.json")}
    with pytest.raises(InputError, match=r"none\.json: DeepSpeed's file cannot be read"):
        find_started(told)


@pytest.mark.parametrize("stage", ["0", "4", "true", "", "1.0"])
def test_a_stage_that_nobody_trains(stage: str) -> None:
    told = {**TWO_RANKS, **DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": stage}
    with pytest.raises(InputError, match="DeepSpeed is told to run ZeRO stage") as refused:
        find_started(told)
    assert "stages 1, 2 and 3 can be trained" in str(refused.value)


@pytest.mark.parametrize("version", [{}, {"FSDP_VERSION": "1"}])
def test_fsdp_1_is_refused_with_the_way_out(version: dict[str, str]) -> None:
    with pytest.raises(InputError, match="FSDP version 1") as refused:
        find_started({**TWO_RANKS, **FSDP, **version})
    assert "fsdp_version: 2" in str(refused.value)


def test_nodes_are_counted_and_must_be_alike() -> None:
    four = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}
    assert (find_started(four).num_nodes, find_started(four).ranks_per_node) == (4, 2)
    with pytest.raises(InputError, match="8 processes do not spread over nodes of 3"):
        find_started({**four, "LOCAL_WORLD_SIZE": "3"})
    with pytest.raises(InputError, match="8 processes do not spread over nodes of 0"):
        find_started({**four, "LOCAL_WORLD_SIZE": "0"})


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
def test_told_to_leave_the_gpus_alone(more: dict[str, str], on_cpu: bool) -> None:
    assert find_started({**TWO_RANKS, **more}).on_cpu is on_cpu


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("value", ["", "two", "-1", "1.5"])
def test_a_number_that_is_none(name: str, value: str) -> None:
    """Left over in a shell, or set by a scheduler that means something else."""
    with pytest.raises(InputError, match=name):
        find_started({**TWO_RANKS, name: value})


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK"])
def test_many_processes_of_which_none_knows_which_it_is(missing: str) -> None:
    """WORLD_SIZE alone: each of them would believe that it is the first."""
    told = {name: value for name, value in TWO_RANKS.items() if name != missing}
    with pytest.raises(InputError, match=missing):
        find_started(told)


def test_a_place_of_its_own() -> None:
    alone = Place(rank=0, num_ranks=1, ranks_per_node=1, node=0, num_nodes=1, is_first=True)
    assert find_place({}) == alone


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, (1, 0, False)),
        ({"RANK": "5", "WORLD_SIZE": "8"}, (4, 2, False)),
        ({"RANK": "4", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}, (4, 2, True)),
        # The agent knows better: its nodes need not be alike, nor be counted as ranks are.
        ({"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}, (2, 1, True)),
    ],
)
def test_a_place_among_nodes(told: dict[str, str], expected: tuple[int, int, bool]) -> None:
    place = find_place({**TWO_RANKS, **told})
    assert (place.num_nodes, place.node, place.is_first) == expected
