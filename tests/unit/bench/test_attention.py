"""`launcher bench attention`: which backends are measured, what is stored, and which one a later plan chooses."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.bench.attention import (
    AttentionResult,
    AttentionTiming,
    check_measurable,
    list_measurable,
    make_attention_shape,
    make_measurement,
    measure_attention,
)
from launcher.cli.main import main
from launcher.core.choices import AttentionBackend
from launcher.core.errors import ExitCode, InputError
from launcher.hardware.gpu_catalogue import lookup_gpu
from launcher.hardware.model import make_hardware
from launcher.plan import Plan
from launcher.runs.calibration_store import remember_attention
from tests.unit.plan.conftest import decision, plan_for


@pytest.fixture
def calibration_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set a calibration file, and an RTX 4090 in this machine."""
    file = tmp_path / "calibration.json"
    monkeypatch.setenv("LAUNCHER_CALIBRATION", str(file))
    hardware = make_hardware(lookup_gpu("rtx4090"), gpus_per_node=1, nodes=1)
    hardware = hardware.model_copy(update={"source": "probe", "packages": ("triton", "flash_attn")})
    monkeypatch.setattr("launcher.request.request.probe_hardware", lambda: hardware)
    return file


def plan_here(**more: Any) -> Plan:
    return plan_for(gpu=None, profile="full", **more)


def make_result(**milliseconds: float) -> AttentionResult:
    result = AttentionResult()
    for name, both in milliseconds.items():
        backend: AttentionBackend = name  # type: ignore[assignment]
        result.timings[backend] = AttentionTiming(
            forward_ms=0.3 * both, backward_ms=0.7 * both, difference=0.003, is_deterministic=True
        )
    return result


def remember(plan: Plan, **milliseconds: float) -> None:
    remember_attention(plan.hardware, make_measurement(plan, make_result(**milliseconds)))


@pytest.mark.usefixtures("calibration_file")
def test_unmeasured_machine_follows_the_model_and_says_so() -> None:
    plan = plan_here()
    assert plan.attention.backend == "flash_attention_2"
    assert decision(plan, "attention").endswith("not measured on this machine (launcher bench attention)")
    assert decision(plan_for(gpu="rtx4090"), "attention").endswith("not measured on this GPU")
    check_measurable(plan)
    assert list_measurable(plan) == ("flash_attention_2", "triton", "varlen", "flex", "sdpa")


@pytest.mark.usefixtures("calibration_file")
def test_fastest_measured_backend_is_chosen() -> None:
    remember(plan_here(), flash_attention_2=1.4, triton=1.1, varlen=1.5, flex=2.25, sdpa=9)
    plan = plan_here()
    assert plan.attention.backend == "triton", "our kernels, too, where they were measured"
    assert plan.attention.fallbacks == ("flash_attention_2", "varlen", "flex", "sdpa", "eager")
    times = "triton 1.10 ms, flash_attention_2 1.40 ms, varlen 1.50 ms, flex 2.25 ms, sdpa 9.00 ms per layer"
    assert decision(plan, "attention") == f"our Triton kernels | measured on this machine: {times}"
    remember(plan, varlen=1.0, flash_attention_2=1.4)
    assert plan_here().attention.backend == "varlen", "a later measurement replaces the earlier one"
    assert "triton" not in plan_here().attention.fallbacks
    assert plan_here(config={"attention": "flash_attention_2"}).attention.backend == "flash_attention_2"
    assert plan_here(base="Qwen/Qwen3-8B").attention.backend == "flash_attention_2", "other heads"
    assert plan_here(calibrated=False).attention.backend == "flash_attention_2"
    assert plan_for(gpu="rtx4090").attention.backend == "varlen", "another machine"


@pytest.mark.usefixtures("calibration_file")
def test_backends_that_exclude_a_cuda_graph_come_after_the_others() -> None:
    remember(plan_here(), varlen=1.5, flex=1.2)
    assert plan_here().attention.fallbacks == ("flash_attention_2", "flex", "sdpa", "eager")
    assert plan_here().attention.backend == "varlen"


def test_machine_without_gpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", "neo4j"]) == ExitCode.WRONG_INPUT
    assert "measures the GPU of this machine, and this machine has none" in capsys.readouterr().err
    with pytest.raises(InputError, match="--gpu describes another machine"):
        check_measurable(plan_for(gpu="rtx4090"))


@pytest.mark.process
@pytest.mark.slow
def test_worker_without_a_gpu_fails(tmp_path: Path) -> None:
    result = measure_attention(plan_for(), ("sdpa",), tmp_path, 120, lambda _text: None)
    assert not result.timings
    assert "NVIDIA" in result.problems["sdpa"] or "CUDA" in result.problems["sdpa"]


@pytest.mark.process
def test_failing_and_wrong_backends_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.bench.attention._MODULE", "tests.unit.bench.failing_worker")
    result = measure_attention(plan_for(), ("sdpa", "varlen"), tmp_path, 120, lambda _text: None)
    assert not result.timings
    assert result.problems == {name: f"RuntimeError: {name} needs a GPU" for name in ("sdpa", "varlen")}
    wrong = AttentionTiming(forward_ms=1, backward_ms=1, difference=0.5, is_deterministic=True)
    process = nullcontext(SimpleNamespace(read=lambda _seconds: wrong.model_dump_json()))
    monkeypatch.setattr("launcher.bench.attention.MeasurementProcess", lambda *_: process)
    result = measure_attention(plan_for(), ("sdpa",), tmp_path, 120, lambda _text: None)
    assert result.problems == {"sdpa": "wrong: differs from FP32 attention by 0.500"}


def test_special_scores_and_fp32_are_refused() -> None:
    def on_this_machine(plan: Plan) -> Plan:
        return plan.model_copy(update={"hardware": plan.hardware.model_copy(update={"source": "probe"})})

    with pytest.raises(InputError, match="its backend is not chosen by speed"):
        check_measurable(on_this_machine(plan_for(base="google/gemma-2-2b")))
    with pytest.raises(InputError, match="there is nothing to compare"):
        check_measurable(on_this_machine(plan_for(config={"bf16": False, "fp16": False})))
    assert make_attention_shape(plan_for()).head_dim == 128
