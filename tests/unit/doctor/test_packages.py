"""torch and its packages: what a process of their own says, judged; and that process when it dies or hangs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.doctor.cards import CardFacts, CardState, Holder
from launcher.doctor.findings import Finding
from launcher.doctor.packages import Examined, judge_packages, probe_packages_deeply
from launcher.examination import Check, parse_checks
from launcher.gpus import find_gpu
from launcher.plan import Plan
from launcher.probe import parse_nvidia_smi
from tests.conftest import python_path
from tests.unit.doctor import nvidia
from tests.unit.doctor.made import named, only, plan_for

H200 = CardFacts(cuda="12.8", num_on_machine=1, readings=parse_nvidia_smi(nvidia.H200), gpu=find_gpu("h200"))
NO_CARD = CardFacts(trouble="nvidia-smi is not installed")


def judge(*checks: Check, cards: CardFacts = H200, plan: Plan | None = None, trouble: str = "") -> list[Finding]:
    return list(judge_packages(Examined(checks=checks, trouble=trouble), cards, plan))


def works(name: str, **figures: float) -> Check:
    return Check(name=name, status="works", detail="it does", figures=figures)


def test_an_h200_that_is_well() -> None:
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
    assert named(findings) == []
    assert "80 % of the data sheet's 989" in findings[1].found
    assert "peer access" not in {finding.subject for finding in findings}


@pytest.mark.parametrize(("tflops", "status"), [(500.0, "note"), (300.0, "problem")])
def test_a_card_that_computes_slowly(tflops: float, status: str) -> None:
    finding = only(judge(works("BF16", tflops=tflops)))
    assert finding.status == status
    assert "80 % is usual" in finding.matters
    shared = replace(H200, states=(CardState(index=0, holders=(Holder(pid=1, name="x", memory_mib=1),)),))
    busy = only(judge(works("BF16", tflops=tflops), cards=shared))
    assert busy.status == "note", "who holds its memory is told by another finding"
    assert "others use the GPU" in busy.matters


def test_an_unknown_card_is_not_judged_by_its_peak() -> None:
    assert named(judge(works("BF16", tflops=1.0), cards=replace(H200, gpu=None))) == []


def test_torch_that_does_not_see_the_gpu() -> None:
    finding = only(judge(works("torch", gpus=0)))
    assert finding.status == "problem"
    assert "it sees none of 1 GPUs" in finding.found
    assert "CUDA 12.8" in finding.next_step
    two = replace(H200, readings=H200.readings * 2)
    assert "nvidia-smi lists 2" in only(judge(works("torch", gpus=1), cards=two)).found
    assert named(judge(works("torch", gpus=0), cards=NO_CARD)) == []


def test_slow_copies_spill_and_peers() -> None:
    assert only(judge(works("copies", to_gpu=2.5))).status == "note"
    assert only(judge(works("spill", spills=1))).status == "problem"
    assert named(judge(works("spill", spills=0))) == []
    assert "NCCL_P2P_DISABLE" in only(judge(works("peer access", denied=2))).next_step
    consumer = replace(H200, gpu=find_gpu("rtx4090"))
    assert named(judge(works("peer access", denied=2), cards=consumer)) == []


MISSING = Check(name="bitsandbytes", status="missing", detail="bitsandbytes is not installed")
BROKEN = Check(name="bitsandbytes", status="fails", detail="OSError: libcudart.so.13: cannot open shared object file")


def test_what_is_missing_matters_where_the_plan_needs_it() -> None:
    int4 = plan_for("rtx4090", overrides=("base_models.0.quantization=int4",))
    assert named(judge(MISSING)) == []
    assert named(judge(MISSING, plan=plan_for("rtx4090"))) == []
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
def test_packages_are_missed_by_the_plans_that_use_them(name: str, changes: dict[str, str], why: str) -> None:
    missing = Check(name=name, status="missing", detail=f"{name} is not installed")
    plain = plan_for("rtx4090").model_copy(update={"loss_kernel": "chunked"})
    assert named(judge(missing, plan=plain)) == []
    update: dict[str, object] = dict(changes)
    if "attention" in changes:
        update["attention"] = plain.attention.model_copy(update={"backend": changes["attention"]})
    assert only(judge(missing, plan=plain.model_copy(update=update))).matters == f"the plan needs it: {why}"


def test_the_way_out_names_what_can_be_installed() -> None:
    plan = plan_for("h100")
    plan = plan.model_copy(update={"attention": plan.attention.model_copy(update={"backend": "flash_attention_4"})})
    missing = Check(name="flash_attn.cute", status="missing", detail="flash_attn.cute is not installed")
    assert only(judge(missing, plan=plan)).next_step == "pip install 'expert-launcher[flash4]'"
    broken = Check(name="flash_attn.cute", status="fails", detail="ImportError: no cutlass")
    assert only(judge(broken, plan=plan)).next_step == "pip install --force-reinstall flash-attn-4"
    old = plan_for("rtx4090").model_copy(update={"loss_kernel": "chunked"})
    assert only(judge(Check(name="fused loss", status="fails", detail="no kernel"), plan=old)).status == "note"


def test_what_every_training_needs() -> None:
    torch = Check(name="torch", status="missing", detail="torch is not installed")
    assert only(judge(torch)).status == "note"
    assert "expert-launcher[train]" in only(judge(torch)).next_step
    peft = Check(name="training packages", status="missing", detail="peft is not installed")
    assert only(judge(peft)).status == "problem"
    compiling = Check(name="torch.compile", status="fails", detail="RuntimeError: Failed to find C compiler")
    assert "training.config.torch_compile=false" in only(judge(compiling)).next_step


def test_a_cpu_optimizer_matters_where_the_plan_offloads() -> None:
    offloading = plan_for("rtx4090").model_copy(update={"offload": "optimizer"})
    assert named(judge(works("deepspeed", cpu_adam=0))) == []
    assert "offloads the optimizer" in only(judge(works("deepspeed", cpu_adam=0), plan=offloading)).matters


def test_a_check_that_was_begun_and_never_ended_is_named() -> None:
    begun = Check(name="flash_attn", status="begun")
    finding = only(judge(works("torch", gpus=1), begun, trouble="the process was killed by SIGSEGV"))
    assert finding.found == "the process was killed by SIGSEGV, while trying it out"
    assert finding.next_step == "pip install --force-reinstall flash-attn"
    slow = only(judge(Check(name="copies", status="begun"), trouble="not ready within 240 s"))
    assert slow.next_step == "python -m launcher.training.examining shows all that it says"
    nothing = only(judge(trouble="not ready within 240 s"))
    assert (nothing.status, nothing.found) == ("note", "could not look: not ready within 240 s")


def test_lines_of_libraries_are_passed_over() -> None:
    lines = [
        "hello from a library",
        Check(name="a", status="begun").model_dump_json(),
        works("a").model_dump_json(),
        "{",
    ]
    assert parse_checks(lines) == (works("a"),)


def environment(folder: Path, **modules: str) -> dict[str, str]:
    """Packages of a test stand before the real ones."""
    for name, text in modules.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(text)
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{python_path()}"}


def test_without_torch_it_says_so(tmp_path: Path) -> None:
    missing = "raise ModuleNotFoundError('No module named torch', name='torch')"
    examined = probe_packages_deeply(environment(tmp_path, torch=missing))
    assert examined.trouble == ""
    finding = only(judge_packages(examined, NO_CARD))
    assert (finding.subject, finding.status, finding.found) == ("torch", "note", "torch is not installed")


def test_a_torch_that_takes_the_process_down_is_named(tmp_path: Path) -> None:
    examined = probe_packages_deeply(environment(tmp_path, torch="import os; os.abort()"))
    finding = only(judge_packages(examined, NO_CARD))
    assert (finding.subject, finding.status) == ("torch", "problem")
    assert finding.found == "the process was killed by SIGABRT, while trying it out"


def test_a_torch_that_hangs_is_given_up_with_all_that_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    hanging = (
        "import subprocess, time, pathlib\n"
        f"pathlib.Path({str(mark)!r}).write_text(str(subprocess.Popen(['sleep', '300']).pid))\n"
        "time.sleep(300)\n"
    )
    examined = probe_packages_deeply(environment(tmp_path / "p", torch=hanging), seconds=4.0)
    finding = only(judge_packages(examined, NO_CARD))
    assert finding.found == "not ready within 4 s, while trying it out"
    status = Path(f"/proc/{mark.read_text()}/status")
    assert not status.exists() or "Z (zombie)" in status.read_text()
