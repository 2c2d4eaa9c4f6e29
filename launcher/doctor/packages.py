"""torch and the packages around it, judged by what a process of their own found out: see launcher/examination.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from launcher.doctor.asking import first_line
from launcher.doctor.cards import CardFacts
from launcher.doctor.findings import Finding, Status, could_not_look
from launcher.examination import Check, parse_checks
from launcher.hardware import Gpu
from launcher.plan.model import Plan

EXAMINATION = "launcher.training.examining"
LIMIT_SECONDS = 240.0
# Of the data sheet's peak. Large products reach 80 % on a card that is well and alone.
_GOOD_SHARE, _BAD_SHARE = 0.65, 0.45
_SLOW_COPIES = 6.0  # GB/s: half of what eight lanes of PCIe 4 carry
_INSTALL = "pip install 'expert-launcher[train]'"
# Checks of what only some plans need: the package that brings it, and how to get it.
_OPTIONAL = {
    "bitsandbytes": ("bitsandbytes", "pip install 'expert-launcher[cuda]'"),
    "deepspeed": ("deepspeed", "pip install 'expert-launcher[train]'"),
    "flash_attn": (
        "flash-attn",
        "pip install flash-attn --no-build-isolation, or training.config.attention=auto",
    ),
    "flash_attn_interface": (
        "flash-attn-3",
        "build it from github.com/Dao-AILab/flash-attention, or training.config.attention=auto",
    ),
    "flash_attn.cute": ("flash-attn-4", "pip install 'expert-launcher[flash4]'"),
    "fused loss": ("triton", "pip install triton"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Examined:
    checks: tuple[Check, ...]
    trouble: str = ""  # why it ended before its end


def probe_packages_deeply(environment: Mapping[str, str], seconds: float = LIMIT_SECONDS) -> Examined:
    """In a process group of its own: compilers that it starts end with it."""
    command = [sys.executable, "-P", "-m", EXAMINATION]
    try:
        process = subprocess.Popen(
            command,
            env={**environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return Examined(checks=(), trouble=f"python cannot be started: {error.strerror}")
    trouble = ""
    try:
        said, complaints = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        trouble = f"not ready within {seconds:.0f} s"
        said, complaints = _end(process)
    except BaseException:
        _end(process)
        raise
    if process.returncode and not trouble:
        trouble = _describe_death(process.returncode, complaints.decode("utf-8", "replace"))
    return Examined(checks=parse_checks(said.decode("utf-8", "replace").splitlines()), trouble=trouble)


def _end(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()


def _describe_death(code: int, complaints: str) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"the process was killed by {signal.Signals(-code).name}"
    last = [line for line in complaints.splitlines() if line.strip()]
    return f"the process ended with code {code}: {first_line(last[-1]) if last else 'no word'}"


def judge_packages(examined: Examined, cards: CardFacts, plan: Plan | None = None) -> Iterator[Finding]:
    if not examined.checks:
        yield could_not_look("packages", "torch", examined.trouble or "nothing was said")
        return
    for check in examined.checks:
        yield from _judge(check, examined.trouble, cards, plan)


def _tell(check: Check, status: Status, found: str, matters: str = "", next_step: str = "") -> Finding:
    return Finding(
        family="packages", subject=check.name, status=status, found=found, matters=matters, next_step=next_step
    )


def _judge(check: Check, trouble: str, cards: CardFacts, plan: Plan | None) -> Iterator[Finding]:
    if check.status == "begun":
        why = trouble or "the process ended in the middle of it"
        matters = "a training that uses it would end the same way"
        yield _tell(check, "problem", f"{why}, while trying it out", matters, _mend(check))
    elif check.status == "not needed":
        return
    elif check.status == "not tried":
        yield _tell(check, "note", f"could not look: {check.detail}", "", "again, when the GPU is free")
    elif check.status == "missing":
        yield _judge_missing(check, plan)
    elif check.status == "fails":
        yield _judge_failure(check, plan)
    else:
        yield _judge_figures(check, cards, plan)


def _judge_missing(check: Check, plan: Plan | None) -> Finding:
    if check.name == "torch":
        return _tell(check, "note", check.detail, "planning works without it, training does not", _INSTALL)
    if check.name not in _OPTIONAL:
        return _tell(check, "problem", check.detail, "no training starts without it", _INSTALL)
    if needs := _needed_for(check.name, plan):
        _, remedy = _OPTIONAL[check.name]
        return _tell(check, "problem", check.detail, f"the plan needs it: {needs}", remedy)
    return _tell(check, "ok", "not installed; nothing here needs it")


def _judge_failure(check: Check, plan: Plan | None) -> Finding:
    needs = _needed_for(check.name, plan)
    if plan is not None and check.name in _OPTIONAL and not needs:
        return _tell(check, "note", check.detail, "the plan does not use it", _mend(check))
    return _tell(
        check, "problem", check.detail, needs or "a training that uses it would end the same way", _mend(check)
    )


def _mend(check: Check) -> str:
    remedies = {
        "torch": "install the build of torch for this driver: see pytorch.org/get-started",
        "attention: varlen": "--set training.config.attention=sdpa",
        "attention: triton": "--set training.config.attention=varlen",
        "torch.compile": "apt install build-essential python3-dev, or --set training.config.torch_compile=false",
        "TF32": "unset NVIDIA_TF32_OVERRIDE",
    }
    if check.name in _OPTIONAL:
        return f"pip install --force-reinstall {_OPTIONAL[check.name][0]}"
    return remedies.get(check.name, f"python -m {EXAMINATION} shows all that it says")


def _needed_for(name: str, plan: Plan | None) -> str:
    if plan is None:
        return ""
    uses = {
        "bitsandbytes": (
            (plan.quantization is not None, f"{plan.quantization_kind} weights"),
            (plan.optimizer.name == "adamw_bnb_8bit", "the 8-bit optimizer"),
        ),
        "deepspeed": ((plan.strategy.startswith("zero"), plan.strategy), (plan.offload != "none", "offloading")),
        "flash_attn": ((plan.attention.backend == "flash_attention_2", "attention"),),
        "flash_attn_interface": ((plan.attention.backend == "flash_attention_3", "attention"),),
        "flash_attn.cute": ((plan.attention.backend == "flash_attention_4", "attention"),),
        "fused loss": ((plan.loss_kernel == "fused", "the loss"),),
    }
    return " and ".join(words for applies, words in uses.get(name, ()) if applies)


def _judge_figures(check: Check, cards: CardFacts, plan: Plan | None) -> Finding:
    figures = check.figures
    if check.name == "torch":
        return _judge_torch(check, cards)
    if check.name == "BF16" and "tflops" in figures:
        return _judge_speed(check, figures["tflops"], cards.gpu, cards)
    if check.name == "copies" and figures.get("to_gpu", _SLOW_COPIES) < _SLOW_COPIES:
        why = "loading and offloading cross this link"
        return _tell(check, "note", check.detail, why, "nvidia-smi -q shows the link's lanes and generation")
    if check.name == "spill" and figures.get("spills"):
        why = "a step that spills is many times slower, and the plan's ladder is never taken"
        remedy = "NVIDIA Control Panel (Windows): CUDA - Sysmem Fallback Policy > Prefer No Sysmem Fallback"
        return _tell(check, "problem", check.detail, why, remedy)
    if check.name == "peer access" and figures.get("denied") and cards.gpu is not None and cards.gpu.has_p2p:
        why = "the plan counts on direct links; NCCL goes through host memory instead"
        return _tell(check, "problem", check.detail, why, "export NCCL_P2P_DISABLE=1; BIOS: IOMMU/ACS off")
    if check.name == "deepspeed" and figures.get("cpu_adam") == 0 and plan is not None and plan.offload != "none":
        why = "the plan offloads the optimizer, which needs it"
        return _tell(check, "problem", check.detail, why, "apt install build-essential; pip install ninja")
    return _tell(check, "ok", check.detail)


def _judge_torch(check: Check, cards: CardFacts) -> Finding:
    seen, there = int(check.figures.get("gpus", 0)), len(cards.readings)
    if there and not seen:
        return _tell(
            check,
            "problem",
            f"{check.detail}; it sees none of {there} GPUs",
            "training would run on the CPU, without a word",
            f"install torch for CUDA {cards.cuda or 'of this driver'} or older: see pytorch.org/get-started",
        )
    if there and seen < there:
        why = "a plan for all of them would not start"
        return _tell(
            check, "problem", f"{check.detail}; nvidia-smi lists {there}", why, "reboot; look at dmesg for Xid"
        )
    return _tell(check, "ok", check.detail)


def _judge_speed(check: Check, tflops: float, gpu: Gpu | None, cards: CardFacts) -> Finding:
    peak = None if gpu is None else gpu.bf16_tflops
    if peak is None:
        return _tell(check, "ok", f"{check.detail} (peak unknown)")
    share = tflops / peak
    found = f"{check.detail}, {100 * share:.0f} % of the data sheet's {peak:g}"
    if share >= _GOOD_SHARE:
        return _tell(check, "ok", found)
    is_shared = any(state.holders for state in cards.states)
    why = "others use the GPU" if is_shared else "power limit, heat, or other work on the GPU; 80 % is usual"
    status: Status = "problem" if share < _BAD_SHARE and not is_shared else "note"
    return _tell(check, status, found, f"every step is that much slower: {why}", "nvidia-smi -q -d PERFORMANCE,POWER")
