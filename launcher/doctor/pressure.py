"""Memory of a run: allocations that had to be tried again, spill into the host's memory, predictions that were off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from launcher import metrics
from launcher.doctor.findings import Finding
from launcher.doctor.series import ENOUGH_STEPS, compare_ends, judged_steps
from launcher.doctor.words import again, tell
from launcher.metrics import StepMetrics, find_values
from launcher.record import RunRecord
from launcher.units import bytes_to_gib, format_gib, format_percent

_MANY_RETRIES = 0.05  # of the steps
_CLOSE = 0.97  # of the card, reserved
_COLLAPSED = 0.5  # of the speed that it began with
_PREDICTION_TOLERANCE = 0.03
_UNSAFE = 0.10  # predicted less than it took, by so much


def judge_pressure(record: RunRecord) -> Iterator[Finding]:
    """Nothing on a CPU, whose memory nobody counts."""
    gpu, steps = record.plan.hardware.gpu, judged_steps(record)
    if gpu is None or not steps:
        return
    card = bytes_to_gib(gpu.memory_bytes)
    reserved = max(find_values(steps, metrics.PEAK_RESERVED_GIB), default=0.0)
    if _spills(steps, reserved, card):
        yield _tell_spill(reserved, card)
        return
    yield from _judge_retries(record, steps, reserved, card)
    yield from _judge_prediction(record, steps)


def _spills(steps: Sequence[StepMetrics], reserved: float, card: float) -> bool:
    if reserved > card:
        return True
    rates = find_values(steps, metrics.TOKENS_PER_SECOND)
    return reserved > _CLOSE * card and len(rates) >= 3 * ENOUGH_STEPS and compare_ends(rates, 3) < _COLLAPSED


def _tell_spill(reserved: float, card: float) -> Finding:
    much = "more than the card has" if reserved > card else "the card is full, and steps take more than twice as long"
    return tell(
        "spill",
        "problem",
        f"{reserved:.1f} GiB reserved on a card of {card:.1f} GiB: {much}",
        "the driver moves GPU memory into the host's instead of saying that it is full",
        "NVIDIA Control Panel (Windows): CUDA - Sysmem Fallback Policy > Prefer No Sysmem Fallback; "
        "the plan's ladder then takes the next rung",
    )


def _judge_retries(record: RunRecord, steps: Sequence[StepMetrics], reserved: float, card: float) -> Iterator[Finding]:
    retries = find_values(steps, metrics.ALLOC_RETRIES)
    grew = sum(later > earlier for earlier, later in pairwise(retries))
    if not grew:
        return
    is_storm = grew > _MANY_RETRIES * len(retries)
    full = f", {reserved:.1f} of {card:.1f} GiB reserved" if reserved else ""
    yield tell(
        "memory pressure",
        "problem" if is_storm else "note",
        f"{grew} of {len(retries)} steps got their memory only by emptying the cache{full}",
        "such steps are slow, and the next one may run out of memory",
        _next_rung(record),
    )


def _next_rung(record: RunRecord) -> str:
    """The run takes rungs by itself; some have a setting by which one can ask for them."""
    plan = record.plan
    if not plan.ladder:
        return "the ladder has no rung left: a shorter max_seq_length, int4 weights, or a larger card"
    rung = plan.ladder[0]
    taken = f"next rung of the ladder: {rung.action} ({format_gib(rung.predicted_bytes)}), taken when memory runs out"
    if rung.checkpointing != plan.checkpointing:
        value = "true" if rung.checkpointing == "full" else rung.checkpointing
        return f"{taken}; now: {again(record, f'training.config.gradient_checkpointing={value}')}"
    if rung.strategy != plan.strategy and rung.strategy != "single":
        return f"{taken}; now: {again(record)} --strategy {rung.strategy}"
    return taken


def _judge_prediction(record: RunRecord, steps: Sequence[StepMetrics]) -> Iterator[Finding]:
    errors = find_values(steps, metrics.PREDICTION_ERROR)
    if not errors:
        pairs = ((step.get(metrics.PREDICTED_GIB), step.get(metrics.PEAK_ALLOCATED_GIB)) for step in steps)
        errors = [predicted / peak - 1 for predicted, peak in pairs if predicted is not None and peak]
    if not errors or abs(errors[-1]) <= _PREDICTION_TOLERANCE:
        return
    error = errors[-1]
    direction = "less than it took: a plan that fits on paper may not fit" if error < 0 else "more than it took"
    yield tell(
        "prediction",
        "problem" if error < -_UNSAFE else "note",
        f"memory was predicted {format_percent(abs(error))} {direction}",
        "plans promise 3 %",
        f"please report {record.paths.plan} and {record.paths.metrics}: the memory model can be set right",
    )
