"""Finds what fits: strategy, offload, checkpointing and micro-batch, together.

Where each rank holds the whole model the choice walks a staircase: recomputation is given up first, at a small
micro-batch, and only then does the micro-batch grow. So more memory never means more checkpointing, nor a smaller
micro-batch, but where that leaves room for a CUDA graph. Where weights are gathered or fetched for every micro-step,
fewer and larger micro-steps may be worth recomputing: there the fastest combination is searched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from launcher.choices import SHARDED_STRATEGIES, Checkpointing, Offload, Strategy
from launcher.memory import MemoryEstimate, Recipe, estimate_memory, joins_mlp
from launcher.plan.calibration import correct_memory
from launcher.plan.sizing import Sizing
from launcher.scaling import StepTime, estimate_step, make_collectives, make_exchange
from launcher.speed import (
    MICRO_STEP_SECONDS,
    Workload,
    host_seconds,
    launched_seconds,
    offload_seconds,
    seconds_per_token,
    unpacking_seconds,
)

# Below this a micro-batch leaves most GPUs idle; recomputation is dropped before the micro-batch grows beyond it.
_SMALL_MICRO_BATCH_TOKENS = 2048
# Where replicas fit, shards must be this much faster to be taken: links were never measured, and DDP is simpler.
_WORTH_SHARDING = 1.2
# Micro-batches that are tried: all small ones, then ever larger steps.
_TRIED_SIZES = 512
# Of the card, that a run with a CUDA graph may take: an evaluation needs room beside it (two chunks of logits and one
# layer: 0.8 to 1 GiB for a 0.6B model; reasoned, not measured).
_MOST_OF_CARD = 0.85
_NEARLY = 1.3  # of the time to launch a micro-step: hosts differ, and what they do besides varies
# Where the GPU's peak is unknown, any rate serves to compare ways to split the same work.
_ANY_SECONDS_PER_TOKEN = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One way to run: what is decided here."""

    strategy: Strategy
    offload: Offload
    checkpointing: Checkpointing
    micro_batch_size: int


def estimate(sizing: Sizing, layout: Layout, *, cautious: bool = False) -> MemoryEstimate:
    """Cautious: as if gradients accumulated even where a rank takes all its slots at once, so that sizes only grow."""
    recipe = make_recipe(sizing, layout, cautious=cautious)
    return correct_memory(sizing.shape, recipe, estimate_memory(sizing.shape, recipe), sizing.calibration)


def is_captured(sizing: Sizing, layout: Layout) -> bool:
    """Launched as one CUDA graph: where there is room beside the memory that it keeps for itself.

    Replicas then exchange gradients behind it: an adapter's, which are few. All of a base's travel while others are
    computed.
    """
    if not sizing.may_capture or layout.offload != "none":
        return False
    if layout.strategy != "single" and (layout.strategy != "ddp" or sizing.recipe.adapter == "full"):
        return False
    recipe = _make_recipe(sizing, layout, accumulates=True, graphed=True)
    memory = correct_memory(sizing.shape, recipe, estimate_memory(sizing.shape, recipe), sizing.calibration)
    return memory.total_bytes <= _MOST_OF_CARD * min(sizing.budget.card_bytes, sizing.budget.free_bytes)


def make_recipe(sizing: Sizing, layout: Layout, *, cautious: bool = False) -> Recipe:
    """A graph adds to gradients that live beside all activations, however many micro-batches a step has."""
    graphed = is_captured(sizing, layout)
    accumulates = cautious or accumulation_steps(sizing, layout) > 1 or graphed
    return _make_recipe(sizing, layout, accumulates=accumulates, graphed=graphed)


def _make_recipe(sizing: Sizing, layout: Layout, *, accumulates: bool, graphed: bool) -> Recipe:
    return replace(
        sizing.recipe,
        strategy=layout.strategy,
        offload=layout.offload,
        checkpointing=layout.checkpointing,
        micro_batch_size=layout.micro_batch_size,
        accumulates_gradients=accumulates,
        graphed=graphed,
    )


def fits(sizing: Sizing, layout: Layout) -> bool:
    memory = estimate(sizing, layout, cautious=True)
    return memory.total_bytes <= sizing.budget.usable_bytes and fits_host(sizing, memory)


def fits_host(sizing: Sizing, memory: MemoryEstimate) -> bool:
    """The ranks of a node share its CPU memory."""
    return memory.host_bytes * max(1, sizing.hardware.gpus_per_node) <= sizing.budget.usable_host_bytes


def best_layout(sizing: Sizing, candidates: tuple[tuple[Strategy, Offload], ...]) -> Layout | None:
    """The simplest candidate that fits, unless sharding is clearly faster. Offloading is a last resort."""
    best: Layout | None = None
    for strategy, offload in candidates:
        if best is not None and offload != "none":
            break
        layout = _best_of(sizing, strategy, offload)
        if layout is None:
            continue
        if best is None or step_seconds(sizing, best) > _WORTH_SHARDING * step_seconds(sizing, layout):
            best = layout
    return best


def _best_of(sizing: Sizing, strategy: Strategy, offload: Offload) -> Layout | None:
    if strategy not in SHARDED_STRATEGIES and offload == "none":
        return _climb(sizing, strategy)
    found = []
    for level in sizing.levels:
        start = Layout(strategy=strategy, offload=offload, checkpointing=level, micro_batch_size=1)
        if fits(sizing, start):
            found.append(_fastest_split(sizing, start, _largest_fit(sizing, start, sizing.slots_per_rank)))
    return min(found, key=lambda layout: step_seconds(sizing, layout), default=None)


def _climb(sizing: Sizing, strategy: Strategy) -> Layout | None:
    """Least recomputation first, then the micro-batch, as far as they fit."""
    slots = sizing.slots_per_rank
    small = min(slots, ceil(_SMALL_MICRO_BATCH_TOKENS / sizing.recipe.sequence_length))
    for level in sizing.levels:
        start = Layout(strategy=strategy, offload="none", checkpointing=level, micro_batch_size=small)
        if fits(sizing, start):
            limit = slots if level == sizing.levels[0] else small
            return _fastest_split(sizing, start, _largest_fit(sizing, start, limit))
    last = Layout(strategy=strategy, offload="none", checkpointing=sizing.levels[-1], micro_batch_size=1)
    return _fastest_split(sizing, last, _largest_fit(sizing, last, small)) if fits(sizing, last) else None


def _largest_fit(sizing: Sizing, start: Layout, limit: int) -> int:
    """Bisection: memory grows with the micro-batch."""
    low, high = start.micro_batch_size, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(sizing, replace(start, micro_batch_size=middle)):
            low = middle
        else:
            high = middle - 1
    return low


def _fastest_split(sizing: Sizing, layout: Layout, largest: int) -> Layout:
    """Of the micro-batches that fit, the one that finishes a rank's slots first; the smaller where two are alike."""
    options = (replace(layout, micro_batch_size=size) for size in _sizes(sizing.slots_per_rank, largest))
    return min(options, key=lambda option: round(step_seconds(sizing, option), 9))


def _sizes(slots: int, largest: int) -> list[int]:
    """Micro-batches worth trying, up to the largest: for each number of micro-steps the smallest that does with it."""
    if largest <= _TRIED_SIZES:
        return list(range(1, largest + 1))
    fewest = ceil(slots / largest)
    return sorted({min(largest, ceil(slots / steps)) for steps in range(fewest, fewest + _TRIED_SIZES)})


def accumulation_steps(sizing: Sizing, layout: Layout) -> int:
    return ceil(sizing.slots_per_rank / layout.micro_batch_size)


def step_seconds(sizing: Sizing, layout: Layout) -> float:
    """Of one optimizer step."""
    micro, exposed = step_parts(sizing, layout)
    return micro * accumulation_steps(sizing, layout) + exposed


def step_parts(sizing: Sizing, layout: Layout) -> tuple[float, float]:
    """Seconds of one micro-step, and seconds of the whole step that wait: for links, other ranks, the CPU's memory."""
    time, weights = estimate_time(sizing, layout), make_exchange(sizing.workload, sizing.num_trained).weight_bytes
    steps = accumulation_steps(sizing, layout)
    waiting = time.waiting_seconds + offload_seconds(layout.offload, steps, weights, sizing.gradient_bytes)
    return time.compute_seconds / steps, waiting


def estimate_time(sizing: Sizing, layout: Layout) -> StepTime:
    """Of one optimizer step, without what is offloaded."""
    return estimate_step(
        make_collectives(
            layout.strategy,
            make_exchange(sizing.workload, sizing.num_trained),
            replays=is_captured(sizing, layout),
        ),
        sizing.hardware,
        micro_step_seconds=_micro_step_seconds(sizing, layout),
        num_micro_steps=accumulation_steps(sizing, layout),
        num_layers=sizing.shape.num_layers,
    )


def _make_workload(sizing: Sizing, layout: Layout) -> Workload:
    recipe = replace(sizing.recipe, strategy=layout.strategy, checkpointing=layout.checkpointing)
    joined = joins_mlp(sizing.shape, recipe)
    return replace(sizing.workload, checkpointing=layout.checkpointing, joined=joined)


def _micro_step_seconds(sizing: Sizing, layout: Layout) -> float:
    workload, gpu = _make_workload(sizing, layout), sizing.hardware.gpu
    tokens = layout.micro_batch_size * sizing.slot_tokens
    if gpu is None:
        return tokens * _ANY_SECONDS_PER_TOKEN  # a CPU gains nothing from larger micro-batches
    compute = _compute_seconds(sizing, layout)
    launching = 0.0 if is_captured(sizing, layout) else host_seconds(workload)
    return MICRO_STEP_SECONDS + launched_seconds(compute, launching)


def _compute_seconds(sizing: Sizing, layout: Layout) -> float:
    """Of one micro-step on a GPU that is kept busy."""
    workload, gpu = _make_workload(sizing, layout), sizing.hardware.gpu
    tokens = layout.micro_batch_size * sizing.slot_tokens
    per_token = None if gpu is None else seconds_per_token(gpu, workload)
    if gpu is None or per_token is None:
        return tokens * _ANY_SECONDS_PER_TOKEN
    return tokens * per_token + unpacking_seconds(gpu, workload)


def is_launch_bound(sizing: Sizing, layout: Layout) -> bool:
    """The host takes longer to launch a micro-step, or nearly, than the GPU to run it."""
    return _compute_seconds(sizing, layout) < _NEARLY * host_seconds(_make_workload(sizing, layout))
