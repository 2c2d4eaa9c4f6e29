"""Checks of torch and its packages, which run in a separate process that may crash or hang."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.analysis.doctor.findings import Finding
from launcher.analysis.doctor.gpu_checks import GpuFacts, GpuProcess, GpuState
from launcher.analysis.doctor.packages import Check, check_packages, parse_checks, probe_packages
from launcher.hardware.gpu_catalogue import lookup_gpu
from launcher.plan import Plan
from tests.conftest import python_path
from tests.unit.analysis.doctor.builders import list_issues, only, plan_for, probe_h200

H200 = probe_h200()
NO_GPU = GpuFacts(error="NVML Shared Library Not Found")


def judge(*checks: Check, gpus: GpuFacts = H200, plan: Plan | None = None, error: str = "") -> list[Finding]:
    return list(check_packages(checks, error, gpus, plan))


def works(name: str, **figures: float) -> Check:
    return Check(name=name, status="works", detail="it does", figures=figures)


def test_healthy_h200_has_no_issues() -> None:
    checks = (
        works("torch", gpus=1),
        works("BF16", tflops=788.0),
        works("TF32", tflops=410.0),
        works("attention: varlen"),
        works("copies", to_gpu=54.0, to_host=55.0),
        works("torch.compile"),
        works("deepspeed", cpu_adam=1),
        Check(name="peer access", status="not needed", detail="fewer than two GPUs"),
        Check(name="flash_attn", status="missing", detail="flash_attn is not installed"),
    )
    findings = judge(*checks)
    assert list_issues(findings) == []
    assert "80 % of the data sheet's 989" in findings[1].found
    assert "peer access" not in {finding.subject for finding in findings}


@pytest.mark.parametrize(("tflops", "status"), [(500.0, "note"), (300.0, "problem")])
def test_slow_matmuls_are_reported(tflops: float, status: str) -> None:
    finding = only(judge(works("BF16", tflops=tflops)))
    assert finding.status == status
    assert "80 % is usual" in finding.matters
    shared = replace(H200, states=(GpuState(index=0, holders=(GpuProcess(pid=1, name="x", memory_mib=1),)),))
    busy = only(judge(works("BF16", tflops=tflops), gpus=shared))
    assert busy.status == "note", "another finding reports the processes that use its memory"
    assert "other processes use the GPU" in busy.matters


def test_matmul_speed_of_unknown_gpu_is_not_judged() -> None:
    assert list_issues(judge(works("BF16", tflops=1.0), gpus=replace(H200, gpu=None))) == []


def test_torch_without_the_gpu_is_a_problem() -> None:
    finding = only(judge(works("torch", gpus=0)))
    assert finding.status == "problem"
    assert "it sees none of the 1 GPUs" in finding.found
    assert "CUDA 12.8" in finding.next_step
    two = replace(H200, readings=H200.readings * 2)
    assert "the driver lists 2" in only(judge(works("torch", gpus=1), gpus=two)).found
    assert list_issues(judge(works("torch", gpus=0), gpus=NO_GPU)) == []


def test_slow_copies_spill_and_missing_p2p_are_reported() -> None:
    assert only(judge(works("copies", to_gpu=2.5))).status == "note"
    assert only(judge(works("spill", spills=1))).status == "problem"
    assert list_issues(judge(works("spill", spills=0))) == []
    assert "NCCL_P2P_DISABLE" in only(judge(works("peer access", denied=2))).next_step
    consumer = replace(H200, gpu=lookup_gpu("rtx4090"))
    assert list_issues(judge(works("peer access", denied=2), gpus=consumer)) == []


MISSING = Check(name="bitsandbytes", status="missing", detail="bitsandbytes is not installed")
BROKEN = Check(name="bitsandbytes", status="fails", detail="OSError: libcudart.so.13: cannot open shared object file")


def test_missing_package_is_a_problem_if_the_plan_needs_it() -> None:
    int4 = plan_for("rtx4090", overrides=("base_models.0.quantization=int4",))
    assert list_issues(judge(MISSING)) == []
    assert list_issues(judge(MISSING, plan=plan_for("rtx4090"))) == []
    finding = only(judge(MISSING, plan=int4))
    assert (finding.status, finding.matters) == ("problem", "the plan needs it: int4 weights")
    assert only(judge(BROKEN)).status == "problem"
    assert only(judge(BROKEN, plan=plan_for("rtx4090"))).status == "note"
    assert only(judge(BROKEN, plan=int4)).matters == "int4 weights"


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("flash_attn", {"attention": "flash_attention_2"}, "attention"),
        ("flash_attn_interface", {"attention": "flash_attention_3"}, "attention"),
        ("flash_attn.cute", {"attention": "flash_attention_4"}, "attention"),
        ("deepspeed", {"strategy": "zero2", "offload": "optimizer"}, "zero2 and offloading"),
        ("fused loss", {"loss_kernel": "fused"}, "the loss"),
    ],
)
def test_finding_names_why_the_plan_needs_a_package(name: str, changes: dict[str, str], why: str) -> None:
    missing = Check(name=name, status="missing", detail=f"{name} is not installed")
    plain = plan_for("rtx4090").model_copy(update={"loss_kernel": "chunked"})
    assert list_issues(judge(missing, plan=plain)) == []
    update: dict[str, object] = dict(changes)
    if "attention" in changes:
        update["attention"] = plain.attention.model_copy(update={"backend": changes["attention"]})
    assert only(judge(missing, plan=plain.model_copy(update=update))).matters == f"the plan needs it: {why}"


def test_next_step_names_the_package_to_install() -> None:
    plan = plan_for("h100")
    plan = plan.model_copy(update={"attention": plan.attention.model_copy(update={"backend": "flash_attention_4"})})
    missing = Check(name="flash_attn.cute", status="missing", detail="flash_attn.cute is not installed")
    assert only(judge(missing, plan=plan)).next_step == "pip install 'expert-launcher[flash4]'"
    broken = Check(name="flash_attn.cute", status="fails", detail="ImportError: no cutlass")
    assert only(judge(broken, plan=plan)).next_step == "pip install --force-reinstall flash-attn-4"
    old = plan_for("rtx4090").model_copy(update={"loss_kernel": "chunked"})
    assert only(judge(Check(name="fused loss", status="fails", detail="no kernel"), plan=old)).status == "note"


def test_missing_training_packages_are_reported() -> None:
    torch = Check(name="torch", status="missing", detail="torch is not installed")
    assert only(judge(torch)).status == "note"
    assert "expert-launcher[train]" in only(judge(torch)).next_step
    peft = Check(name="training packages", status="missing", detail="peft is not installed")
    assert only(judge(peft)).status == "problem"
    compiling = Check(name="torch.compile", status="fails", detail="RuntimeError: Failed to find C compiler")
    assert "training.config.torch_compile=false" in only(judge(compiling)).next_step


def test_missing_cpu_optimizer_matters_if_the_plan_offloads() -> None:
    offloading = plan_for("rtx4090").model_copy(update={"offload": "optimizer"})
    assert list_issues(judge(works("deepspeed", cpu_adam=0))) == []
    assert "offloads the optimizer" in only(judge(works("deepspeed", cpu_adam=0), plan=offloading)).matters


def test_unfinished_check_is_named() -> None:
    begun = Check(name="flash_attn", status="begun")
    finding = only(judge(works("torch", gpus=1), begun, error="the process was killed by SIGSEGV"))
    assert finding.found == "the process was killed by SIGSEGV"
    assert finding.next_step == "pip install --force-reinstall flash-attn"
    slow = only(judge(Check(name="copies", status="begun"), error="not ready within 240 s"))
    assert slow.next_step == "python -m launcher.training.diagnostics.run_checks shows its complete output"
    nothing = only(judge(error="not ready within 240 s"))
    assert (nothing.status, nothing.found) == ("note", "not checked: not ready within 240 s")


def test_output_of_libraries_is_skipped() -> None:
    lines = [
        "hello from a library",
        Check(name="a", status="begun").model_dump_json(),
        works("a").model_dump_json(),
        "{",
    ]
    assert parse_checks(lines) == (works("a"),)


def environment(folder: Path, **modules: str) -> dict[str, str]:
    """Return an environment in which fake packages take precedence over the real ones."""
    for name, text in modules.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(text)
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{python_path()}"}


def test_missing_torch_is_a_note(tmp_path: Path) -> None:
    missing = "raise ModuleNotFoundError('No module named torch', name='torch')"
    examined = probe_packages(environment(tmp_path, torch=missing))
    assert examined[1] == ""
    finding = only(check_packages(*examined, NO_GPU))
    assert (finding.subject, finding.status, finding.found) == ("torch", "note", "torch is not installed")


def test_crash_is_reported_for_the_running_check(tmp_path: Path) -> None:
    examined = probe_packages(environment(tmp_path, torch="import os; os.abort()"))
    finding = only(check_packages(*examined, NO_GPU))
    assert (finding.subject, finding.status) == ("torch", "problem")
    assert finding.found == "the process was killed by SIGABRT"


@pytest.mark.process
def test_timeout_kills_the_process_group(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    hanging = (
        "import subprocess, time, pathlib\n"
        f"pathlib.Path({str(mark)!r}).write_text(str(subprocess.Popen(['sleep', '300']).pid))\n"
        "time.sleep(300)\n"
    )
    examined = probe_packages(environment(tmp_path / "p", torch=hanging), seconds=4.0)
    finding = only(check_packages(*examined, NO_GPU))
    assert finding.found == "timed out after 4 s"
    status = Path(f"/proc/{mark.read_text()}/status")
    assert not status.exists() or "Z (zombie)" in status.read_text()
