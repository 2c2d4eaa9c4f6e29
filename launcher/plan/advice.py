"""Nothing fits: say by how much, and what would. Every way out was checked by the same search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from launcher.errors import DoesNotFitError, Problem
from launcher.gpus import GPUS
from launcher.hardware import Gpu, Hardware
from launcher.memory import MemoryEstimate
from launcher.plan.fit import Layout, best_layout, estimate
from launcher.plan.sizing import LEVELS, Sizing, make_budget
from launcher.plan.strategy import Candidate
from launcher.units import format_gib

_SHORTEST_SEQUENCE = 256


def does_not_fit(sizing: Sizing, candidates: tuple[Candidate, ...]) -> DoesNotFitError:
    """The leanest attempt, term by term, and the ways out."""
    attempts = [estimate(sizing, _leanest_layout(sizing, candidate)) for candidate in candidates]
    leanest = min(attempts, key=lambda memory: memory.total_bytes)
    terms = tuple(Problem(where=term.name, what=format_gib(term.num_bytes)) for term in leanest.terms if term.num_bytes)
    ways = list(_ways_out(sizing, candidates))
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
        needed = leanest.host_bytes * max(1, sizing.hardware.gpus_per_node)
        return (
            f"{sizing.shape.name} does not fit: offloading needs {format_gib(needed)} of CPU memory on each node, "
            f"{format_gib(budget.usable_host_bytes)} are usable of {format_gib(budget.host_bytes)}"
        )
    return (
        f"{sizing.shape.name} does not fit: at the least {format_gib(leanest.total_bytes)} a rank, "
        f"{format_gib(budget.usable_bytes)} are usable of {format_gib(budget.card_bytes)}"
    )


def _ways_out(sizing: Sizing, candidates: tuple[Candidate, ...]) -> Iterator[str]:
    if sizing.levels[-1] != "full" and best_layout(replace(sizing, levels=LEVELS), candidates):
        yield "gradient_checkpointing true fits, or leave it to the plan"
    if fits_quantised(sizing, candidates):
        yield "base_models[0].quantization int4 fits"
    if _fits_as_lora(sizing, candidates):
        yield "adapter_type lora fits"
    shorter = _shorter_sequence(sizing, candidates)
    if shorter:
        yield f"max_seq_length {shorter} fits"
    more = _more_gpus(sizing)
    if more:
        yield f"--gpus {more} fits (sharded)"
    larger = _larger_gpu(sizing, candidates)
    if larger:
        yield f"--gpu {larger.key} fits ({format_gib(larger.memory_bytes)})"


def fits_quantised(sizing: Sizing, candidates: tuple[Candidate, ...]) -> bool:
    recipe = sizing.recipe
    if recipe.adapter == "full" or recipe.quantization != "none" or not recipe.on_gpu:
        return False
    whole = tuple(candidate for candidate in candidates if candidate[0] in ("single", "ddp"))
    return best_layout(replace(sizing, recipe=replace(recipe, quantization="int4")), whole) is not None


def _fits_as_lora(sizing: Sizing, candidates: tuple[Candidate, ...]) -> bool:
    recipe = sizing.recipe
    if recipe.adapter != "full":
        return False
    targets = tuple(linear.name for linear in sizing.shape.linears)
    lora = replace(recipe, adapter="lora", rank=16, base_dtype=recipe.compute_dtype, target_modules=targets)
    return best_layout(replace(sizing, recipe=lora), candidates) is not None


def _shorter_sequence(sizing: Sizing, candidates: tuple[Candidate, ...]) -> int | None:
    length = sizing.recipe.sequence_length // 2
    while length >= _SHORTEST_SEQUENCE:
        if best_layout(replace(sizing, recipe=replace(sizing.recipe, sequence_length=length)), candidates):
            return length
        length //= 2
    return None


def _more_gpus(sizing: Sizing) -> int | None:
    hardware = sizing.hardware
    can_shard = hardware.gpu is not None and sizing.recipe.quantization == "none"
    if not can_shard or sizing.recipe.optimizer == "adamw_bnb_8bit":
        return None
    sharded: tuple[Candidate, ...] = (("fsdp2", "none"),)
    for count in (2, 4, 8):
        if count > hardware.gpus_per_node:
            larger = hardware.model_copy(update={"gpus_per_node": count})
            if best_layout(_on(sizing, larger), sharded):
                return count
    return None


def _larger_gpu(sizing: Sizing, candidates: tuple[Candidate, ...]) -> Gpu | None:
    here = sizing.hardware.gpu
    if here is None:
        return None
    for gpu in sorted(GPUS.values(), key=lambda gpu: gpu.memory_mib):
        if gpu.memory_mib > here.memory_mib and gpu.has_bf16 == here.has_bf16:
            hardware = sizing.hardware.model_copy(update={"gpu": gpu, "free_vram_mib": None})
            if best_layout(_on(sizing, hardware), candidates):
                return gpu
    return None


def _on(sizing: Sizing, hardware: Hardware) -> Sizing:
    recipe = replace(sizing.recipe, num_ranks=hardware.num_ranks)
    return replace(sizing, hardware=hardware, recipe=recipe, budget=make_budget(hardware))
