"""The same training on fewer GPUs, up to those that were asked for: what each further one brings, and what limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from launcher.hardware import Hardware
from launcher.memory import count_trainable
from launcher.plan.advice import on_hardware, whole_candidates
from launcher.plan.basics import Basics
from launcher.plan.compiling import decide_compile
from launcher.plan.fit import Layout, accumulation_steps, best_layout, estimate_time, step_seconds
from launcher.plan.model import ScalePoint, ScalingPlan, SpeedPlan
from launcher.plan.schedule import estimate_length
from launcher.plan.situation import Situation
from launcher.plan.sizing import Sizing, likely_captured, make_workload
from launcher.plan.strategy import Candidate, make_candidates
from launcher.scaling import INTERFERENCE, LINK_EFFICIENCY, OVERLAP, STRAGGLING, Link, find_link

# From this share of a step on, the links are what a training waits for.
_BOUND = 0.25
# Below this share of as many single GPUs, a person should know why.
_POOR = 0.7
# A way out must bring at least this much to be named.
_WORTH_NAMING = 1.1


def make_scaling_plan(
    situation: Situation, basics: Basics, sizing: Sizing, layout: Layout, speed: SpeedPlan
) -> ScalingPlan | None:
    """None for one GPU, and where nobody can tell how fast one is."""
    hardware = sizing.hardware
    estimated, link = speed.estimated_tokens_per_second, find_link(hardware)
    if hardware.num_ranks == 1 or link is None or estimated is None or speed.tokens_per_second is None:
        return None
    seconds = step_seconds(sizing, layout)
    step_tokens, taught = estimated * seconds, speed.tokens_per_second / estimated
    compiles = _would_compile(situation, basics, sizing)
    points: list[ScalePoint] = []
    for smaller in _count_up(hardware):
        is_asked = smaller == hardware
        sized, found = (sizing, layout) if is_asked else _size(situation, basics, sizing, smaller, compiles)
        if found is not None:
            points.append(_make_point(sized, found, step_tokens, taught))
    first = next((point for point in points if point.offload == "none"), points[0])
    shared = tuple(_relate(point, first) for point in points)
    return ScalingPlan(
        points=shared,
        reference_ranks=first.num_ranks,
        verdict=_judge(sizing, layout, shared[-1], first.num_ranks, link),
        assumptions=tuple(_assume(link)),
    )


def _would_compile(situation: Situation, basics: Basics, sizing: Sizing) -> bool:
    """Before a strategy forbids it."""
    length = estimate_length(situation).num_steps
    workload = make_workload(situation, basics)
    captures = likely_captured(situation, basics)
    return sizing.workload.compiled or decide_compile(situation, workload, length, captures=captures).is_on


def _size(
    situation: Situation, basics: Basics, sizing: Sizing, hardware: Hardware, compiles: bool
) -> tuple[Sizing, Layout | None]:
    """As a plan for this hardware: compiled, unless that leads to ZeRO-3."""
    candidates = _candidates(situation, basics, hardware)
    sized = _compiled(on_hardware(sizing, hardware), compiles)
    found = best_layout(sized, candidates)
    if found is not None and found.strategy == "zero3" and situation.config.torch_compile is not True:
        sized = _compiled(sized, False)
        found = best_layout(sized, candidates)
    return sized, found


def _compiled(sizing: Sizing, compiles: bool) -> Sizing:
    return replace(
        sizing,
        recipe=replace(sizing.recipe, compiled=compiles),
        workload=replace(sizing.workload, compiled=compiles),
    )


def _relate(point: ScalePoint, first: ScalePoint) -> ScalePoint:
    """To the smallest number of GPUs that does without offloading, which would make all others look good."""
    each = point.tokens_per_second / point.num_ranks
    return point.model_copy(update={"efficiency": each * first.num_ranks / first.tokens_per_second})


def _count_up(hardware: Hardware) -> Iterator[Hardware]:
    """1, 2, 4, … GPUs of a node, then 1, 2, 4, … nodes, up to what was asked for."""
    for gpus in _powers(hardware.gpus_per_node):
        yield hardware.model_copy(update={"gpus_per_node": gpus, "nodes": 1})
    for nodes in _powers(hardware.nodes):
        yield hardware.model_copy(update={"nodes": nodes})
    yield hardware


def _powers(limit: int) -> Iterator[int]:
    """Of two, below the limit."""
    number = 1
    while number < limit:
        yield number
        number *= 2


def _candidates(situation: Situation, basics: Basics, hardware: Hardware) -> tuple[Candidate, ...]:
    """One GPU needs no strategy, whatever was asked for on many."""
    here = replace(situation, hardware=hardware)
    if hardware.num_ranks == 1:
        plain = situation.config.model_copy(update={"strategy": "auto"})
        here = replace(here, config=plain, options=replace(situation.options, strategy=None))
    return make_candidates(here, basics.quantization_kind, basics.optimizer.name)


def _make_point(sizing: Sizing, layout: Layout, step_tokens: float, taught: float) -> ScalePoint:
    """`taught`: what runs of this machine have shown of the estimate; it holds for all rows alike."""
    hardware, time = sizing.hardware, estimate_time(sizing, layout)
    seconds = step_seconds(sizing, layout) / taught
    link = find_link(hardware)
    return ScalePoint(
        num_ranks=hardware.num_ranks,
        nodes=hardware.nodes,
        strategy=layout.strategy,
        offload=layout.offload,
        checkpointing=layout.checkpointing,
        micro_batch_size=layout.micro_batch_size,
        gradient_accumulation_steps=accumulation_steps(sizing, layout),
        link=None if link is None else link.name,
        link_gb_per_second=None if link is None else link.reached_gb_per_second,
        moved_bytes=time.moved_bytes,
        num_messages=time.num_messages,
        seconds_per_step=seconds,
        compute_seconds=time.compute_seconds / taught,
        communication_seconds=time.communication_seconds / taught,
        hidden_seconds=time.hidden_seconds / taught,
        exposed_seconds=time.exposed_seconds / taught,
        tokens_per_second=step_tokens / seconds,
        efficiency=1.0,
    )


def _judge(sizing: Sizing, layout: Layout, last: ScalePoint, reference_ranks: int, link: Link) -> str:
    waiting = last.exposed_seconds / last.seconds_per_step
    if waiting >= _BOUND:
        ways = list(_find_ways(sizing, layout))
        helps = "; ".join(ways) if ways else "nothing that was tried helps: fewer GPUs, or a faster link"
        return (
            f"communication-bound: {100 * waiting:.0f} % of a step is waiting for {link.name} "
            f"({link.reached_gb_per_second:.3g} GB/s counted on); {helps}"
        )
    whose = "one alone" if reference_ranks == 1 else f"one of {reference_ranks}"
    reached = f"each GPU does {100 * last.efficiency:.0f} % of what {whose} does"
    if last.efficiency >= _POOR:
        return f"{reached}; {100 * waiting:.0f} % of a step is waiting for {link.name}"
    slots = sizing.slots_per_rank
    each = "one sequence" if slots == 1 else f"{slots} sequences"
    return (
        f"short of work: {reached}, with {each} a step; a larger global batch would keep them busy, "
        "and is another training"
    )


def _find_ways(sizing: Sizing, layout: Layout) -> Iterator[str]:
    """Each was tried by the same search: what a sequence takes then, against what it takes now."""
    now = step_seconds(sizing, layout) / sizing.global_batch_size

    def gain(other: Sizing, candidates: tuple[Candidate, ...]) -> float:
        found = best_layout(other, candidates)
        return 0.0 if found is None else now * other.global_batch_size / step_seconds(other, found)

    same: tuple[Candidate, ...] = ((layout.strategy, layout.offload),)
    doubled = gain(replace(sizing, global_batch_size=2 * sizing.global_batch_size), same)
    if doubled >= _WORTH_NAMING:
        yield f"twice the global batch, where the learning allows it, would be {doubled:.1f} times as fast a sequence"
    recipe, workload = sizing.recipe, sizing.workload
    if recipe.adapter == "full":
        names = tuple(linear.name for linear in sizing.shape.linears)
        lora = replace(
            sizing,
            recipe=replace(recipe, adapter="lora", rank=16, base_dtype=recipe.compute_dtype, target_modules=names),
            workload=replace(workload, adapter="lora"),
            gradient_bytes=4.0 * count_trainable(sizing.shape, "lora", 16, names),
        )
        if (factor := gain(lora, whole_candidates(lora))) >= _WORTH_NAMING:
            yield f"adapter_type lora, whose gradients are small, {factor:.1f} times"
    elif recipe.quantization == "none" and layout.strategy in ("fsdp2", "zero3"):
        small = replace(
            sizing,
            recipe=replace(recipe, quantization="int4"),
            workload=replace(workload, quantization="int4"),
        )
        if (factor := gain(small, (("ddp", "none"),))) >= _WORTH_NAMING:
            yield f"base_models[0].quantization int4, with which nothing is gathered, {factor:.1f} times"
    longer = [level for level in sizing.levels if level == "full" and layout.checkpointing != "full"]
    if longer and layout.strategy in ("fsdp2", "zero3"):
        fewer = replace(sizing, levels=("full",))
        if (factor := gain(fewer, same)) >= _WORTH_NAMING:
            yield f"fewer, larger micro-batches by recomputing more, {factor:.1f} times"


def _assume(link: Link) -> Iterator[str]:
    yield "no run on more than one GPU was measured by us"
    yield f"links reach {100 * LINK_EFFICIENCY:.0f} % of what is stated"
    yield (
        f"{100 * OVERLAP:.0f} % of compute has something beside it, of which {100 * (1 - INTERFERENCE):.0f} % is gained"
    )
    yield f"the slowest rank costs the others {100 * STRAGGLING:.0f} %"
    if link.is_assumed:
        yield f"each node's network carries {link.gb_per_second:.3g} GB/s in one direction"
