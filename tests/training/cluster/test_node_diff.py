"""Differences between nodes are listed with every node under its value, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.core.units import GIB
from launcher.hardware.gpu_catalogue import lookup_gpu
from launcher.plan.model import Plan
from launcher.training.cluster.node_diff import (
    ComparedNode,
    estimate_checkpoint_bytes,
    find_differences,
    find_warnings,
    format_numbers,
    format_summary,
    list_used_packages,
)
from launcher.training.cluster.node_info import NodeInfo, flatten_plan
from tests.training.builders import vary

COMMITS = ("abc" * 13 + "a", "def" * 13 + "d")
VERSIONS = {
    "launcher": "0.1.0",
    "python": "3.11.4",
    "torch": "2.13.0",
    "transformers": "5.22.0",
    "accelerate": "1.15.0",
    "peft": "0.21.2",
    "numpy": "2.4.0",
    "deepspeed": "0.19.8",
}


def make_node(node: int, **changes: Any) -> ComparedNode:
    clock = {name: changes.pop(name) for name in ("clock_offset", "clock_error") if name in changes}
    facts: dict[str, Any] = {
        "node": node,
        "host": f"host{node}",
        "num_ranks": 8,
        "commit": COMMITS[0],
        "code_sha256": "1" * 64,
        "versions": VERSIONS,
        "manifest_sha256": "2" * 64,
        "plan": {"strategy": "ddp", "batch.micro_batch_size": "4"},
        "data_key": "3" * 64,
        "data_parts": {"tokenizer": "a", "data (train)": "b"},
        "device": "H100 SXM",
        "driver": "570.86",
        "run_free_bytes": 900 * GIB,
        "data_free_bytes": 900 * GIB,
        "data_needed_bytes": 0,
        "ram_bytes": 900 * GIB,
        **changes,
    }
    return ComparedNode(facts=NodeInfo(**facts), **clock)


def say(nodes: list[ComparedNode], plan: Plan) -> list[str]:
    return [str(problem) for problem in find_differences(nodes, plan)]


def with_version(name: str, version: str) -> dict[str, Any]:
    return {"versions": {**VERSIONS, name: version}}


# What to change on a node, and how the problem begins.
HARD: dict[str, tuple[dict[str, Any], str]] = {
    "commit": ({"commit": COMMITS[1]}, "commit: "),
    "files": ({"code_sha256": "9" * 64}, "launcher's files: "),
    "python": (with_version("python", "3.12.4"), "Python: "),
    "launcher": (with_version("launcher", "0.2.0"), "launcher: "),
    "torch": (with_version("torch", "2.11.0"), "torch: "),
    "transformers": (with_version("transformers", "5.0.0"), "transformers: "),
    "accelerate": (with_version("accelerate", "1.0.0"), "accelerate: "),
    "peft": (with_version("peft", "0.1.0"), "peft: "),
    "numpy": (with_version("numpy", "1.0.0"), "numpy: "),
    "manifest": ({"manifest_sha256": "8" * 64}, "manifest: "),
    "plan": ({"plan": {"strategy": "ddp", "batch.micro_batch_size": "2"}}, "plan, batch.micro_batch_size: "),
    "data": ({"data_key": "7" * 64, "data_parts": {"tokenizer": "a", "data (train)": "c"}}, "data key: "),
    "device": ({"device": "A100 SXM4 80GB"}, "CPU: "),
    "ranks": ({"num_ranks": 4}, "ranks: "),
}


@given(kind=st.sampled_from(sorted(HARD)), num_nodes=st.integers(2, 40), data=st.data())
def test_a_difference_is_listed_with_every_node_once(plan: Plan, kind: str, num_nodes: int, data: Any) -> None:
    changes, begins = HARD[kind]
    odd = data.draw(st.sets(st.integers(0, num_nodes - 1), min_size=1, max_size=num_nodes - 1))
    nodes = [make_node(node, **(changes if node in odd else {})) for node in range(num_nodes)]
    (problem,) = say(nodes, plan)
    assert problem.startswith(begins)
    groups = [group.partition(" on ")[2] for group in problem.removeprefix(begins).partition(" (what")[0].split("; ")]
    assert sorted(map(read_nodes, groups)) == sorted((sorted(odd), sorted(set(range(num_nodes)) - odd)))
    assert len(read_nodes(groups[0])) >= len(read_nodes(groups[1])), "the most common value comes first"


def read_nodes(text: str) -> list[int]:
    """`node 1 (host1), node 2 (host2)`, or `nodes 0 to 4, 7`."""
    if text.startswith("node "):
        return [int(part.split()[1]) for part in text.split(", ")]
    found: list[int] = []
    for part in text.removeprefix("nodes ").split(", "):
        first, _, last = part.partition(" to ")
        found += range(int(first), int(last or first) + 1)
    return found


@given(num_nodes=st.integers(1, 20))
def test_equal_nodes_have_no_problems(plan: Plan, num_nodes: int) -> None:
    nodes = [make_node(node) for node in range(num_nodes)]
    assert say(nodes, plan) == []
    assert find_warnings(nodes, plan) == ()


def test_two_commits_are_shown_shortened(plan: Plan) -> None:
    nodes = [make_node(0), make_node(1, commit=COMMITS[1])]
    assert say(nodes, plan) == ["commit: abcabcabcabc on node 0 (host0); defdefdefdef on node 1 (host1)"]


def test_all_differences_are_listed_at_once(plan: Plan) -> None:
    versions = {**VERSIONS, "torch": "2.11.0", "python": "3.12.1"}
    nodes = [make_node(0), make_node(1, commit=COMMITS[1], versions=versions, device="A100", data_key="0" * 64)]
    names = [problem.where for problem in find_differences(nodes, plan)]
    assert names == ["commit", "Python", "torch", "data key", "CPU"]


def test_changed_parts_of_the_data_are_named(plan: Plan) -> None:
    other = {"data_key": "4" * 64, "data_parts": {"tokenizer": "z", "data (train)": "b", "data (test)": "c"}}
    (problem,) = say([make_node(0), make_node(1, **other)], plan)
    assert problem.endswith("(what differs: data (test), tokenizer)")


def test_equivalent_values_are_no_difference(plan: Plan) -> None:
    """A Python patch release, a mark of changes with equal files, and a node without git."""
    nodes = [
        make_node(0),
        make_node(1, **with_version("python", "3.11.9")),
        make_node(2, commit=f"{COMMITS[0]}+changes"),
        make_node(3, commit=None),
    ]
    assert say(nodes, plan) == []


def test_only_used_packages_must_be_equal(plan: Plan) -> None:
    nodes = [make_node(0), make_node(1, **with_version("deepspeed", "0.18.0"))]
    assert say(nodes, plan) == []
    (warning,) = find_warnings(nodes, plan)
    assert "deepspeed differs, but is not used by this run: 0.19.8 on node 0 (host0); 0.18.0 on" in warning
    zero = vary(plan, {"strategy": "zero2"})
    assert say(nodes, zero) == ["deepspeed: 0.19.8 on node 0 (host0); 0.18.0 on node 1 (host1)"]
    assert find_warnings(nodes, zero) == ()
    missing = make_node(1, versions={name: version for name, version in VERSIONS.items() if name != "deepspeed"})
    assert say([make_node(0), missing], zero) == ["deepspeed: 0.19.8 on node 0 (host0); none on node 1 (host1)"]


def test_used_packages_follow_the_plan(plan: Plan) -> None:
    always = {"launcher", "torch", "transformers", "accelerate", "peft", "numpy"}
    gpu = lookup_gpu("h100").model_dump()
    assert set(list_used_packages(plan)) == always
    assert set(list_used_packages(vary(plan, {"hardware.gpu": gpu, "loss_kernel": "fused"}))) - always == {
        "nccl",
        "triton",
    }
    assert set(list_used_packages(vary(plan, {"optimizer.name": "adamw_bnb_8bit"}))) - always == {"bitsandbytes"}


def test_many_differences_of_the_plan_are_truncated(plan: Plan) -> None:
    nodes = [make_node(node, plan={f"key{index:02}": str(node) for index in range(20)}) for node in (0, 1)]
    said = say(nodes, plan)
    assert len(said) == 13
    assert said[-1] == "plan: and 8 more"


@pytest.mark.parametrize(
    ("ahead", "within", "said"),
    [
        (1.9, 0.1, None),
        (-1.9, 0.1, None),
        (5.0, 4.0, None),  # within the measurement error
        (5.0, 0.1, "node 1 (host1): its clock differs from node 0's by +5.0 s"),
        (-60.0, 0.1, "node 1 (host1): its clock differs from node 0's by -60.0 s"),
    ],
)
def test_clock_offsets_beyond_the_error_are_warned_about(
    plan: Plan, ahead: float, within: float, said: str | None
) -> None:
    nodes = [make_node(0), make_node(1, clock_offset=ahead, clock_error=within)]
    assert find_warnings(nodes, plan) == (() if said is None else (said,))
    assert say(nodes, plan) == []


def test_drivers_may_differ(plan: Plan) -> None:
    nodes = [make_node(0), make_node(1, driver="550.1")]
    assert find_warnings(nodes, plan) == ("GPU drivers differ: 570.86 on node 0 (host0); 550.1 on node 1 (host1)",)
    assert say(nodes, plan) == []


def test_low_disk_space_and_memory_are_warned_about(plan: Plan) -> None:
    saving = vary(plan, {"schedule.save_every_steps": 5, "schedule.num_steps": 20, "memory.host_bytes": 10 * GIB})
    parameters = saving.adapter.trainable_parameters
    short = {"run_free_bytes": 12 * parameters, "data_free_bytes": GIB, "data_needed_bytes": 2 * GIB}
    warnings = find_warnings([make_node(node, **short, ram_bytes=79 * GIB) for node in (0, 1)], saving)
    assert [warning.partition(":")[0] for warning in warnings] == ["node 0 (host0)"] * 3 + ["node 1 (host1)"] * 2
    assert any("1.0 GiB free for the data, preparing it may take about 2.0 GiB" in warning for warning in warnings)
    assert any("79.0 GiB of memory available, the offloaded state takes about 80.0 GiB" in one for one in warnings)
    assert "free for the run, its checkpoints take about" in warnings[2], "the first rank writes them, on node 0"


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, 0),
        ({"save_every_steps": 5, "num_steps": 20}, 4),
        ({"save_every_steps": 5, "num_steps": 20, "save_total_limit": 2}, 3),
        ({"save_every_epochs": 0.5, "epochs": 2.0}, 4),
        ({"save_every_steps": 5, "num_steps": None}, 1),
    ],
)
def test_disk_space_of_checkpoints(plan: Plan, changes: dict[str, Any], kept: int) -> None:
    never: dict[str, Any] = {"save_every_steps": None, "save_every_epochs": None, "save_total_limit": None}
    changed = vary(plan, {f"schedule.{key}": value for key, value in (never | changes).items()})
    assert estimate_checkpoint_bytes(changed) == changed.adapter.trainable_parameters * (12 * kept + 4)


def test_summary_of_equal_nodes() -> None:
    line = format_summary([make_node(0), make_node(1, clock_offset=-0.4, clock_error=0.1)])
    assert line == (
        "2 equal (node 0 (host0), node 1 (host1)): commit abcabcabcabc, torch 2.13.0, data 333333333333, H100 SXM; "
        "clocks within 0.5 s"
    )


def test_number_ranges() -> None:
    assert format_numbers([0, 1, 2, 4, 7, 6]) == "0 to 2, 4, 6 to 7"


def test_only_the_relevant_part_of_a_plan_is_compared(plan: Plan) -> None:
    """Measurements, paths and the number of loader workers may differ."""
    same = {
        "hardware.ram_gib_per_node": 1.0,
        "hardware.cpu_cores_per_node": 3,
        "data.folder": "/elsewhere",
        "loader.num_workers": 7,
        "notes": ("another",),
    }
    assert flatten_plan(vary(plan, same)) == flatten_plan(plan)
    for key, value in {"optimizer.learning_rate": 0.5, "hardware.nodes": 9, "attention.backend": "eager"}.items():
        assert flatten_plan(vary(plan, {key: value})).get(key) != flatten_plan(plan)[key]
