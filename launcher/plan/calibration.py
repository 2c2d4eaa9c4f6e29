"""What runs of this machine have shown of the estimates, and how far a plan goes by it. Pure: files are read elsewhere.

Memory is raised by the most that a run like it took above its estimate. It is lowered only where three runs or more
stayed below, to the highest of them and as much again as they differ, and never for a run larger than those. Speed is
scaled by the median of the last runs; the search for a layout does not know of it, so that strategies that were
measured are not played off against those that were not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil
from statistics import median

from launcher.choices import (
    AdapterKind,
    AttentionBackend,
    Checkpointing,
    LossKernel,
    Offload,
    Quantization,
    Strategy,
)
from launcher.memory import MemoryEstimate, MemoryTerm, Recipe
from launcher.plan.model import CALIBRATION_TERM, Decision
from launcher.shapes import ModelShape
from launcher.units import format_count
from launcher.values import Frozen

LAST_RUNS = 10  # of a family, that are gone by
RUNS_TO_LOWER = 3
# Upper bounds of the classes of bases, in parameters: layers of bases of one class are about as wide.
_SIZE_CLASSES = (
    (0.1e9, "under 0.1B"),
    (1e9, "under 1B"),
    (3e9, "1B to 3B"),
    (6e9, "3B to 6B"),
    (12e9, "6B to 12B"),
    (40e9, "12B to 40B"),
    (float("inf"), "over 40B"),
)


class Family(Frozen):
    """Runs whose estimates go wrong together."""

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


class Seen(Frozen):
    """One finished run: what was estimated, without any correction, and what it took."""

    run: str
    when: str  # ISO 8601, UTC
    family: Family
    base: str
    estimated_bytes: int  # as torch's allocator counts: without the CUDA context
    measured_bytes: int | None  # None: no GPU
    estimated_tokens_per_second: float | None  # None: nobody can say, as on a CPU
    measured_tokens_per_second: float
    captured: bool = False  # micro-steps were launched as CUDA graphs, which speed is another matter

    @property
    def memory_ratio(self) -> float | None:
        return None if self.measured_bytes is None else self.measured_bytes / max(1, self.estimated_bytes)

    @property
    def speed_ratio(self) -> float | None:
        estimated = self.estimated_tokens_per_second
        return self.measured_tokens_per_second / estimated if estimated else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Of the machine that is planned for: its runs, the oldest first."""

    runs: Mapping[Family, tuple[Seen, ...]] = field(default_factory=dict)
    may_lower: bool = True  # False: a run like this ran out of memory here


NOTHING_LEARNT = Calibration()


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """What an estimate is multiplied by, and how many runs say so, from the lowest to the highest of their ratios."""

    factor: float
    num_runs: int
    lowest: float
    highest: float


def make_calibration(seen: Iterable[Seen]) -> Calibration:
    runs: dict[Family, tuple[Seen, ...]] = {}
    for one in sorted(seen, key=lambda one: (one.when, one.run)):
        runs[one.family] = (*runs.get(one.family, ()), one)
    return Calibration(runs=runs)


def name_family(shape: ModelShape, recipe: Recipe) -> Family:
    return Family(
        size_class=next(name for limit, name in _SIZE_CLASSES if shape.num_parameters < limit),
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


def find_memory_correction(calibration: Calibration, family: Family, estimated_bytes: int) -> Correction | None:
    """None: nothing was measured. A factor of 1: what was measured is no reason to plan otherwise."""
    measured = [one for one in calibration.runs.get(family, ()) if one.memory_ratio is not None][-LAST_RUNS:]
    ratios = [one.memory_ratio for one in measured if one.memory_ratio is not None]
    if not ratios:
        return None
    lowest, highest = min(ratios), max(ratios)
    factor = max(1.0, highest)
    is_known_size = estimated_bytes <= max(one.estimated_bytes for one in measured)
    if highest < 1 and calibration.may_lower and len(ratios) >= RUNS_TO_LOWER and is_known_size:
        factor = min(1.0, highest + (highest - lowest))
    return Correction(factor=factor, num_runs=len(ratios), lowest=lowest, highest=highest)


def find_speed_correction(calibration: Calibration, family: Family, *, captures: bool = False) -> Correction | None:
    found = [one.speed_ratio for one in calibration.runs.get(family, ()) if one.captured == captures]
    ratios = [ratio for ratio in found if ratio is not None][-LAST_RUNS:]
    if not ratios:
        return None
    return Correction(factor=median(ratios), num_runs=len(ratios), lowest=min(ratios), highest=max(ratios))


def find_measured_speed(calibration: Calibration, family: Family, base: str) -> Correction | None:
    """Tokens a second of the same base, where nobody can estimate them: the factor of an estimate of 1."""
    speeds = [one.measured_tokens_per_second for one in calibration.runs.get(family, ()) if one.base == base]
    if not speeds:
        return None
    last = speeds[-LAST_RUNS:]
    return Correction(factor=median(last), num_runs=len(last), lowest=min(last), highest=max(last))


def correct_memory(shape: ModelShape, recipe: Recipe, plain: MemoryEstimate, known: Calibration) -> MemoryEstimate:
    """With one more term; the same where this machine's runs say nothing."""
    if not known.runs:
        return plain
    allocated = plain.allocated_bytes
    correction = find_memory_correction(known, name_family(shape, recipe), allocated)
    if correction is None or correction.factor == 1.0:
        return plain
    num_bytes = ceil(allocated * (correction.factor - 1.0))
    note = f"{_percent(correction.factor)} by {_runs(correction.num_runs)}"
    term = MemoryTerm(name=CALIBRATION_TERM, num_bytes=num_bytes, note=note)
    return MemoryEstimate(terms=(*plain.terms, term), host_bytes=plain.host_bytes)


def explain_memory(correction: Correction) -> Decision:
    """What was measured, and what follows from it."""
    by, seen = f"by {_runs(correction.num_runs)}", f"runs like this one took {_range(correction)} of their estimates"
    if correction.factor != 1.0:
        return _state("memory estimate", f"{_percent(correction.factor)} {by}", seen)
    if correction.num_runs < RUNS_TO_LOWER:
        why = f"less is planned with once {RUNS_TO_LOWER} have shown it"
    else:
        why = "this one is larger, or they differ too much to plan with less"
    return _state("memory estimate", f"unchanged {by}", f"{seen}; {why}")


def explain_speed(correction: Correction, *, is_estimated: bool) -> Decision:
    by = f"by {_runs(correction.num_runs)}"
    if not is_estimated:
        reason = "nobody can estimate it here: the median of the same base's last runs"
        return _state("speed estimate", f"{format_count(correction.factor)} tokens/s {by}", reason)
    reason = f"the median: runs like this one reached {_range(correction)} of their estimates"
    return _state("speed estimate", f"{_percent(correction.factor)} {by}", reason)


def _state(name: str, value: str, reason: str) -> Decision:
    return Decision(name=name, value=value, reason=reason, decided_by="plan")


def _range(correction: Correction) -> str:
    lowest, highest = (f"{100 * ratio:.1f}" for ratio in (correction.lowest, correction.highest))
    return f"{lowest} %" if lowest == highest else f"{lowest} to {highest} %"


def _percent(factor: float) -> str:
    return f"{100 * (factor - 1):+.1f} %"


def _runs(count: int) -> str:
    return f"{count} {'run' if count == 1 else 'runs'} of this machine"
