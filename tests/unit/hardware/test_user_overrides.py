"""The user's hardware.json: strict, applied to the Hardware, and listed in the plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.core.errors import InputError
from launcher.hardware.gpu_catalogue import GPUS
from launcher.hardware.model import Gpu, Hardware, make_hardware
from launcher.hardware.user_overrides import (
    HARDWARE_VARIABLE,
    HardwareOverrides,
    apply_hardware_overrides,
    find_hardware_file,
    load_hardware_overrides,
    lookup_named_gpu,
)
from launcher.plan import Plan
from launcher.plan.estimate.communication import reached_gb_per_second
from launcher.request.request import Request, plan_request
from tests.conftest import ROOT

Say = Callable[[Any], None]
LAPTOP = {
    "title": "NVIDIA GeForce RTX 4070 Laptop GPU",
    "memory_mib": 8188,
    "tflops": 30,
    "memory_gb_per_second": 256,
    "compute_capability": "8.9",
}


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    def write(content: Any) -> None:
        file = tmp_path / "hardware.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        monkeypatch.setenv(HARDWARE_VARIABLE, str(file))

    return write


def plan(**request: Any) -> Plan:
    return plan_request(Request(expert="neo4j", **request)).plan


def user_values(plan: Plan) -> dict[str, str]:
    return {decision.name: decision.value for decision in plan.decisions if decision.decided_by == "user"}


def probed(gpu: Gpu, **values: Any) -> Hardware:
    return make_hardware(gpu, gpus_per_node=1, nodes=1).model_copy(update={"source": "probe", **values})


def test_file_is_in_the_config_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HARDWARE_VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "expert-launcher" / "hardware.json"
    assert find_hardware_file() == file
    assert load_hardware_overrides() == HardwareOverrides()
    file.parent.mkdir()
    file.write_text('{"_comment": "mine", "price_per_gpu_hour": 0.5}')
    assert load_hardware_overrides().price_per_gpu_hour == 0.5
    monkeypatch.setenv(HARDWARE_VARIABLE, "off")
    assert load_hardware_overrides() == HardwareOverrides()


def test_price_gives_a_cost_and_the_command_line_wins(say: Say) -> None:
    say({"price_per_gpu_hour": 0.5, "gpus": {"rtx4090": {"price_per_gpu_hour": 0.4}}})
    assert plan(gpu="rtx4090").speed.price_per_gpu_hour == 0.4
    assert user_values(plan(gpu="rtx4090")) == {"price": "0.4 per GPU-hour"}
    assert plan(gpu="h100").speed.price_per_gpu_hour == 0.5
    other = plan(gpu="h100", price_per_gpu_hour=2.0)
    assert (other.speed.price_per_gpu_hour, user_values(other)) == (2.0, {})
    other = plan(gpu="h100", gpus_per_node=4, price_per_node_hour=2.0)
    assert (other.speed.price_per_gpu_hour, user_values(other)) == (0.5, {})
    say({"price_per_gpu_hour": 0.5, "currency": "EUR"})
    assert plan(gpu="h100").speed.format_price() == "0.5 EUR per GPU-hour"
    assert plan(gpu="h100", price_per_gpu_hour=2.0).speed.format_price() == "2 per GPU-hour"


def test_configured_link_is_used(say: Say) -> None:
    before = plan(gpu="rtx4090", gpus_per_node=4).speed.communication_fraction
    say({"gpus": {"RTX 4090": {"interconnect": "pcie-p2p", "interconnect_gb_per_second": 60}}})
    made = plan(gpu="rtx4090", gpus_per_node=4)
    assert made.hardware.gpu is not None
    assert (made.hardware.gpu.interconnect, made.hardware.gpu.interconnect_gb_per_second) == ("pcie-p2p", 60)
    assert made.speed.communication_fraction < before
    assert user_values(made) == {"GPU": "RTX 4090: link pcie-p2p, link GB/s 60.0"}


def test_configured_network_replaces_the_default(say: Say) -> None:
    say({"network_gb_per_second": 1.25})
    made = plan(gpu="h100", gpus_per_node=8, nodes=2)
    assert user_values(made) == {"network": "1.25 GB/s per node"}
    assert reached_gb_per_second(made.hardware) == pytest.approx(1.25 * 0.7)
    assert user_values(plan(gpu="h100")) == {}


def test_gpu_outside_the_catalogue_can_be_described(say: Say) -> None:
    say({"gpus": {"laptop": LAPTOP}})
    made = plan(gpu="laptop")
    assert made.hardware.gpu is not None
    assert (made.hardware.gpu.memory_mib, made.hardware.gpu.bf16_tflops) == (8188, 30)
    assert made.speed.tokens_per_second is not None
    assert user_values(made)["GPU"].startswith("laptop: not in the catalogue; ")
    assert lookup_named_gpu(load_hardware_overrides(), "GeForce RTX 4070 Laptop GPU").key == "laptop"


def test_probed_gpu_is_completed_and_keeps_its_memory(say: Say) -> None:
    say({"gpus": {"laptop": LAPTOP}})
    unknown = GPUS["rtx4090"].model_copy(
        update={"title": LAPTOP["title"], "key": "x", "memory_mib": 8000, "bf16_tflops": None, "fp16_tflops": None}
    )
    made = apply_hardware_overrides(load_hardware_overrides(), probed(unknown))
    assert made.gpu is not None
    assert (made.gpu.bf16_tflops, made.gpu.memory_mib, made.gpu.compute_capability) == (30, 8000, (8, 9))


def test_this_machine_does_not_apply_to_catalogue_gpus(say: Say) -> None:
    say({"this_machine": {"free_vram_gib": 10, "cpu_cores": 3, "ram_gib": 20}})
    own, card = load_hardware_overrides(), GPUS["rtx4090"]
    made = apply_hardware_overrides(own, probed(card, free_vram_mib=20_000))
    assert (made.free_vram_mib, made.cpu_cores_per_node, made.ram_gib_per_node) == (10_240, 3, 20)
    assert [one.name for one in made.user_values] == ["free VRAM", "CPU cores", "CPU memory"]
    assert apply_hardware_overrides(own, probed(card, free_vram_mib=5_000)).free_vram_mib == 5_000
    assert apply_hardware_overrides(own, probed(card), keeps=("cpu_cores_per_node",)).cpu_cores_per_node == 8
    paper = make_hardware(card, gpus_per_node=1, nodes=1)
    assert apply_hardware_overrides(own, paper) == paper
    assert plan(cpu_cores_per_node=2).hardware.cpu_cores_per_node == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "line 1, column 2: broken JSON"),
        ("[]", "expected a JSON object"),
        ({"gpu": {}}, "gpu: unknown key; did you mean gpus?"),
        ({"this_machine": {"free_vram_gb": 3}}, "did you mean free_vram_gib?"),
        ({"price_per_gpu_hour": "cheap"}, 'price_per_gpu_hour: must be a number, not "cheap"'),
        ({"price_per_gpu_hour": -1}, "price_per_gpu_hour: must be at least 0"),
        ({"gpus": {"rtx4090": {"interconnect": "wifi"}}}, "gpus.rtx4090.interconnect: must be 'nvlink'"),
        ({"gpus": {"mine": {"tflops": 3}}}, "needs memory_mib, memory_gb_per_second, compute_capability"),
        ({"gpus": {"mine": {**LAPTOP, "compute_capability": "new"}}}, "gpus.mine.compute_capability"),
        ({"gpus": {"mine": {**LAPTOP, "tflops": 0}}}, "gpus.mine.tflops: must be greater than 0"),
    ],
)
def test_mistakes_are_refused_with_a_hint(say: Say, content: Any, words: str) -> None:
    say(content)
    with pytest.raises(InputError) as caught:
        plan(gpu="rtx4090")
    assert words in str(caught.value)
    assert "LAUNCHER_HARDWARE=off" in str(caught.value)


def test_configured_file_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HARDWARE_VARIABLE, "nowhere.json")
    with pytest.raises(InputError, match=r"nowhere\.json: no such file"):
        load_hardware_overrides()


def test_documented_example_is_valid(say: Say) -> None:
    text = (ROOT / "docs/CLI.md").read_text(encoding="utf-8").partition("## Your hardware")[2]
    say(text.partition("```json")[2].partition("```")[0])
    assert lookup_named_gpu(load_hardware_overrides(), "rtx4070laptop").memory_mib == 8188


def test_duplicate_keys_and_unknown_capabilities_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hardware.json"
    monkeypatch.setenv(HARDWARE_VARIABLE, str(file))
    for text, words in (
        ('{"price_per_gpu_hour": 1, "price_per_gpu_hour": 2}', "duplicate key 'price_per_gpu_hour'"),
        (json.dumps({"gpus": {"mine": {**LAPTOP, "compute_capability": "99.9"}}}), "1 problem"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=words):
            load_hardware_overrides()
