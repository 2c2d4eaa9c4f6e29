"""Check torch, its GPU and its packages by micro-tests in a separate process, which reports lines of JSON.

Each check is announced before it begins: if a library crashes or hangs, the last announcement names it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Literal

from pydantic import Field, ValidationError

from launcher.analysis.doctor.findings import Finding, Reporter, Status, make_skipped
from launcher.analysis.doctor.gpu_checks import GpuFacts
from launcher.core.choices import EIGHT_BIT_OPTIMIZERS
from launcher.core.frozen_model import Frozen
from launcher.core.installation import format_install
from launcher.core.worker import WorkerError, kill_process_group, start_process
from launcher.hardware.model import Gpu
from launcher.plan.model import Plan

EXAMINATION = "launcher.training.diagnostics.run_checks"
LIMIT_SECONDS = 240.0
# Shares of the data sheet's peak. Large matmuls reach 80 % on an idle, healthy GPU.
_GOOD_SHARE, _BAD_SHARE = 0.65, 0.45
_SLOW_COPIES = 6.0  # GB/s: half the bandwidth of eight PCIe 4 lanes
_MAX_LINE = 160
_INSTALL = format_install("train")
# Packages that only some plans need, and how to install them.
_OPTIONAL = {
    "bitsandbytes": ("bitsandbytes", format_install("cuda")),
    "deepspeed": ("deepspeed", _INSTALL),
    "flash_attn": ("flash-attn", "pip install flash-attn --no-build-isolation, or set training.config.attention=auto"),
    "flash_attn_interface": (
        "flash-attn-3",
        "build it from github.com/Dao-AILab/flash-attention, or set training.config.attention=auto",
    ),
    "flash_attn.cute": ("flash-attn-4", format_install("flash4")),
    "fused loss": ("triton", "pip install triton"),
}


# not needed: has no use on this machine. not tried: not possible at the moment.
CheckStatus = Literal["begun", "works", "fails", "missing", "not needed", "not tried"]


class Check(Frozen):
    """Result of one check, printed as one line by the process that checks packages."""

    schema_version: Literal[1] = 1
    name: str
    status: CheckStatus
    detail: str = ""
    seconds: float = 0.0
    figures: dict[str, float] = Field(default_factory=dict)


def parse_checks(lines: Iterable[str]) -> tuple[Check, ...]:
    """Return the last state of each check. Other lines, which libraries may print, are skipped."""
    checks: dict[str, Check] = {}
    for line in lines:
        try:
            check = Check.model_validate_json(line)
        except (ValidationError, ValueError):
            continue
        checks[check.name] = check
    return tuple(checks.values())


def probe_packages(environment: Mapping[str, str], seconds: float = LIMIT_SECONDS) -> tuple[tuple[Check, ...], str]:
    """Check the packages in a separate process; return the results, and why the process did not finish.

    The process has a process group of its own, so that compilers are killed with it on a timeout.
    """
    command = [sys.executable, "-P", "-m", EXAMINATION]
    try:
        process = start_process(command, environment=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except WorkerError as failure:
        return (), f"python {failure}"
    error = ""
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        error = f"timed out after {seconds:.0f} s"
        kill_process_group(process)
        stdout, stderr = process.communicate()  # the checks that were finished
    except BaseException:
        kill_process_group(process)
        raise
    if process.returncode and not error:
        error = _describe_exit(process.returncode, stderr.decode("utf-8", "replace"))
    return parse_checks(stdout.decode("utf-8", "replace").splitlines()), error


def _describe_exit(code: int, stderr: str) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"the process was killed by {signal.Signals(-code).name}"
    lines = [line for line in stderr.splitlines() if line.strip()]
    return f"the process exited with code {code}: {lines[-1].strip()[:_MAX_LINE] if lines else 'no output'}"


def check_packages(checks: Sequence[Check], error: str, gpus: GpuFacts, plan: Plan | None = None) -> Iterator[Finding]:
    """Turn the results of the package checks into findings, given the GPUs and the plan."""
    if not checks:
        yield make_skipped("packages", "torch", error or "no output")
    for check in checks:
        yield from _check(check, error, gpus, plan)


def _make(check: Check, status: Status, found: str, matters: str = "", next_step: str = "") -> Finding:
    return Reporter("packages")(check.name, status, found, matters, next_step)


def _check(check: Check, error: str, gpus: GpuFacts, plan: Plan | None) -> Iterator[Finding]:
    if check.status == "begun":
        why = error or "the process ended during this check"
        matters = "a run that uses it would fail the same way"
        yield _make(check, "problem", why, matters, _suggest_fix(check))
    elif check.status == "not needed":
        return
    elif check.status == "not tried":
        yield _make(check, "note", f"not checked: {check.detail}", "", "run it again when the GPU is free")
    elif check.status == "missing":
        yield _check_missing(check, plan)
    elif check.status == "fails":
        yield _check_failure(check, plan)
    else:
        yield _check_figures(check, gpus, plan)


def _check_missing(check: Check, plan: Plan | None) -> Finding:
    if check.name == "torch":
        return _make(check, "note", check.detail, "planning works without it, training does not", _INSTALL)
    if check.name not in _OPTIONAL:
        return _make(check, "problem", check.detail, "training does not start without it", _INSTALL)
    if needs := _describe_need(check.name, plan):
        _, remedy = _OPTIONAL[check.name]
        return _make(check, "problem", check.detail, f"the plan needs it: {needs}", remedy)
    return _make(check, "ok", "not installed; nothing here needs it")


def _check_failure(check: Check, plan: Plan | None) -> Finding:
    needs = _describe_need(check.name, plan)
    if plan is not None and check.name in _OPTIONAL and not needs:
        return _make(check, "note", check.detail, "the plan does not use it", _suggest_fix(check))
    return _make(
        check, "problem", check.detail, needs or "a run that uses it would fail the same way", _suggest_fix(check)
    )


def _suggest_fix(check: Check) -> str:
    remedies = {
        "torch": "install the torch build for this driver: pytorch.org/get-started",
        "attention: varlen": "--set training.config.attention=sdpa",
        "attention: triton": "--set training.config.attention=varlen",
        "torch.compile": "apt install build-essential python3-dev, or --set training.config.torch_compile=false",
        "TF32": "unset NVIDIA_TF32_OVERRIDE",
    }
    if check.name in _OPTIONAL:
        return f"pip install --force-reinstall {_OPTIONAL[check.name][0]}"
    return remedies.get(check.name, f"python -m {EXAMINATION} shows its complete output")


def _describe_need(name: str, plan: Plan | None) -> str:
    if plan is None:
        return ""
    uses = {
        "bitsandbytes": (
            (plan.quantization is not None, f"{plan.quantization_kind} weights"),
            (plan.optimizer.name in EIGHT_BIT_OPTIMIZERS, "the 8-bit optimizer"),
        ),
        "deepspeed": ((plan.strategy.startswith("zero"), plan.strategy), (plan.offload != "none", "offloading")),
        "flash_attn": ((plan.attention.backend == "flash_attention_2", "attention"),),
        "flash_attn_interface": ((plan.attention.backend == "flash_attention_3", "attention"),),
        "flash_attn.cute": ((plan.attention.backend == "flash_attention_4", "attention"),),
        "fused loss": ((plan.loss_kernel == "fused", "the loss"),),
    }
    return " and ".join(words for applies, words in uses.get(name, ()) if applies)


def _check_figures(check: Check, gpus: GpuFacts, plan: Plan | None) -> Finding:
    figures = check.figures
    if check.name == "torch":
        return _check_torch(check, gpus)
    if check.name == "BF16" and "tflops" in figures:
        return _check_speed(check, figures["tflops"], gpus.gpu, gpus)
    if check.name == "copies" and figures.get("to_gpu", _SLOW_COPIES) < _SLOW_COPIES:
        why = "model loading and offloading use this link"
        return _make(check, "note", check.detail, why, "nvidia-smi -q shows the link's lanes and generation")
    if check.name == "spill" and figures.get("spills"):
        why = "a step that spills is many times slower, and no OOM fallback is used"
        remedy = "NVIDIA Control Panel (Windows): CUDA - Sysmem Fallback Policy > Prefer No Sysmem Fallback"
        return _make(check, "problem", check.detail, why, remedy)
    if check.name == "peer access" and figures.get("denied") and gpus.gpu is not None and gpus.gpu.has_p2p:
        why = "the plan assumes peer-to-peer access; NCCL goes through host memory instead"
        return _make(check, "problem", check.detail, why, "export NCCL_P2P_DISABLE=1; BIOS: IOMMU/ACS off")
    if check.name == "deepspeed" and figures.get("cpu_adam") == 0 and plan is not None and plan.offload != "none":
        why = "the plan offloads the optimizer, which needs it"
        return _make(check, "problem", check.detail, why, "apt install build-essential; pip install ninja")
    return _make(check, "ok", check.detail)


def _check_torch(check: Check, gpus: GpuFacts) -> Finding:
    seen, there = int(check.figures.get("gpus", 0)), len(gpus.readings)
    if there and not seen:
        return _make(
            check,
            "problem",
            f"{check.detail}; it sees none of the {there} GPUs",
            "training would silently run on the CPU",
            f"install torch for CUDA {gpus.cuda or 'of this driver'} or older: pytorch.org/get-started",
        )
    if there and seen < there:
        why = "a plan for all of them would not start"
        return _make(
            check, "problem", f"{check.detail}; the driver lists {there}", why, "reboot; look for Xid errors in dmesg"
        )
    return _make(check, "ok", check.detail)


def _check_speed(check: Check, tflops: float, gpu: Gpu | None, gpus: GpuFacts) -> Finding:
    peak = None if gpu is None else gpu.bf16_tflops
    if peak is None:
        return _make(check, "ok", f"{check.detail} (peak unknown)")
    share = tflops / peak
    found = f"{check.detail}, {100 * share:.0f} % of the data sheet's {peak:g}"
    if share >= _GOOD_SHARE:
        return _make(check, "ok", found)
    is_shared = any(state.holders for state in gpus.states)
    why = "other processes use the GPU" if is_shared else "power limit, heat, or other load; 80 % is usual"
    status: Status = "problem" if share < _BAD_SHARE and not is_shared else "note"
    return _make(check, status, found, f"every step is slower accordingly: {why}", "nvidia-smi -q -d PERFORMANCE,POWER")
