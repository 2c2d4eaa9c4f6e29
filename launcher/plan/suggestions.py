"""The error if no layout fits: the memory that is missing, and settings that would fit, found by the same search."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import Any, Literal

from launcher.core.choices import ALL_LINEAR, EIGHT_BIT_OPTIMIZERS
from launcher.core.errors import DoesNotFitError, Problem
from launcher.core.units import GIB, format_gib
from launcher.hardware.gpu_catalogue import GPUS
from launcher.hardware.model import Gpu, Hardware, make_hardware
from launcher.plan.context import PlanContext
from launcher.plan.estimate.memory import MemoryEstimate
from launcher.plan.memory_budget import CPU_HEADROOM, SearchInputs, make_budget
from launcher.plan.search import Layout, count_node_host_bytes, estimate_layout_memory, find_best_layout, leanest_layout
from launcher.plan.strategy import Candidate, get_requested_strategy

_MIN_SEQUENCE_LENGTH = 256
# Values that need less memory than others that a manifest may set, or that allow sharding and offloading.
_LEANER: tuple[tuple[str, object], ...] = (
    ("strategy", "auto"),
    ("offload", "auto"),
    ("attention", "auto"),
    ("torch_compile", True),
    ("optim", "adamw_torch_fused"),
    ("init_lora_weights", None),
    ("modules_to_save", ()),
)

FindLayout = Callable[[PlanContext], Layout | None]  # with all decisions of a plan; None if nothing fits


def make_does_not_fit_error(
    context: PlanContext, inputs: SearchInputs, candidates: tuple[Candidate, ...], find_layout: FindLayout
) -> DoesNotFitError:
    """Return the error if no layout fits, with the terms of the smallest memory estimate and settings that fit."""
    attempts = [estimate_layout_memory(inputs, leanest_layout(inputs, candidate)) for candidate in candidates]
    leanest = min(attempts, key=lambda memory: memory.total_bytes)
    terms = tuple(Problem(where=term.name, what=format_gib(term.num_bytes)) for term in leanest.terms if term.num_bytes)
    suggestions = list(_suggest(context, inputs, leanest, find_layout))
    return DoesNotFitError(
        _format_title(inputs, leanest),
        terms,
        hint="; ".join(suggestions) or "no single setting makes it fit: combine several, or use a smaller base model",
    )


def _format_title(inputs: SearchInputs, leanest: MemoryEstimate) -> str:
    budget = inputs.budget
    if leanest.total_bytes <= budget.usable_bytes:
        needed = format_gib(count_node_host_bytes(inputs, leanest))
        return (
            f"{inputs.shape.name} does not fit: offloading needs {needed} of CPU "
            f"memory per node, and {format_gib(budget.usable_host_bytes)} of {format_gib(budget.host_bytes)} are usable"
        )
    held = budget.device_bytes - budget.free_bytes
    others = f" ({format_gib(held)} in use by other processes)" if held > 0 else ""
    return (
        f"{inputs.shape.name} does not fit: it needs at least {format_gib(leanest.total_bytes)} per rank, "
        f"and {format_gib(max(0, budget.usable_bytes))} of {format_gib(budget.device_bytes)} are usable{others}"
    )


def _suggest(
    context: PlanContext, inputs: SearchInputs, leanest: MemoryEstimate, find_layout: FindLayout
) -> Iterator[str]:
    """Yield settings with which the complete plan fits, so that a user who follows one gets a plan."""
    hardware = context.hardware
    if hardware.free_vram_mib is not None and find_layout(_with_hardware(context, free_vram_mib=None)):
        yield "it fits once the other processes have ended"
    if leanest.total_bytes <= inputs.budget.usable_bytes:
        needed = ceil(count_node_host_bytes(inputs, leanest) / (1 - CPU_HEADROOM) / GIB)
        if find_layout(_with_hardware(context, ram_gib_per_node=needed)):
            yield f"--ram {needed} fits, if each node has that many GiB"
    if inputs.levels[-1] != "full" and find_layout(with_config(context, gradient_checkpointing=True)):
        yield "gradient_checkpointing true fits, or let the plan decide"
    yield from _suggest_without_limits(context, find_layout)
    yield from _suggest_leaner_values(context, inputs, find_layout)
    yield from _suggest_smaller_training(context, inputs, find_layout)
    if shorter := _find_shorter_sequence(context, find_layout):
        yield f"max_seq_length {shorter} fits"
    if more := _find_more_gpus(context, find_layout):
        yield f"{more} fits (sharded)"
    if larger := _find_larger_gpu(context, find_layout):
        limit = "" if hardware.vram_limit_mib is None else " without --vram-limit"
        yield f"--gpu {larger.key}{limit} fits ({format_gib(larger.memory_bytes)})"


def _suggest_without_limits(context: PlanContext, find_layout: FindLayout) -> Iterator[str]:
    """Suggest to leave out --vram-limit or --strategy."""
    hardware, options = context.hardware, context.options
    whole = None if hardware.gpu is None or hardware.vram_limit_mib is None else GPUS.get(hardware.gpu.key)
    if whole and hardware.source == "catalogue" and find_layout(_with_hardware(context, gpu=whole)):
        yield f"without --vram-limit it fits ({format_gib(whole.memory_bytes)})"
    if options.strategy and find_layout(replace(context, options=replace(options, strategy=None))):
        yield "without --strategy it fits"


def _suggest_leaner_values(context: PlanContext, inputs: SearchInputs, find_layout: FindLayout) -> Iterator[str]:
    """Suggest values of single keys with which the plan fits, if the manifest sets others."""
    config, recipe, gpu = context.config, inputs.recipe, context.gpu
    changes = list(_LEANER)
    if gpu is not None and (recipe.compute_dtype == "fp32" or recipe.fp8_base or recipe.fp8_layers):
        changes.append(("precision", "bf16" if gpu.has_bf16 else "fp16"))
    for name, value in changes:
        is_set = recipe.optimizer in EIGHT_BIT_OPTIMIZERS if name == "optim" else getattr(config, name) != value
        if is_set and gpu is not None and find_layout(with_config(context, **{name: value})):
            why = " (8-bit optimizers exclude sharding and offloading)" if name == "optim" else ""
            yield f"{name} {value if isinstance(value, str) else json.dumps(value)} fits{why}"


def with_config(context: PlanContext, **changes: Any) -> PlanContext:
    """Return the inputs of a plan with other keys of training.config."""
    return replace(context, config=context.config.model_copy(update=changes))


def _with_hardware(context: PlanContext, **changes: Any) -> PlanContext:
    """Return the inputs of a plan for other hardware, with the CPU memory that flags for it would imply.

    A remembered OOM applies to the same GPU model only.
    """
    changed = context.hardware.model_copy(update=changes)
    if changed.is_ram_assumed and "ram_gib_per_node" not in changes:
        assumed = make_hardware(changed.gpu, gpus_per_node=changed.gpus_per_node, nodes=changed.nodes)
        changed = changed.model_copy(update={"ram_gib_per_node": assumed.ram_gib_per_node})
    options = context.options if changed.gpu == context.gpu else replace(context.options, oom_bytes=None)
    return replace(context, hardware=changed, options=options)


def with_quantization(context: PlanContext, quantization: Literal["none", "int4"]) -> PlanContext:
    """Return the inputs of a plan with another quantization of the base."""
    first, *others = context.manifest.base_models
    models = (first.model_copy(update={"quantization": quantization}), *others)
    return replace(context, manifest=context.manifest.model_copy(update={"base_models": models}))


def _suggest_smaller_training(context: PlanContext, inputs: SearchInputs, find_layout: FindLayout) -> Iterator[str]:
    """Suggest an adapter instead of full fine-tuning, a quantized base, or both."""
    adapter = ""
    if inputs.recipe.adapter == "full":
        leaner = find_leaner_full(context, inputs)
        if leaner is not None and find_layout(with_config(context, **leaner.changes)):
            yield f"{leaner.text} fits"
        context, adapter = _use_lora(context)
        if (layout := find_layout(context)) and layout.offload == "none":
            yield f"{adapter} fits"
            return
    quantized = with_quantization(context, "int4")
    if inputs.recipe.quantization != "int4" and inputs.recipe.on_gpu and (layout := find_layout(quantized)):
        offloaded = "" if layout.offload == "none" else ", with the optimizer in CPU memory"
        yield f"{adapter}{' with ' if adapter else ''}base_models[0].quantization int4 fits{offloaded}"


_FULL_ONLY = ("bf16_stochastic_round", "optimizer_in_bwd")  # keys that an adapter refuses
_LORA: Mapping[str, Any] = {"rank": 16, "alpha": 32, "target_modules": ALL_LINEAR}  # a manifest of full has none


def _use_lora(context: PlanContext) -> tuple[PlanContext, str]:
    """Return the inputs of a plan with LoRA instead of full fine-tuning, and the changed keys as text."""
    removed = [name for name in _FULL_ONLY if getattr(context.config, name)]
    text = ", ".join(("adapter_type lora", *(f"{name} {value}" for name, value in _LORA.items())))
    lora = with_config(context, adapter_type="lora", **_LORA, **dict.fromkeys(_FULL_ONLY))
    return lora, f"{text}, without {' and '.join(removed)}" if removed else text


@dataclass(frozen=True, slots=True)
class LeanerFull:
    """Keys of training.config with which full fine-tuning needs less memory, and the same as text."""

    changes: Mapping[str, Any]
    text: str


def find_leaner_full(context: PlanContext, inputs: SearchInputs) -> LeanerFull | None:
    """Return the smallest change of settings with which full fine-tuning fits into one GPU; None if there is none."""
    recipe = inputs.recipe
    if recipe.adapter != "full" or inputs.hardware.num_ranks > 1:
        return None
    if recipe.compute_dtype != "bf16" or recipe.optimizer == "sgd":
        return None
    if get_requested_strategy(context) not in (None, "single") or context.config.offload not in ("auto", "none"):
        return None  # BF16 weights are trained by one process without offloading
    optimizers = dict.fromkeys((recipe.optimizer, "adamw_bnb_8bit", "paged_adamw_8bit"))
    for in_backward, optimizer in product((False, True), optimizers):
        leaner = replace(
            recipe, base_dtype="bf16", trainable_dtype="bf16", optimizer=optimizer, optimizer_in_bwd=in_backward
        )
        size = _find_fitting_batch(replace(inputs, recipe=leaner))
        if size is None:
            continue
        changes: dict[str, Any] = {"bf16_stochastic_round": True, "optim": optimizer}
        text = f"bf16_stochastic_round true, optim {optimizer}"
        if in_backward:
            changes |= {"optimizer_in_bwd": True, "max_grad_norm": 0.0}
            text += ", optimizer_in_bwd true, max_grad_norm 0"
            if size < inputs.global_batch_size:
                changes |= {"batch_size": size, "gradient_accumulation_steps": 1}
                text += f" and a global batch of {size}"
        return LeanerFull(changes, text)
    return None


def _find_fitting_batch(inputs: SearchInputs) -> int | None:
    """Return the global batch if it fits, or the largest that does if it must be one micro-batch; None if none fits."""

    def fits(size: int) -> bool:
        smaller = replace(inputs, global_batch_size=size, step_sequences=min(size, inputs.step_sequences))
        return find_best_layout(smaller, (Candidate("single"),)) is not None

    sizes = range(1, inputs.global_batch_size + 1) if inputs.recipe.optimizer_in_bwd else [inputs.global_batch_size]
    num_fitting = bisect_left(sizes, True, key=lambda size: not fits(size))
    return sizes[num_fitting - 1] if num_fitting else None


def list_candidates_without_offload(inputs: SearchInputs) -> tuple[Candidate, ...]:
    """Return the strategies to try without offloading: single for one rank, else DDP and FSDP2."""
    if inputs.hardware.num_ranks == 1:
        return (Candidate("single"),)
    return (Candidate("ddp"), Candidate("fsdp2"))


def fits_with_int4(inputs: SearchInputs) -> bool:
    """Return whether the training fits without offloading if the base is quantized to 4 bits."""
    recipe = inputs.recipe
    if recipe.adapter == "full" or recipe.quantization == "int4" or not recipe.on_gpu or inputs.shape.experts:
        return False
    quantized = replace(inputs, recipe=replace(recipe, quantization="int4"))
    return find_best_layout(quantized, list_candidates_without_offload(quantized)) is not None


def _find_shorter_sequence(context: PlanContext, find_layout: FindLayout) -> int | None:
    length = context.config.max_seq_length // 2
    while length >= _MIN_SEQUENCE_LENGTH:
        if find_layout(with_config(context, max_seq_length=length)):
            return length
        length //= 2
    return None


def _find_more_gpus(context: PlanContext, find_layout: FindLayout) -> str | None:
    hardware = context.hardware
    if hardware.gpu is None:
        return None
    for gpus, nodes in ((2, 1), (4, 1), (8, 1), (8, 2), (8, 4)):
        if gpus >= hardware.gpus_per_node and nodes >= hardware.nodes and gpus * nodes > hardware.num_ranks:
            layout = find_layout(_with_hardware(context, gpus_per_node=gpus, nodes=nodes))
            if layout is not None and layout.offload == "none":
                return f"--gpus {gpus}" + (f" --nodes {nodes}" if nodes > 1 else "")
    return None


def _find_larger_gpu(context: PlanContext, find_layout: FindLayout) -> Gpu | None:
    here = context.gpu
    if here is None:
        return None
    tried = {here.memory_mib}
    for gpu in sorted(GPUS.values(), key=lambda gpu: gpu.memory_mib):
        is_larger = gpu.memory_mib > max(tried) and gpu.has_bf16 == here.has_bf16
        if is_larger and "laptop" not in gpu.key:
            tried.add(gpu.memory_mib)
            if find_layout(_with_hardware(context, gpu=gpu, free_vram_mib=None)):
                return gpu
    return None


def move_to_hardware(inputs: SearchInputs, hardware: Hardware) -> SearchInputs:
    """Return the search inputs for other hardware. A remembered OOM applies to the same GPU model only."""
    recipe = replace(inputs.recipe, num_ranks=hardware.num_ranks)
    failed = inputs.budget.oom_bytes if hardware.gpu == inputs.hardware.gpu else None
    return replace(inputs, hardware=hardware, recipe=recipe, budget=replace(make_budget(hardware), oom_bytes=failed))
