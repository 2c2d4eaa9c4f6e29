"""The user's hardware.json: read through the same Hardware as the rest, told in the plan, and strict."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import InputError
from launcher.gpus import GPUS
from launcher.hardware import Gpu, Hardware, make_hardware
from launcher.inputs import Request, plan_request
from launcher.own_hardware import (
    HARDWARE_VARIABLE,
    OwnHardware,
    apply_own_hardware,
    find_hardware_file,
    find_named_gpu,
    load_own_hardware,
)
from launcher.plan import Plan
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


def told(plan: Plan) -> dict[str, str]:
    return {decision.name: decision.value for decision in plan.decisions if decision.decided_by == "user"}


def probed(gpu: Gpu, **values: Any) -> Hardware:
    return make_hardware(gpu, gpus_per_node=1, nodes=1).model_copy(update={"source": "probe", **values})


def test_it_lies_among_the_users_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HARDWARE_VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "expert-launcher" / "hardware.json"
    assert find_hardware_file() == file
    assert load_own_hardware() == OwnHardware()
    file.parent.mkdir()
    file.write_text('{"_comment": "mine", "price_per_gpu_hour": 0.5}')
    assert load_own_hardware().price_per_gpu_hour == 0.5
    monkeypatch.setenv(HARDWARE_VARIABLE, "off")
    assert load_own_hardware() == OwnHardware()


def test_a_price_makes_a_cost_and_the_command_line_wins(say: Say) -> None:
    say({"price_per_gpu_hour": 0.5, "gpus": {"rtx4090": {"price_per_gpu_hour": 0.4}}})
    assert plan(gpu="rtx4090").speed.price_per_gpu_hour == 0.4
    assert told(plan(gpu="rtx4090")) == {"price": "0.4 per GPU and hour"}
    assert plan(gpu="h100").speed.price_per_gpu_hour == 0.5
    other = plan(gpu="h100", price_per_gpu_hour=2.0)
    assert (other.speed.price_per_gpu_hour, told(other)) == (2.0, {})


def test_a_faster_link_is_planned_with(say: Say) -> None:
    before = plan(gpu="rtx4090", gpus_per_node=4).speed.scaling
    say({"gpus": {"RTX 4090": {"interconnect": "pcie-p2p", "interconnect_gb_per_second": 60}}})
    made = plan(gpu="rtx4090", gpus_per_node=4)
    assert made.hardware.gpu is not None
    assert (made.hardware.gpu.interconnect, made.hardware.gpu.interconnect_gb_per_second) == ("pcie-p2p", 60)
    assert before is not None
    assert made.speed.scaling is not None
    assert (made.speed.scaling.points[-1].link_gb_per_second or 0) > (before.points[-1].link_gb_per_second or 0)
    assert told(made) == {"GPU": "RTX 4090: link pcie-p2p, link GB/s 60.0"}


def test_a_network_is_no_longer_assumed(say: Say) -> None:
    say({"network_gb_per_second": 1.25})
    made = plan(gpu="h100", gpus_per_node=8, nodes=2)
    assert told(made) == {"network": "1.25 GB/s a node"}
    assert made.speed.scaling is not None
    assert not any("network" in words for words in made.speed.scaling.assumptions)
    assert made.speed.scaling.points[-1].link_gb_per_second == pytest.approx(1.25 * 0.7)
    assert told(plan(gpu="h100")) == {}


def test_a_card_that_nobody_knows(say: Say) -> None:
    say({"gpus": {"laptop": LAPTOP}})
    made = plan(gpu="laptop")
    assert made.hardware.gpu is not None
    assert (made.hardware.gpu.memory_mib, made.hardware.gpu.bf16_tflops) == (8188, 30)
    assert made.speed.tokens_per_second is not None
    assert told(made)["GPU"].startswith("laptop: not in the catalogue; ")
    assert find_named_gpu(load_own_hardware(), "GeForce RTX 4070 Laptop GPU").key == "laptop"


def test_a_card_that_the_probe_finds_is_completed_and_keeps_its_memory(say: Say) -> None:
    say({"gpus": {"laptop": LAPTOP}})
    unknown = GPUS["rtx4090"].model_copy(
        update={"title": LAPTOP["title"], "key": "x", "memory_mib": 8000, "bf16_tflops": None, "fp16_tflops": None}
    )
    made = apply_own_hardware(load_own_hardware(), probed(unknown))
    assert made.gpu is not None
    assert (made.gpu.bf16_tflops, made.gpu.memory_mib, made.gpu.compute_capability) == (30, 8000, (8, 9))


def test_what_is_said_of_this_machine_is_of_no_other(say: Say) -> None:
    say({"this_machine": {"free_vram_gib": 10, "cpu_cores": 3, "ram_gib": 20}})
    own, card = load_own_hardware(), GPUS["rtx4090"]
    made = apply_own_hardware(own, probed(card, free_vram_mib=20_000))
    assert (made.free_vram_mib, made.cpu_cores_per_node, made.ram_gib_per_node) == (10_240, 3, 20)
    assert [one.name for one in made.given] == ["free VRAM", "CPU cores", "CPU memory"]
    assert apply_own_hardware(own, probed(card, free_vram_mib=5_000)).free_vram_mib == 5_000
    assert apply_own_hardware(own, probed(card), keeps=("cpu_cores_per_node",)).cpu_cores_per_node == 8
    paper = make_hardware(card, gpus_per_node=1, nodes=1)
    assert apply_own_hardware(own, paper) == paper
    assert plan(cpu_cores_per_node=2).hardware.cpu_cores_per_node == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "line 1, column 2: broken JSON"),
        ("[]", "holds no object"),
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
def test_mistakes_are_told_with_the_way_out(say: Say, content: Any, words: str) -> None:
    say(content)
    with pytest.raises(InputError) as caught:
        plan(gpu="rtx4090")
    assert words in str(caught.value)
    assert "LAUNCHER_HARDWARE=off" in str(caught.value)


def test_a_file_that_is_named_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HARDWARE_VARIABLE, "nowhere.json")
    with pytest.raises(InputError, match=r"nowhere\.json: cannot be read"):
        load_own_hardware()


def test_the_example_in_the_docs_is_right(say: Say) -> None:
    text = (ROOT / "docs/CLI.md").read_text(encoding="utf-8").partition("## Your hardware")[2]
    say(text.partition("```json")[2].partition("```")[0])
    assert find_named_gpu(load_own_hardware(), "rtx4070laptop").memory_mib == 8188


def test_a_key_stands_once_and_a_capability_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hardware.json"
    monkeypatch.setenv(HARDWARE_VARIABLE, str(file))
    for text, words in (
        ('{"price_per_gpu_hour": 1, "price_per_gpu_hour": 2}', "'price_per_gpu_hour' stands twice"),
        (json.dumps({"gpus": {"mine": {**LAPTOP, "compute_capability": "99.9"}}}), "1 problem"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=words):
            load_own_hardware()
