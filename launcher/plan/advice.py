"""Nothing fits: say by how much, and what would. Every way out was checked by the same search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from launcher.errors import DoesNotFitError, Problem
from launcher.gpus import GPUS
from launcher.hardware import Gpu, Hardware
from launcher.memory import MemoryEstimate, count_trainable
from launcher.plan.fit import Layout, best_layout, estimate
from launcher.plan.sizing import CPU_HEADROOM, LEVELS, Sizing, make_budget
from launcher.plan.strategy import Candidate
from launcher.units import GIB, format_gib

_SHORTEST_SEQUENCE = 256


def does_not_fit(sizing: Sizing, candidates: tuple[Candidate, ...]) -> DoesNotFitError:
    """The leanest attempt, term by term, and the ways out."""
    attempts = [estimate(sizing, _leanest_layout(sizing, candidate)) for candidate in candidates]
    leanest = min(attempts, key=lambda memory: memory.total_bytes)
    terms = tuple(Problem(where=term.name, what=format_gib(term.num_bytes)) for term in leanest.terms if term.num_bytes)
    ways = list(_ways_out(sizing, candidates, leanest))
    return DoesNotFitError(
        _title(sizing, leanest),
        terms,
        hint="; ".join(ways) if ways else "no setting that was tried makes it fit; take a smaller base model",
    )


def _leanest_layout(sizing: Sizing, candidate: Candidate) -> Layout:
    strategy, offload = candidate
    return Layout(strategy=strategy, offload=offload, checkpointing=sizing.levels[-1], micro_batch_size=1)


def _title(sizing: Sizing, leanest: MemoryEstimate) -> str:
    budget = sizing.budget
    if leanest.total_bytes <= budget.usable_bytes:
        return (
            f"{sizing.shape.name} does not fit: offloading needs {format_gib(_host_bytes(sizing, leanest))} of CPU "
            f"memory on each node, {format_gib(budget.usable_host_bytes)} are usable of {format_gib(budget.host_bytes)}"
        )
    held = budget.card_bytes - budget.free_bytes
    others = f" ({format_gib(held)} are held by other processes)" if held > 0 else ""
    return (
        f"{sizing.shape.name} does not fit: at the least {format_gib(leanest.total_bytes)} a rank, "
        f"{format_gib(max(0, budget.usable_bytes))} are usable of {format_gib(budget.card_bytes)}{others}"
    )


def _host_bytes(sizing: Sizing, memory: MemoryEstimate) -> int:
    return memory.host_bytes * max(1, sizing.hardware.gpus_per_node)


def _ways_out(sizing: Sizing, candidates: tuple[Candidate, ...], leanest: MemoryEstimate) -> Iterator[str]:
    if sizing.budget.free_bytes < sizing.budget.card_bytes and _fits_on_a_free_card(sizing, candidates):
        yield "it fits once the other processes are gone"
    if leanest.total_bytes <= sizing.budget.usable_bytes:
        needed = _host_bytes(sizing, leanest) / (1 - CPU_HEADROOM)
        yield f"--ram {needed / GIB:.0f} would do, if a node has it"
    if sizing.levels[-1] != "full" and best_layout(replace(sizing, levels=LEVELS), candidates):
        yield "gradient_checkpointing true fits, or leave it to the plan"
    yield from _leaner_training(sizing)
    shorter = _shorter_sequence(sizing, candidates)
    if shorter:
        yield f"max_seq_length {shorter} fits"
    more = _more_gpus(sizing)
    if more:
        yield f"{more} fits (sharded)"
    larger = _larger_gpu(sizing, candidates)
    if larger:
        yield f"--gpu {larger.key} fits ({format_gib(larger.memory_bytes)})"


def _fits_on_a_free_card(sizing: Sizing, candidates: tuple[Candidate, ...]) -> bool:
    free = replace(sizing.budget, free_bytes=sizing.budget.card_bytes)
    return best_layout(replace(sizing, budget=free), candidates) is not None


def _leaner_training(sizing: Sizing) -> Iterator[str]:
    """An adapter instead of all weights, a quantised base, or both."""
    recipe = sizing.recipe
    if recipe.adapter != "full":
        if fits_quantised(sizing):
            yield "base_models[0].quantization int4 fits"
        return
    targets = tuple(linear.name for linear in sizing.shape.linears)
    lora = replace(
        sizing,
        recipe=replace(recipe, adapter="lora", rank=16, base_dtype=recipe.compute_dtype, target_modules=targets),
        gradient_bytes=4.0 * count_trainable(sizing.shape, "lora", 16, targets),
    )
    if best_layout(lora, whole_candidates(sizing)):
        yield "adapter_type lora fits"
    elif fits_quantised(lora):
        yield "adapter_type lora with base_models[0].quantization int4 fits"


def whole_candidates(sizing: Sizing) -> tuple[Candidate, ...]:
    """Without offloading: one process, or replicas and shards."""
    if sizing.hardware.num_ranks == 1:
        return (("single", "none"),)
    sharded: Candidate = ("zero3" if sizing.recipe.quantization == "int4" else "fsdp2", "none")
    return (("ddp", "none"), sharded)


def fits_quantised(sizing: Sizing) -> bool:
    recipe = sizing.recipe
    if recipe.adapter == "full" or recipe.quantization == "int4" or not recipe.on_gpu:
        return False
    quantised = replace(sizing, recipe=replace(recipe, quantization="int4"))
    return best_layout(quantised, whole_candidates(quantised)) is not None


def _shorter_sequence(sizing: Sizing, candidates: tuple[Candidate, ...]) -> int | None:
    length = sizing.recipe.sequence_length // 2
    while length >= _SHORTEST_SEQUENCE:
        if best_layout(replace(sizing, recipe=replace(sizing.recipe, sequence_length=length)), candidates):
            return length
        length //= 2
    return None


def _more_gpus(sizing: Sizing) -> str | None:
    hardware = sizing.hardware
    if hardware.gpu is None or sizing.recipe.quantization == "int8" or sizing.recipe.optimizer == "adamw_bnb_8bit":
        return None
    for gpus, nodes in ((2, 1), (4, 1), (8, 1), (8, 2), (8, 4)):
        if gpus >= hardware.gpus_per_node and nodes >= hardware.nodes and gpus * nodes > hardware.num_ranks:
            larger = on_hardware(sizing, hardware.model_copy(update={"gpus_per_node": gpus, "nodes": nodes}))
            if best_layout(larger, whole_candidates(larger)):
                return f"--gpus {gpus}" + (f" --nodes {nodes}" if nodes > 1 else "")
    return None


def _larger_gpu(sizing: Sizing, candidates: tuple[Candidate, ...]) -> Gpu | None:
    here = sizing.hardware.gpu
    if here is None:
        return None
    for gpu in sorted(GPUS.values(), key=lambda gpu: gpu.memory_mib):
        if gpu.memory_mib > here.memory_mib and gpu.has_bf16 == here.has_bf16:
            hardware = sizing.hardware.model_copy(update={"gpu": gpu, "free_vram_mib": None})
            if best_layout(on_hardware(sizing, hardware), candidates):
                return gpu
    return None


def on_hardware(sizing: Sizing, hardware: Hardware) -> Sizing:
    """What is remembered to have failed holds for the same cards."""
    recipe = replace(sizing.recipe, num_ranks=hardware.num_ranks)
    failed = sizing.budget.failed_bytes if hardware.gpu == sizing.hardware.gpu else None
    return replace(sizing, hardware=hardware, recipe=recipe, budget=replace(make_budget(hardware), failed_bytes=failed))
