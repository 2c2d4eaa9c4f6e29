"""Estimated scaling efficiency: the same training planned for 1, 2, 4, … GPUs up to the requested number.

The table is in `launcher plan --json`; `launcher plan` prints its summary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from launcher.hardware.model import Hardware
from launcher.plan.context import PlanContext
from launcher.plan.dtype_and_kernels import ModelSettings
from launcher.plan.estimate.communication import (
    INTERFERENCE,
    LINK_EFFICIENCY,
    OVERLAP,
    STRAGGLING,
    Link,
    get_slowest_link,
)
from launcher.plan.estimate.memory import count_trainable
from launcher.plan.memory_budget import SearchInputs, expects_cuda_graph, make_workload
from launcher.plan.model import ScalePoint, ScalingPlan, SpeedPlan
from launcher.plan.schedule import estimate_run_length
from launcher.plan.search import (
    Layout,
    count_accumulation_steps,
    estimate_step_seconds,
    estimate_time,
    find_best_layout,
)
from launcher.plan.strategy import Candidate, make_candidates
from launcher.plan.suggestions import list_candidates_without_offload, move_to_hardware
from launcher.plan.torch_compile import decide_compile

# A step that waits this share of its time for links is communication-bound.
_COMMUNICATION_BOUND = 0.25
# A scaling efficiency below this is explained.
_POOR_EFFICIENCY = 0.7
_MIN_SPEEDUP = 1.1  # of an alternative, to be suggested


def make_scaling_plan(
    context: PlanContext, settings: ModelSettings, inputs: SearchInputs, layout: Layout, speed: SpeedPlan
) -> ScalingPlan | None:
    """Return the estimate, or None for one GPU or a GPU of unknown speed."""
    hardware = inputs.hardware
    estimated, link = speed.estimated_tokens_per_second, get_slowest_link(hardware)
    if hardware.num_ranks == 1 or link is None or estimated is None or speed.tokens_per_second is None:
        return None
    seconds = estimate_step_seconds(inputs, layout)
    step_tokens, calibration = estimated * seconds, speed.tokens_per_second / estimated
    compiles = _would_compile(context, settings, inputs)
    points: list[ScalePoint] = []
    for smaller in _iterate_hardware(hardware):
        is_requested = smaller == hardware
        sized, best = (inputs, layout) if is_requested else _plan_on(context, settings, inputs, smaller, compiles)
        if best is not None:
            points.append(_make_point(sized, best, step_tokens, calibration))
    first = next((point for point in points if point.offload == "none"), points[0])
    related = tuple(_set_efficiency(point, first) for point in points)
    return ScalingPlan(
        points=related,
        reference_ranks=first.num_ranks,
        summary=_summarize(inputs, layout, related[-1], first.num_ranks, link),
        assumptions=tuple(_list_assumptions(link)),
    )


def _would_compile(context: PlanContext, settings: ModelSettings, inputs: SearchInputs) -> bool:
    """Return whether torch.compile is used, before a strategy switches it off."""
    length = estimate_run_length(context).num_steps
    workload = make_workload(context, settings)
    captures = expects_cuda_graph(context, settings)
    return inputs.workload.compiled or decide_compile(context, workload, length, captures=captures).is_on


def _plan_on(
    context: PlanContext, settings: ModelSettings, inputs: SearchInputs, hardware: Hardware, compiles: bool
) -> tuple[SearchInputs, Layout | None]:
    """Return the layout that a plan for this hardware would have."""
    candidates = _list_candidates(context, settings, hardware)
    sized = _set_compiled(move_to_hardware(inputs, hardware), compiles)
    best = find_best_layout(sized, candidates)
    if best is not None and best.strategy == "zero3" and context.config.torch_compile is not True:
        sized = _set_compiled(sized, False)
        best = find_best_layout(sized, candidates)
    return sized, best


def _set_compiled(inputs: SearchInputs, compiles: bool) -> SearchInputs:
    return replace(
        inputs,
        recipe=replace(inputs.recipe, compiled=compiles),
        workload=replace(inputs.workload, compiled=compiles),
    )


def _set_efficiency(point: ScalePoint, first: ScalePoint) -> ScalePoint:
    """Relate a point to the fewest GPUs without offloading, which would make all others look good."""
    each = point.tokens_per_second / point.num_ranks
    return point.model_copy(update={"efficiency": each * first.num_ranks / first.tokens_per_second})


def _iterate_hardware(hardware: Hardware) -> Iterator[Hardware]:
    """Yield 1, 2, 4, … GPUs of a node, then 1, 2, 4, … nodes, up to the requested hardware."""
    for gpus in _powers_of_two(hardware.gpus_per_node):
        yield hardware.model_copy(update={"gpus_per_node": gpus, "nodes": 1})
    for nodes in _powers_of_two(hardware.nodes):
        yield hardware.model_copy(update={"nodes": nodes})
    yield hardware


def _powers_of_two(limit: int) -> Iterator[int]:
    number = 1
    while number < limit:
        yield number
        number *= 2


def _list_candidates(context: PlanContext, settings: ModelSettings, hardware: Hardware) -> tuple[Candidate, ...]:
    """Return the strategies to try; a strategy requested for several GPUs does not apply to one."""
    here = replace(context, hardware=hardware)
    if hardware.num_ranks == 1:
        plain = context.config.model_copy(update={"strategy": "auto"})
        here = replace(here, config=plain, options=replace(context.options, strategy=None))
    return make_candidates(here, settings.quantization_kind, settings.optimizer.name)


def _make_point(inputs: SearchInputs, layout: Layout, step_tokens: float, calibration: float) -> ScalePoint:
    """Return one row; `calibration` is measured / estimated speed on this machine, the same for all rows."""
    hardware, time = inputs.hardware, estimate_time(inputs, layout)
    seconds = estimate_step_seconds(inputs, layout) / calibration
    link = get_slowest_link(hardware)
    return ScalePoint(
        num_ranks=hardware.num_ranks,
        nodes=hardware.nodes,
        strategy=layout.strategy,
        offload=layout.offload,
        checkpointing=layout.checkpointing,
        micro_batch_size=layout.micro_batch_size,
        gradient_accumulation_steps=count_accumulation_steps(inputs, layout),
        link=None if link is None else link.name,
        link_gb_per_second=None if link is None else link.reached_gb_per_second,
        moved_bytes=time.moved_bytes,
        num_messages=time.num_messages,
        seconds_per_step=seconds,
        compute_seconds=time.compute_seconds / calibration,
        communication_seconds=time.communication_seconds / calibration,
        hidden_seconds=time.hidden_seconds / calibration,
        exposed_seconds=time.exposed_seconds / calibration,
        tokens_per_second=step_tokens / seconds,
        efficiency=1.0,
    )


def _summarize(inputs: SearchInputs, layout: Layout, last: ScalePoint, reference_ranks: int, link: Link) -> str:
    waiting = last.exposed_seconds / last.seconds_per_step
    reference = "1 GPU" if reference_ranks == 1 else f"{reference_ranks} GPUs, the fewest it fits on without offloading"
    efficiency = f"{100 * last.efficiency:.0f} % scaling efficiency relative to {reference}"
    waits = f"{100 * waiting:.0f} % of a step waits for {link.name}"
    if waiting >= _COMMUNICATION_BOUND:
        hints = "; ".join(_suggest_changes(inputs, layout)) or "use fewer GPUs or a faster link"
        return f"{efficiency}; communication-bound: {waits} ({link.reached_gb_per_second:.3g} GB/s assumed); {hints}"
    if last.efficiency >= _POOR_EFFICIENCY:
        return f"{efficiency}; {waits}"
    slots = inputs.slots_per_rank
    return (
        f"{efficiency}; too little work per GPU ({slots} sequence{'' if slots == 1 else 's'} per step): "
        "a larger global batch would help, but changes the training"
    )


def _suggest_changes(inputs: SearchInputs, layout: Layout) -> Iterator[str]:
    """Yield changes that the same search finds clearly faster per sequence."""
    now = estimate_step_seconds(inputs, layout) / inputs.global_batch_size

    def compute_speedup(other: SearchInputs, candidates: tuple[Candidate, ...]) -> float:
        best = find_best_layout(other, candidates)
        return 0.0 if best is None else now * other.global_batch_size / estimate_step_seconds(other, best)

    same: tuple[Candidate, ...] = ((layout.strategy, layout.offload),)
    doubled = compute_speedup(replace(inputs, global_batch_size=2 * inputs.global_batch_size), same)
    if doubled >= _MIN_SPEEDUP:
        yield f"doubling the global batch would be {doubled:.1f} times as fast per sequence, but changes the training"
    recipe, workload = inputs.recipe, inputs.workload
    if recipe.adapter == "full":
        names = tuple(linear.name for linear in inputs.shape.linears)
        lora = replace(
            inputs,
            recipe=replace(recipe, adapter="lora", rank=16, base_dtype=recipe.compute_dtype, target_modules=names),
            workload=replace(workload, adapter="lora"),
            gradient_bytes=4.0 * count_trainable(inputs.shape, "lora", 16, names),
        )
        if (factor := compute_speedup(lora, list_candidates_without_offload(lora))) >= _MIN_SPEEDUP:
            yield f"adapter_type lora, with small gradients, would be {factor:.1f} times as fast"
    elif recipe.quantization == "none" and layout.strategy in ("fsdp2", "zero3"):
        small = replace(
            inputs,
            recipe=replace(recipe, quantization="int4"),
            workload=replace(workload, quantization="int4"),
        )
        if (factor := compute_speedup(small, (("ddp", "none"),))) >= _MIN_SPEEDUP:
            yield f"base_models[0].quantization int4, without gathering weights, would be {factor:.1f} times as fast"
    longer = [level for level in inputs.levels if level == "full" and layout.checkpointing != "full"]
    if longer and layout.strategy in ("fsdp2", "zero3"):
        fewer = replace(inputs, levels=("full",))
        if (factor := compute_speedup(fewer, same)) >= _MIN_SPEEDUP:
            yield f"gradient_checkpointing true, for larger micro-batches, would be {factor:.1f} times as fast"


def _list_assumptions(link: Link) -> Iterator[str]:
    yield "estimated, not measured: we never measured several GPUs"
    yield f"links reach {100 * LINK_EFFICIENCY:.0f} % of their stated bandwidth"
    yield f"communication overlaps with {100 * OVERLAP:.0f} % of compute, {100 * (1 - INTERFERENCE):.0f} % hidden"
    yield f"waiting for the slowest rank costs {100 * STRAGGLING:.0f} %"
    if link.is_assumed:
        yield f"the network of a node carries {link.gb_per_second:.3g} GB/s in each direction"
