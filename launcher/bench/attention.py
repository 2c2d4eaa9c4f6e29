"""Measure the attention backends that can run on this machine, with the shapes of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from launcher.base_models.families import FAMILIES
from launcher.bench.worker import MeasurementFailedError, MeasurementProcess
from launcher.core.choices import AttentionBackend
from launcher.core.errors import InputError
from launcher.core.frozen_model import Frozen
from launcher.plan.attention import has_own_heads, list_package_backends
from launcher.plan.calibration import AttentionShape, MeasuredAttention
from launcher.plan.model import Plan

_MODULE = "launcher.bench.workers.attention"
# Relative difference to FP32 attention; in BF16 the backends measured so far differ by less than 0.01.
_MAX_DIFFERENCE = 0.03


class AttentionSpec(Frozen):
    """Input of the process that measures an attention backend: the backend, and the shape of a packed micro-batch."""

    backend: AttentionBackend
    shape: AttentionShape
    num_sequences: int
    sequence_length: int
    mean_tokens: int  # per document


class AttentionTiming(Frozen):
    """Forward and backward time of one layer's attention, and its relative difference from FP32 attention."""

    forward_ms: float
    backward_ms: float
    difference: float  # relative, the largest of output and gradients
    is_deterministic: bool

    @property
    def milliseconds(self) -> float:
        """Milliseconds of the forward and the backward pass together."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionResult:
    """Timings of the measured attention backends, and the reasons why the others have none."""

    timings: dict[AttentionBackend, AttentionTiming] = field(default_factory=dict)
    problems: dict[AttentionBackend, str] = field(default_factory=dict)


def check_measurable(plan: Plan) -> None:
    """Raise InputError if the plan is not for this machine's GPU, or cannot choose its attention backend by speed."""
    hardware, family = plan.hardware, FAMILIES.get(plan.base.model_type)
    if hardware.gpu is None or hardware.source != "probe":
        where = "this machine has none" if hardware.gpu is None else "--gpu describes another machine: omit it"
        raise InputError(f"launcher bench attention measures the GPU of this machine, and {where}")
    if plan.precision.compute_dtype == "fp32":
        raise InputError(
            "this plan computes in FP32, but flash attention needs BF16 or FP16: there is nothing to compare"
        )
    if plan.base.model_type == "gemma2" or (family is not None and family.has_sinks):
        raise InputError(
            f"{plan.base.name} has attention sinks or soft-capped scores, which few backends support: "
            "its backend is not chosen by speed"
        )


def list_measurable(plan: Plan) -> tuple[AttentionBackend, ...]:
    """Return the attention backends to measure on this GPU, with the Triton kernels if they support the head size."""
    gpu, base = plan.hardware.gpu, plan.base
    assert gpu is not None
    backends = list_package_backends(gpu, plan.hardware)
    if has_own_heads(base) and "triton" in plan.hardware.packages:
        backends.append("triton")
    if gpu.has_flash_attention:
        backends += ["varlen", "flex"]
    return (*backends, "sdpa")


def make_attention_shape(plan: Plan) -> AttentionShape:
    """Return the attention shape of a plan (heads, head size, dtype), which decides the fastest backend."""
    base = plan.base
    return AttentionShape(
        num_heads=base.num_heads,
        num_kv_heads=base.num_kv_heads,
        head_dim=base.head_dim,
        dtype=plan.precision.compute_dtype,
    )


def measure_attention(
    plan: Plan,
    backends: tuple[AttentionBackend, ...],
    folder: Path,
    limit_seconds: float,
    report: Callable[[str], None],
) -> AttentionResult:
    """Measure each backend in a separate process, so that a crashing kernel does not affect the other backends."""
    result = AttentionResult()
    for backend in backends:
        report(f"measuring {backend}")
        spec = AttentionSpec(
            backend=backend,
            shape=make_attention_shape(plan),
            num_sequences=plan.batch.micro_batch_size,
            sequence_length=plan.batch.sequence_length,
            mean_tokens=max(1, round(plan.data.mean_tokens)),
        )
        try:
            with MeasurementProcess(_MODULE, spec, folder, backend) as process:
                timing = AttentionTiming.model_validate_json(process.read(limit_seconds))
        except MeasurementFailedError as error:
            result.problems[backend] = error.reason
            continue
        if timing.difference > _MAX_DIFFERENCE:
            result.problems[backend] = f"wrong: differs from FP32 attention by {timing.difference:.3f}"
        else:
            result.timings[backend] = timing
    return result


def make_measurement(plan: Plan, result: AttentionResult) -> MeasuredAttention:
    """Convert measured timings to the record that is stored for later plans."""
    return MeasuredAttention(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        shape=make_attention_shape(plan),
        num_sequences=plan.batch.micro_batch_size,
        sequence_length=plan.batch.sequence_length,
        milliseconds={backend: timing.milliseconds for backend, timing in result.timings.items()},
    )
