"""Search for the fastest layout that fits: strategy, offload, gradient checkpointing and micro-batch together.

If each rank holds the full model, checkpointing is dropped first, at a small micro-batch, and only then does the
micro-batch grow. So more memory never leads to more checkpointing or to a smaller micro-batch, except to make room for
a CUDA graph, for large quantized bases, whose weights are dequantized in every micro-step, and for short sequences,
fewer of which may fit without checkpointing and be faster.

If weights are gathered or fetched for every micro-step, fewer and larger micro-steps may be worth the recomputation
that makes room for them: all combinations are compared in that case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from launcher.core.choices import SHARDED_STRATEGIES, Checkpointing, Offload, Strategy
from launcher.plan.calibration import correct_memory
from launcher.plan.estimate.communication import StepTime, estimate_step_time, make_collectives
from launcher.plan.estimate.memory import MemoryEstimate, estimate_memory
from launcher.plan.estimate.memory.recipe import Recipe
from launcher.plan.estimate.step_time import (
    MICRO_STEP_SECONDS,
    Workload,
    estimate_chunked_update_seconds,
    estimate_dequantize_seconds,
    estimate_launch_seconds,
    estimate_offload_seconds,
    estimate_seconds_per_token,
    estimate_update_seconds,
    overlap_launch,
)
from launcher.plan.estimator_inputs import make_workload
from launcher.plan.memory_budget import SearchInputs
from launcher.plan.strategy import Candidate

# Smaller micro-batches leave most GPUs idle; checkpointing is dropped before the micro-batch grows beyond this.
_SMALL_MICRO_BATCH_TOKENS = 2048
# A micro-batch with checkpointing grows beyond that only if it is this much faster, as with a large quantized base.
_MIN_GROWTH_SPEEDUP = 1.05
# If DDP fits, sharding must be this much faster to be chosen: DDP is simpler, and links were never measured.
_MIN_SHARDING_SPEEDUP = 1.2
_MENTIONED_GAIN = 0.05
# Number of micro-batch sizes to try: all small ones, then with growing distance.
_TRIED_SIZES = 512
# Share of the GPU's memory that a run with a CUDA graph may use: evaluation needs the rest (two chunks of logits and
# one layer: 0.8 to 1 GiB for a 0.6B model; derived, not measured).
_MAX_GRAPH_MEMORY = 0.85
_LAUNCH_MARGIN = 1.3  # on the time to launch a micro-step: hosts differ, and so does their load
# Of a CPU, or a GPU of unknown peak: any rate will do to compare layouts of the same work.
_ARBITRARY_SECONDS_PER_TOKEN = 1e-4
_CACHED_LAYOUTS = 4096  # the same layouts are compared many times


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One way to run the training, as decided by the search."""

    strategy: Strategy
    offload: Offload
    checkpointing: Checkpointing
    micro_batch_size: int


def estimate_layout_memory(inputs: SearchInputs, layout: Layout, *, cautious: bool = False) -> MemoryEstimate:
    """Return the calibrated memory estimate of a layout.

    `cautious` assumes gradient accumulation even for a single micro-step, so that memory grows with the micro-batch.
    """
    recipe = make_layout_recipe(inputs, layout, cautious=cautious)
    return correct_memory(inputs.shape, recipe, estimate_memory(inputs.shape, recipe), inputs.calibration)


@lru_cache(maxsize=_CACHED_LAYOUTS)
def uses_cuda_graph(inputs: SearchInputs, layout: Layout) -> bool:
    """Return whether micro-steps run as a CUDA graph: the layout must allow one, and its private memory pool must fit.

    DDP ranks all-reduce gradients after the graph, which is cheap for an adapter. Full fine-tuning on several ranks has
    no graph, because its all-reduce must overlap with the backward pass.
    """
    if not inputs.can_use_cuda_graph or layout.offload != "none" or inputs.recipe.optimizer_in_bwd:
        return False
    if layout.strategy != "single" and (layout.strategy != "ddp" or inputs.recipe.adapter == "full"):
        return False
    recipe = _apply_layout(inputs, layout, accumulates=True, graphed=True)
    memory = correct_memory(inputs.shape, recipe, estimate_memory(inputs.shape, recipe), inputs.calibration)
    return memory.total_bytes <= _MAX_GRAPH_MEMORY * min(inputs.budget.device_bytes, inputs.budget.free_bytes)


def make_layout_recipe(inputs: SearchInputs, layout: Layout, *, cautious: bool = False) -> Recipe:
    """Return the inputs of a layout's memory estimate. A CUDA graph keeps gradients alive, as accumulation does."""
    graphed = uses_cuda_graph(inputs, layout)
    accumulates = cautious or count_accumulation_steps(inputs, layout) > 1 or graphed
    return _apply_layout(inputs, layout, accumulates=accumulates, graphed=graphed)


def _apply_layout(inputs: SearchInputs, layout: Layout, *, accumulates: bool, graphed: bool) -> Recipe:
    return replace(
        inputs.recipe,
        strategy=layout.strategy,
        num_ranks=_count_shards(inputs, layout.strategy),
        offload=layout.offload,
        checkpointing=layout.checkpointing,
        micro_batch_size=layout.micro_batch_size,
        accumulates_gradients=accumulates,
        graphed=graphed,
    )


def _count_shards(inputs: SearchInputs, strategy: Strategy) -> int:
    """Return the number of ranks that share one copy of a sharded state: all ranks, or with HSDP those of a node."""
    return inputs.hardware.gpus_per_node if strategy == "hsdp" else inputs.recipe.num_ranks


def fits_memory(inputs: SearchInputs, layout: Layout) -> bool:
    """Return whether a layout fits in GPU and CPU memory."""
    memory = estimate_layout_memory(inputs, layout, cautious=True)
    return memory.total_bytes <= inputs.budget.usable_bytes and fits_host_memory(inputs, memory)


def fits_host_memory(inputs: SearchInputs, memory: MemoryEstimate) -> bool:
    """Return whether the offloaded state of all ranks of a node fits in its CPU memory."""
    return count_node_host_bytes(inputs, memory) <= inputs.budget.usable_host_bytes


def count_node_host_bytes(inputs: SearchInputs, memory: MemoryEstimate) -> int:
    """Return the bytes of CPU memory that the offloaded state of all ranks of a node takes."""
    return memory.host_bytes * max(1, inputs.hardware.gpus_per_node)


def find_best_layout(inputs: SearchInputs, candidates: tuple[Candidate, ...]) -> Layout | None:
    """Return the simplest layout that fits, or a clearly faster one; None if none fits. Offloading is tried last."""
    best: Layout | None = None
    for strategy, offload in candidates:
        if best is not None and offload != "none":
            break
        layout = _find_best_of(inputs, strategy, offload)
        if layout is None:
            continue
        if best is None or _is_clearly_faster(inputs, layout, best):
            best = layout
    return best


def find_faster_sharding(
    inputs: SearchInputs, candidates: tuple[Candidate, ...], layout: Layout
) -> tuple[Strategy, float] | None:
    """Return the best sharded strategy and how much faster than a layout it is estimated to be; None if it is not."""
    sharded = tuple(each for each in candidates if each.strategy in SHARDED_STRATEGIES and each.offload == "none")
    best = find_best_layout(inputs, sharded)
    gain = 0.0 if best is None else estimate_step_seconds(inputs, layout) / estimate_step_seconds(inputs, best) - 1
    return None if best is None or gain < _MENTIONED_GAIN else (best.strategy, gain)


def _is_clearly_faster(inputs: SearchInputs, layout: Layout, best: Layout) -> bool:
    """Return whether a layout is faster than the best so far, and clearly so if the best is not sharded."""
    speedup = 1.0 if best.strategy in SHARDED_STRATEGIES else _MIN_SHARDING_SPEEDUP
    return estimate_step_seconds(inputs, best) > speedup * estimate_step_seconds(inputs, layout)


def _find_best_of(inputs: SearchInputs, strategy: Strategy, offload: Offload) -> Layout | None:
    if strategy not in SHARDED_STRATEGIES and offload == "none":
        return _find_replicated(inputs, strategy)
    layouts = []
    for level in inputs.levels:
        start = Layout(strategy=strategy, offload=offload, checkpointing=level, micro_batch_size=1)
        if fits_memory(inputs, start):
            layouts.append(_fastest_split(inputs, start, _largest_fit(inputs, start, inputs.filled_slots_per_rank)))
    return min(layouts, key=lambda layout: estimate_step_seconds(inputs, layout), default=None)


def _find_replicated(inputs: SearchInputs, strategy: Strategy) -> Layout | None:
    """Return the replicated layout with the least recomputation that fits, and its fastest micro-batch; else None."""
    slots = inputs.filled_slots_per_rank
    if inputs.recipe.optimizer_in_bwd:
        return _find_in_one_micro_batch(inputs, strategy)
    small = min(slots, ceil(_SMALL_MICRO_BATCH_TOKENS / inputs.recipe.sequence_length))
    smaller: list[Layout] = []  # with less recomputation, in micro-batches of fewer tokens
    for level in inputs.levels:
        start = Layout(strategy=strategy, offload="none", checkpointing=level, micro_batch_size=small)
        if fits_memory(inputs, start):
            usual = _find_usual_split(inputs, start)
            limit = estimate_step_seconds(inputs, usual) / _MIN_GROWTH_SPEEDUP
            return next((layout for layout in smaller if estimate_step_seconds(inputs, layout) <= limit), usual)
        first = replace(start, micro_batch_size=1)
        if fits_memory(inputs, first):
            smaller.append(_fastest_split(inputs, first, _largest_fit(inputs, first, small)))
    return min(smaller, key=lambda layout: estimate_step_seconds(inputs, layout), default=None)


def _find_usual_split(inputs: SearchInputs, start: Layout) -> Layout:
    """Return a replicated layout with the fastest micro-batch that fits, which is small if layers are recomputed."""
    larger = _fastest_split(inputs, start, _largest_fit(inputs, start, inputs.filled_slots_per_rank))
    if start.checkpointing == inputs.levels[0]:
        return larger
    usual = _fastest_split(inputs, start, start.micro_batch_size)
    is_packed = inputs.slot_tokens == inputs.recipe.sequence_length
    speedup = estimate_step_seconds(inputs, usual) / estimate_step_seconds(inputs, larger)
    return larger if is_packed and speedup >= _MIN_GROWTH_SPEEDUP else usual


def _find_in_one_micro_batch(inputs: SearchInputs, strategy: Strategy) -> Layout | None:
    """Return the layout with the least recomputation that fits a rank's batch as one micro-batch; None if none does."""
    whole = replace(leanest_layout(inputs, Candidate(strategy)), micro_batch_size=inputs.slots_per_rank)
    layouts = (replace(whole, checkpointing=level) for level in inputs.levels)
    return next((layout for layout in layouts if fits_memory(inputs, layout)), None)


def _largest_fit(inputs: SearchInputs, start: Layout, limit: int) -> int:
    """Return the largest micro-batch that fits, by bisection: memory grows with the micro-batch."""
    low, high = start.micro_batch_size, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits_memory(inputs, replace(start, micro_batch_size=middle)):
            low = middle
        else:
            high = middle - 1
    return low


def _fastest_split(inputs: SearchInputs, layout: Layout, largest: int) -> Layout:
    """Return the layout with the micro-batch that makes a step shortest; on a tie, with the smaller one."""
    options = (replace(layout, micro_batch_size=size) for size in _sizes(inputs.filled_slots_per_rank, largest))
    return min(options, key=lambda option: round(estimate_step_seconds(inputs, option), 9))


def _sizes(slots: int, largest: int) -> list[int]:
    """Return the micro-batch sizes to try: all if they are few, else the smallest for each number of micro-steps."""
    if largest <= _TRIED_SIZES:
        return list(range(1, largest + 1))
    fewest = ceil(slots / largest)
    return sorted({min(largest, ceil(slots / steps)) for steps in range(fewest, fewest + _TRIED_SIZES)})


def count_accumulation_steps(inputs: SearchInputs, layout: Layout) -> int:
    """Return the number of micro-steps per optimizer step."""
    return ceil(inputs.slots_per_rank / layout.micro_batch_size)


def _count_filled_steps(inputs: SearchInputs, layout: Layout) -> int:
    """Return the number of micro-steps per optimizer step in which a rank has sequences."""
    return ceil(inputs.filled_slots_per_rank / layout.micro_batch_size)


def leanest_layout(inputs: SearchInputs, candidate: Candidate) -> Layout:
    """Return the layout that needs the least memory with a given strategy and offloading."""
    return Layout(
        strategy=candidate.strategy, offload=candidate.offload, checkpointing=inputs.levels[-1], micro_batch_size=1
    )


def estimate_step_seconds(inputs: SearchInputs, layout: Layout) -> float:
    """Return the estimated duration of one optimizer step."""
    micro, exposed = split_step_seconds(inputs, layout)
    return micro * _count_filled_steps(inputs, layout) + exposed


@lru_cache(maxsize=_CACHED_LAYOUTS)
def split_step_seconds(inputs: SearchInputs, layout: Layout) -> tuple[float, float]:
    """Return the seconds of one micro-step, and the seconds per step spent waiting for links, ranks or CPU memory."""
    time, weights = estimate_time(inputs, layout), inputs.exchange.weight_bytes
    steps = _count_filled_steps(inputs, layout)
    waiting = time.waiting_seconds + estimate_offload_seconds(layout.offload, steps, weights, inputs.gradient_bytes)
    waiting += _estimate_update_seconds(inputs, layout)
    return time.compute_seconds / steps, waiting


def _estimate_update_seconds(inputs: SearchInputs, layout: Layout) -> float:
    """Return the seconds of a weight update on the GPU, with copies of paged moments; 0 if the CPU does it."""
    recipe, gpu = inputs.recipe, inputs.hardware.gpu
    if gpu is None or layout.offload != "none":
        return 0.0
    is_paged = recipe.optimizer == "paged_adamw_8bit"
    if not (recipe.trainable_dtype == "bf16" or recipe.optimizer_in_bwd or is_paged):
        is_sharded = layout.strategy not in ("single", "ddp")
        return estimate_update_seconds(gpu, inputs.num_trained / (inputs.hardware.num_ranks if is_sharded else 1))
    paged_bytes = estimate_layout_memory(inputs, layout).host_bytes if is_paged else 0
    return estimate_chunked_update_seconds(gpu, inputs.num_trained, paged_bytes)


def estimate_time(inputs: SearchInputs, layout: Layout) -> StepTime:
    """Return the time of one optimizer step, without offloading."""
    return estimate_step_time(
        make_collectives(
            layout.strategy,
            inputs.exchange,
            replays=uses_cuda_graph(inputs, layout),
        ),
        inputs.hardware,
        micro_step_seconds=_micro_step_seconds(inputs, layout),
        num_micro_steps=_count_filled_steps(inputs, layout),
        num_layers=inputs.shape.num_layers,
    )


@lru_cache(maxsize=_CACHED_LAYOUTS)
def _make_workload(inputs: SearchInputs, layout: Layout) -> Workload:
    recipe = replace(inputs.recipe, strategy=layout.strategy, checkpointing=layout.checkpointing)
    return make_workload(inputs.shape, recipe, inputs.workload.document_tokens, inputs.workload.trained_share)


def _micro_step_seconds(inputs: SearchInputs, layout: Layout) -> float:
    compute = _compute_seconds(inputs, layout)
    if inputs.hardware.gpu is None:
        return compute
    launching = 0.0 if uses_cuda_graph(inputs, layout) else estimate_launch_seconds(_make_workload(inputs, layout))
    return MICRO_STEP_SECONDS + overlap_launch(compute, launching)


def _compute_seconds(inputs: SearchInputs, layout: Layout) -> float:
    """Return the seconds of one micro-step on a device that never waits for the host."""
    workload, gpu = _make_workload(inputs, layout), inputs.hardware.gpu
    tokens = layout.micro_batch_size * inputs.slot_tokens
    per_token = None if gpu is None else estimate_seconds_per_token(gpu, workload)
    if gpu is None or per_token is None:
        return tokens * _ARBITRARY_SECONDS_PER_TOKEN
    return tokens * per_token + estimate_dequantize_seconds(gpu, workload)


def is_launch_bound(inputs: SearchInputs, layout: Layout) -> bool:
    """Return whether the host takes about as long to launch a micro-step as the GPU to run it, or longer."""
    return _compute_seconds(inputs, layout) < _LAUNCH_MARGIN * estimate_launch_seconds(_make_workload(inputs, layout))
