"""Correction of memory and speed estimates by measured runs of this machine. Pure: no files are read here.

The memory estimate is raised by the largest excess of a similar run. It is lowered only if at least three similar runs
stayed below their estimates: to their highest ratio plus the spread, and never for a run larger than those. The speed
estimate is scaled by the median ratio of the last runs. The search for a layout uses uncorrected speed estimates, so
that strategies with measured runs are not favored over others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil
from statistics import median

from launcher.base_models.shapes import ModelShape
from launcher.core.choices import (
    AdapterKind,
    AttentionBackend,
    Checkpointing,
    Dtype,
    LossKernel,
    Offload,
    Quantization,
    Strategy,
)
from launcher.core.frozen_model import Frozen
from launcher.core.units import format_count
from launcher.plan.estimate.memory import MemoryEstimate, MemoryTerm
from launcher.plan.estimate.memory.recipe import Recipe
from launcher.plan.model import CALIBRATION_TERM, Decision

LAST_RUNS = 10  # per family
RUNS_TO_LOWER = 3
# Size classes of base models by upper bound, in parameters: models of one class have layers of similar width.
_SIZE_CLASSES = (
    (0.1e9, "under 0.1B"),
    (1e9, "under 1B"),
    (3e9, "1B to 3B"),
    (6e9, "3B to 6B"),
    (12e9, "6B to 12B"),
    (40e9, "12B to 40B"),
    (float("inf"), "over 40B"),
)


class RunFamily(Frozen):
    """Settings that similar runs share: their memory and speed estimates are off by about the same factor."""

    size_class: str
    adapter: AdapterKind
    quantization: Quantization
    checkpointing: Checkpointing
    compiled: bool
    loss_kernel: LossKernel
    attention: AttentionBackend
    strategy: Strategy
    offload: Offload
    num_ranks: int


class MeasuredRun(Frozen):
    """Uncorrected estimates and measurements of one finished run."""

    run: str
    when: str  # ISO 8601, UTC
    family: RunFamily
    base: str
    estimated_bytes: int  # as counted by torch's allocator, without the CUDA context
    measured_bytes: int | None  # None: no GPU
    estimated_tokens_per_second: float | None  # None: no estimate, as on a CPU
    measured_tokens_per_second: float
    captured: bool = False  # ran as CUDA graphs: speed is compared among those only

    @property
    def memory_ratio(self) -> float | None:
        """Return measured divided by estimated memory; None without a GPU."""
        return None if self.measured_bytes is None else self.measured_bytes / max(1, self.estimated_bytes)

    @property
    def speed_ratio(self) -> float | None:
        """Return measured / estimated tokens/s."""
        estimated = self.estimated_tokens_per_second
        return self.measured_tokens_per_second / estimated if estimated else None


class AttentionShape(Frozen):
    """Numbers, size and data type of attention heads, which decide the fastest attention backend on a GPU."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: Dtype


class MeasuredAttention(Frozen):
    """Times of the attention backends for one shape of heads, as measured by `launcher bench attention`."""

    when: str  # ISO 8601, UTC
    shape: AttentionShape
    num_sequences: int
    sequence_length: int
    milliseconds: dict[AttentionBackend, float]  # forward and backward of one layer


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Measured runs and attention backends of this machine, oldest first."""

    runs: Mapping[RunFamily, tuple[MeasuredRun, ...]] = field(default_factory=dict)
    may_lower: bool = True  # False: a similar run ran out of memory here
    attention: tuple[MeasuredAttention, ...] = ()


NO_CALIBRATION = Calibration()


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Factor that corrects an estimate, the number of runs it is based on, and the range of the runs' own factors."""

    factor: float
    num_runs: int
    lowest: float
    highest: float


def make_calibration(measured: Iterable[MeasuredRun], attention: Iterable[MeasuredAttention] = ()) -> Calibration:
    """Return a Calibration with the measured runs grouped by family, oldest first."""
    runs: dict[RunFamily, tuple[MeasuredRun, ...]] = {}
    for run in sorted(measured, key=lambda run: (run.when, run.run)):
        runs[run.family] = (*runs.get(run.family, ()), run)
    return Calibration(runs=runs, attention=tuple(attention))


def make_family(shape: ModelShape, recipe: Recipe) -> RunFamily:
    """Return the calibration family of a run with this base model and these settings."""
    return RunFamily(
        size_class=next(name for limit, name in _SIZE_CLASSES if shape.num_parameters < limit)
        + ("" if shape.experts is None else ", experts")
        + (", BF16 weights" if recipe.adapter == "full" and recipe.trainable_dtype == "bf16" else "")
        + (", FP8" if recipe.fp8_base or recipe.fp8_layers else ""),
        adapter=recipe.adapter,
        quantization=recipe.quantization,
        checkpointing=recipe.checkpointing,
        compiled=recipe.compiled,
        loss_kernel=recipe.loss_kernel,
        attention=recipe.attention,
        strategy=recipe.strategy,
        offload=recipe.offload,
        num_ranks=recipe.num_ranks,
    )


def compute_memory_correction(calibration: Calibration, family: RunFamily, estimated_bytes: int) -> Correction | None:
    """Return the memory correction, or None without measured runs. A factor of 1 keeps the estimate."""
    measured = [run for run in calibration.runs.get(family, ()) if run.memory_ratio is not None][-LAST_RUNS:]
    ratios = [run.memory_ratio for run in measured if run.memory_ratio is not None]
    if not ratios:
        return None
    lowest, highest = min(ratios), max(ratios)
    factor = max(1.0, highest)
    is_known_size = estimated_bytes <= max(run.estimated_bytes for run in measured)
    if highest < 1 and calibration.may_lower and len(ratios) >= RUNS_TO_LOWER and is_known_size:
        factor = min(1.0, highest + (highest - lowest))
    return Correction(factor=factor, num_runs=len(ratios), lowest=lowest, highest=highest)


def compute_speed_correction(
    calibration: Calibration, family: RunFamily, *, captures: bool = False
) -> Correction | None:
    """Return the speed correction from runs with (`captures`) or without CUDA graphs; None without measured runs."""
    runs = [run for run in calibration.runs.get(family, ()) if run.captured == captures]
    return _correct_by_median([run.speed_ratio for run in runs if run.speed_ratio is not None])


def compute_measured_speed(calibration: Calibration, family: RunFamily, base: str) -> Correction | None:
    """Return the median of a base's measured tokens/s; None without measured runs. Used where there is no estimate."""
    runs = calibration.runs.get(family, ())
    return _correct_by_median([run.measured_tokens_per_second for run in runs if run.base == base])


def _correct_by_median(values: list[float]) -> Correction | None:
    last = values[-LAST_RUNS:]
    if not last:
        return None
    return Correction(factor=median(last), num_runs=len(last), lowest=min(last), highest=max(last))


def correct_memory(
    shape: ModelShape, recipe: Recipe, estimate: MemoryEstimate, calibration: Calibration
) -> MemoryEstimate:
    """Return the estimate with a calibration term, or unchanged if there is nothing to correct."""
    if not calibration.runs:
        return estimate
    allocated = estimate.allocated_bytes
    correction = compute_memory_correction(calibration, make_family(shape, recipe), allocated)
    if correction is None or correction.factor == 1.0:
        return estimate
    num_bytes = ceil(allocated * (correction.factor - 1.0))
    note = f"{_format_change(correction.factor)} by {_format_runs(correction.num_runs)}"
    term = MemoryTerm(name=CALIBRATION_TERM, num_bytes=num_bytes, note=note)
    return MemoryEstimate(terms=(*estimate.terms, term), host_bytes=estimate.host_bytes)


def explain_memory(correction: Correction) -> Decision:
    """Return the decision about the memory estimate."""
    by = f"by {_format_runs(correction.num_runs)}"
    measured = f"similar runs used {_format_range(correction)} of their estimates"
    if correction.factor != 1.0:
        return _make_decision("memory estimate", f"{_format_change(correction.factor)} {by}", measured)
    if correction.num_runs < RUNS_TO_LOWER:
        reason = f"the estimate is lowered after {RUNS_TO_LOWER} runs"
    else:
        reason = "not lowered: this run is larger, or they differ too much"
    return _make_decision("memory estimate", f"unchanged {by}", f"{measured}; {reason}")


def explain_speed(correction: Correction, *, is_estimated: bool) -> Decision:
    """Return the decision about the speed estimate."""
    by = f"by {_format_runs(correction.num_runs)}"
    if not is_estimated:
        reason = "no estimate for this hardware: median of the last runs of this base"
        return _make_decision("speed estimate", f"{format_count(correction.factor)} tokens/s {by}", reason)
    reason = f"median: similar runs reached {_format_range(correction)} of their estimates"
    return _make_decision("speed estimate", f"{_format_change(correction.factor)} {by}", reason)


def _make_decision(name: str, value: str, reason: str) -> Decision:
    return Decision(name=name, value=value, reason=reason, decided_by="plan")


def _format_range(correction: Correction) -> str:
    lowest, highest = (f"{100 * ratio:.1f}" for ratio in (correction.lowest, correction.highest))
    return f"{lowest} %" if lowest == highest else f"{lowest} to {highest} %"


def _format_change(factor: float) -> str:
    return f"{100 * (factor - 1):+.1f} %"


def _format_runs(count: int) -> str:
    return f"{count} {'run' if count == 1 else 'runs'} on this machine"
