"""Check the GPU memory of a run: allocation retries, spilling to host memory, wrong predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from launcher.analysis.doctor.findings import Finding
from launcher.analysis.doctor.run_helpers import (
    ENOUGH_STEPS,
    compute_thirds,
    report_run,
    rerun_command,
    select_warm_steps,
)
from launcher.core import metrics
from launcher.core.metrics import StepMetrics, find_values
from launcher.core.units import bytes_to_gib, format_gib, format_percent
from launcher.runs.record import RunRecord

_MAX_RETRY_SHARE = 0.05  # of the steps
_NEARLY_FULL = 0.97  # share of the GPU memory that is reserved
_COLLAPSED = 0.5  # share of the initial speed
_PREDICTION_TOLERANCE = 0.03
_UNSAFE = 0.10  # underestimated by this much


def check_memory(record: RunRecord) -> Iterator[Finding]:
    """Check the GPU memory of a run: spilling, allocator retries and the prediction. Host memory is not recorded."""
    gpu, steps = record.plan.hardware.gpu, select_warm_steps(record)
    if gpu is None or not steps:
        return
    gpu_gib = bytes_to_gib(gpu.memory_bytes)
    reserved = max(find_values(steps, metrics.PEAK_RESERVED_GIB), default=0.0)
    if _is_spilling(steps, reserved, gpu_gib):
        yield _report_spill(reserved, gpu_gib)
        return
    yield from _check_retries(record, steps, reserved, gpu_gib)
    yield from _check_prediction(record, steps)


def _is_spilling(steps: Sequence[StepMetrics], reserved: float, gpu_gib: float) -> bool:
    if reserved > gpu_gib:
        return True
    rates = find_values(steps, metrics.TOKENS_PER_SECOND)
    if reserved <= _NEARLY_FULL * gpu_gib or len(rates) < 3 * ENOUGH_STEPS:
        return False
    first, _, last = compute_thirds(rates)
    return last < _COLLAPSED * first


def _report_spill(reserved: float, gpu_gib: float) -> Finding:
    detail = (
        "more than the GPU has" if reserved > gpu_gib else "the GPU is full, and steps take more than twice as long"
    )
    return report_run.problem(
        "spill",
        f"{reserved:.1f} GiB reserved on a GPU with {gpu_gib:.1f} GiB: {detail}",
        "the driver spills GPU memory to host memory instead of reporting out of memory",
        "NVIDIA Control Panel (Windows): CUDA - Sysmem Fallback Policy > Prefer No Sysmem Fallback; "
        "then the run uses the next OOM fallback",
    )


def _check_retries(
    record: RunRecord, steps: Sequence[StepMetrics], reserved: float, gpu_gib: float
) -> Iterator[Finding]:
    retries = find_values(steps, metrics.ALLOC_RETRIES)
    grew = sum(later > earlier for earlier, later in pairwise(retries))
    if not grew:
        return
    is_frequent = grew > _MAX_RETRY_SHARE * len(retries)
    full = f", {reserved:.1f} of {gpu_gib:.1f} GiB reserved" if reserved else ""
    yield report_run(
        "memory pressure",
        "problem" if is_frequent else "note",
        f"{grew} of {len(retries)} steps had to empty the allocator cache{full}",
        "such steps are slow, and one may run out of memory",
        _describe_next_fallback(record),
    )


def _describe_next_fallback(record: RunRecord) -> str:
    """Describe the next OOM fallback, and how to request it now if there is a setting for it."""
    plan = record.plan
    if not plan.oom_fallbacks:
        return "no OOM fallback is left: use a shorter max_seq_length or a larger GPU"
    fallback = plan.oom_fallbacks[0]
    text = f"next OOM fallback: {fallback.action} ({format_gib(fallback.predicted_bytes)}), used when memory runs out"
    if fallback.checkpointing != plan.checkpointing:
        value = "true" if fallback.checkpointing == "full" else fallback.checkpointing
        return f"{text}; now: {rerun_command(record, f'training.config.gradient_checkpointing={value}')}"
    if fallback.strategy != plan.strategy and fallback.strategy != "single":
        return f"{text}; now: {rerun_command(record)} --strategy {fallback.strategy}"
    return text


def _check_prediction(record: RunRecord, steps: Sequence[StepMetrics]) -> Iterator[Finding]:
    errors = find_values(steps, metrics.PREDICTION_ERROR)
    if not errors or abs(errors[-1]) <= _PREDICTION_TOLERANCE:
        return
    error = errors[-1]
    direction = "too low: a plan that should fit may not" if error < 0 else "too high"
    yield report_run(
        "prediction",
        "problem" if error < -_UNSAFE else "note",
        f"memory was predicted {format_percent(abs(error))} {direction}",
        "the estimate is usually within 3 %",
        f"please report {record.paths.plan} and {record.paths.metrics}: the memory model can be corrected",
    )
