"""Requests: flags reach the plan, for this machine and for a GPU of the catalogue."""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.core.errors import InputError
from launcher.plan import Plan
from launcher.request.flag_types import price_per_hour, variable_names
from launcher.request.request import Request, merge_requests, plan_request
from tests.conftest import Tree, WriteManifest
from tests.fake_nvml import FakeGpu, install_nvml


@pytest.fixture
def two_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two H100s."""
    install_nvml(monkeypatch, *(FakeGpu("NVIDIA H100 80GB HBM3", 81559, 81000, uuid=f"GPU-{at}") for at in range(2)))


def plan(**asked: Any) -> Plan:
    return plan_request(Request(**{"expert": "neo4j", **asked})).plan


def test_cores_and_memory_reach_the_plan_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hardware = plan(cpu_cores_per_node=3, ram_gib_per_node=17.5).hardware
    assert (hardware.cpu_cores_per_node, hardware.ram_gib_per_node) == (3, 17.5)
    assert hardware.source == "probe"


@pytest.mark.usefixtures("two_h100")
def test_fewer_gpus_than_available_can_be_requested() -> None:
    assert plan().hardware.gpus_per_node == 2
    assert plan(gpus_per_node=1, nodes=3).hardware.num_ranks == 3


@pytest.mark.usefixtures("two_h100")
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"gpus_per_node": 3}, "--gpus 3: this machine has only 2"),
        ({"gpus_per_node": 0}, "--gpus and --nodes must be at least 1"),
        ({"nodes": 5000}, "nodes: must be between 1 and 1024, not 5000"),
        ({"cpu_cores_per_node": 10**8}, "CPU cores per node: must be between 1 and 4096"),
        ({"ram_gib_per_node": float("nan")}, "RAM per node in GiB: must be between 1 and 65536, not nan"),
        ({"ram_gib_per_node": 0.0}, "RAM per node in GiB: must be between 1 and 65536, not 0"),
    ],
)
def test_more_than_this_machine_has_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan(**asked)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"gpus_per_node": 2}, "--gpus and --nodes have no effect: this machine has no GPU"),
        ({"strategy": "fsdp2"}, "--strategy fsdp2 has no effect: this machine has no GPU"),
        ({"base": "Qwen/Qwen3-4B"}, "--base Qwen/Qwen3-4B has no effect: the smoke profile uses a tiny base"),
    ],
)
def test_what_has_no_effect_without_a_gpu_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan(**asked)


def test_base_is_used_without_a_gpu_if_the_full_profile_is_requested() -> None:
    asked = plan(base="Qwen/Qwen3-1.7B", profile="full", ram_gib_per_node=64.0)
    assert asked.base.name == "Qwen/Qwen3-1.7B"


TWO_BASES = [
    {"name": "Qwen/Qwen3-0.6B", "revision": "aaa"},
    {"name": "Qwen/Qwen3-1.7B", "revision": "bbb"},
    {"name": "Qwen/Qwen3-4B", "revision": "ccc"},
]


@pytest.mark.parametrize(
    ("wanted", "bases"),
    [
        (None, ["Qwen/Qwen3-0.6B@aaa", "Qwen/Qwen3-1.7B@bbb", "Qwen/Qwen3-4B@ccc"]),
        ("qwen3-1.7b", ["Qwen/Qwen3-1.7B@bbb", "Qwen/Qwen3-0.6B@aaa", "Qwen/Qwen3-4B@ccc"]),
        ("qwen/qwen3-4b", ["Qwen/Qwen3-4B@ccc", "Qwen/Qwen3-0.6B@aaa", "Qwen/Qwen3-1.7B@bbb"]),
        ("other/Qwen3-1.7B", ["other/Qwen3-1.7B@None", "Qwen/Qwen3-1.7B@bbb", "Qwen/Qwen3-4B@ccc"]),
        ("Qwen/Qwen3-8B", ["Qwen/Qwen3-8B@None", "Qwen/Qwen3-1.7B@bbb", "Qwen/Qwen3-4B@ccc"]),
    ],
)
def test_base_can_be_replaced(write_manifest: WriteManifest, wanted: str | None, bases: list[str]) -> None:
    """A base listed in the manifest keeps its revision and the others stay; any other replaces the first, unpinned."""
    file = write_manifest({"base_models": TWO_BASES})
    planned = plan_request(Request(expert=str(file), gpu="h100", base=wanted))
    assert [f"{entry.name}@{entry.revision}" for entry in planned.loaded.manifest.base_models] == bases
    assert planned.plan.base.name == bases[0].partition("@")[0]


def test_base_models_are_found_in_the_folder_of_the_variable(
    tmp_path: Path, write_manifest: WriteManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "models/my-own-base/config.json"
    config.parent.mkdir(parents=True)
    config.write_text(
        '{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, '
        '"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, '
        '"vocab_size": 512, "max_position_embeddings": 4096, "tie_word_embeddings": true}'
    )
    file = write_manifest({"base_models": [{"name": "my-own-base"}]})
    request = Request(expert=str(file), gpu="h100")
    monkeypatch.delenv("LAUNCHER_MODELS_DIR", raising=False)
    with pytest.raises(InputError):
        plan_request(request)
    monkeypatch.setenv("LAUNCHER_MODELS_DIR", str(tmp_path / "models"))
    assert plan_request(request).plan.base.num_layers == 3


def test_tokens_per_row_override_the_estimate(write_manifest: WriteManifest) -> None:
    file = write_manifest({"training.dataset.path": "some/hub", "training.dataset.splits": {"train": 1000}})
    data = plan_request(Request(expert=str(file), gpu="h100", tokens_per_row=77)).plan.data
    assert (data.num_rows, data.mean_tokens) == (1000, 77)


def test_plan_has_the_manifest_folder(write_manifest: WriteManifest, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_manifest().parent
    monkeypatch.chdir(folder)
    assert plan_request(Request(expert="./manifest.json", gpu="h100")).plan.data.folder == str(folder)


def test_folder_name_that_is_not_utf8_is_refused(
    tmp_path: Path, write_manifest: WriteManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    shutil.copy(write_manifest(), folder)
    with pytest.raises(InputError, match="a name that is not UTF-8") as caught:
        plan_request(Request(expert=str(folder / "manifest.json"), gpu="h100"))
    assert caught.value.hint == "rename it"
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")  # as with LC_ALL=C
    with pytest.raises(InputError, match="a name that is not UTF-8") as caught:
        plan_request(Request(expert=str(folder / "manifest.json"), gpu="h100"))
    assert "LC_ALL" in caught.value.hint


def test_smoke_profile_uses_local_rows_without_a_sample(tmp_path: Path, neo4j_tree: Tree) -> None:
    neo4j_tree = copy.deepcopy(neo4j_tree)
    neo4j_tree["training"]["dataset"] = {"path": "rows.jsonl"}
    (tmp_path / "manifest.json").write_text(json.dumps(neo4j_tree))
    request = Request(expert=str(tmp_path / "manifest.json"), profile="smoke")
    missing = plan_request(request).plan
    assert missing.data.path == "sample/train.jsonl"
    (tmp_path / "rows.jsonl").write_text('{"instruction": "a", "response": "b"}\n' * 30)
    found = plan_request(request).plan
    assert (found.data.path, found.data.num_rows, found.data.validation_path) == ("rows.jsonl", 30, None)
    (tmp_path / "sample").mkdir()
    (tmp_path / "sample/train.jsonl").write_text('{"instruction": "a", "response": "b"}\n' * 7)
    assert plan_request(request).plan.data.num_rows == 7


def test_a_machine_that_does_not_confine_judges_is_named_in_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.request.request.describe_boundary", lambda: "judges are not confined")
    assert "judges are not confined" in plan_request(Request(expert="neo4j", profile="smoke")).plan.notes
    without = Request(expert="neo4j", profile="smoke", overrides=["evaluation.task_rows=0"])
    assert "judges are not confined" not in plan_request(without).plan.notes
    assert "judges are not confined" not in plan_request(Request(expert="neo4j", gpu="h100")).plan.notes


@pytest.mark.parametrize(
    ("text", "price"),
    [
        ("2.50", (2.5, "", False)),
        ("0.40/h", (0.4, "", False)),
        ("24/node", (24.0, "", True)),
        ("24/node-h", (24.0, "", True)),
        ("24 / node / hour", (24.0, "", True)),
        ("1.9EUR", (1.9, "EUR", False)),
        ("1.9 eur/gpu-h", (1.9, "EUR", False)),
        ("$24/node", (24.0, "USD", True)),
        ("€ .5", (0.5, "EUR", False)),
        ("USD 3 per node", (3.0, "USD", True)),
        ("0", (0.0, "", False)),
    ],
)
def test_price_has_a_unit_and_a_currency(text: str, price: tuple[float, str, bool]) -> None:
    assert price_per_hour(text) == price


def test_another_price_replaces_the_stored_one() -> None:
    stored = Request(expert="neo4j", price_per_node_hour=24.0, currency="USD")
    merged = merge_requests(stored, Request(expert="neo4j", price_per_gpu_hour=2.0))
    assert (merged.price_per_gpu_hour, merged.price_per_node_hour, merged.currency) == (2.0, None, "")
    assert merge_requests(stored, Request(expert="neo4j")) == stored


def test_a_missing_judge_program_is_noted_before_training() -> None:
    command = 'evaluation.judge_command=["no-such-judge"]'
    notes = plan_request(Request(expert="json", overrides=(command,))).plan.notes
    assert any(note.startswith("evaluation.judge_command: 'no-such-judge' does not exist") for note in notes)
    assert not any("does not exist on this machine" in note for note in plan().notes)


def test_secret_that_is_named_twice_is_passed_once() -> None:
    """Kubernetes refuses two variables of the same name."""
    assert variable_names("HF_TOKEN,WANDB_API_KEY, HF_TOKEN") == ["HF_TOKEN", "WANDB_API_KEY"]
