"""torch.compile and CUDA graphs: whether they pay off, and whether layers or the model are compiled."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import NamedTuple

from launcher.core.choices import SHARDED_STRATEGIES, CompileScope, Offload, Quantization, Strategy
from launcher.core.units import format_duration
from launcher.plan.context import PlanContext, hardware_decision, manifest_decision, plan_decision
from launcher.plan.dtype_and_kernels import ModelSettings
from launcher.plan.estimate.step_time import (
    Workload,
    estimate_launch_seconds,
    estimate_seconds_per_token,
)
from launcher.plan.memory_budget import SearchInputs, estimate_slot_tokens, find_cuda_graph_obstacle
from launcher.plan.model import CompilePlan, Decision
from launcher.plan.schedule import estimate_run_length
from launcher.plan.search import Layout, estimate_step_seconds, is_launch_bound, uses_cuda_graph

# 13 to 26 s measured with an H200 (cold cache, one graph for all layers); hosts of consumer GPUs are slower.
_COMPILE_SECONDS = 30.0
# Fused attention and MLP blocks leave less to compile: 13 to 18 s, about half of it for their own kernels.
_FUSED_COMPILE_SECONDS = 15.0
# Compiling all 28 layers of the 0.6B model as one graph took 159 s there, and made micro-steps of 2 x 2,048 tokens
# 15 % shorter.
_MODEL_COMPILE_SECONDS_PER_LAYER = 5.5
_MODEL_COMPILE_SAVING = 0.15
NOT_MEASURED_UNDER_ZERO3 = (
    "compiled layers under ZeRO-3 were not measured on a GPU with offloading or NF4; torch_compile: true requests them"
)


class Searched(NamedTuple):
    """The best layout with or without torch.compile; None if nothing fits."""

    inputs: SearchInputs
    layout: Layout | None


def decide_compile(context: PlanContext, eager: Searched, compiled: Searched) -> tuple[bool, Decision]:
    """Return whether to use torch.compile, and the decision, which compares the time saved with the compile time."""
    config, gpu, name = context.config, context.gpu, "torch.compile"
    if gpu is None and (context.is_smoke or config.torch_compile is None):
        return False, hardware_decision(name, "off", "no GPU: compiling takes longer than it saves")
    if gpu is not None and gpu.compute_capability < (7, 0):
        return False, hardware_decision(name, "off", f"{gpu.title} is too old: Triton needs compute capability 7.0")
    if config.torch_compile is not None:
        state = "on" if config.torch_compile else "off"
        return config.torch_compile, manifest_decision(name, state, "torch_compile in the manifest")
    assert gpu is not None
    if context.base.experts is not None:
        reason = (
            "mixtures of experts run transformers' own code, not measured compiled; torch_compile: true requests it"
        )
        return False, plan_decision(name, "off", reason)
    if gpu.compute_capability < (8, 0):
        reason = f"not measured on GPUs before Ampere, such as {gpu.title}; torch_compile: true requests it"
        return False, hardware_decision(name, "off", reason)
    if compiled.layout is not None and not _is_measured(compiled.inputs, compiled.layout):
        return False, plan_decision(name, "off", NOT_MEASURED_UNDER_ZERO3)
    if compiled.layout is None and eager.layout is not None:
        return False, plan_decision(name, "off", "the training fits only without it")
    if eager.layout is None and compiled.layout is not None:
        return True, plan_decision(name, "on", "the training fits only with it: compiled layers save fewer activations")
    saved, takes = _saved_seconds(context, eager, compiled), compile_seconds(compiled.inputs.workload)
    if saved is None:
        return True, plan_decision(name, "on", "fuses the kernels between matmuls")
    if saved < takes:
        reason = f"saves {format_duration(max(0, saved))} in this run, but compiling takes {format_duration(takes)}"
        return False, plan_decision(name, "off", reason)
    return True, plan_decision(
        name, "on", f"fuses the kernels between matmuls, which saves about {format_duration(saved)}"
    )


def _is_measured(inputs: SearchInputs, layout: Layout) -> bool:
    return is_compile_measured(layout.strategy, layout.offload, inputs.workload.quantization)


def is_compile_measured(strategy: Strategy, offload: Offload, quantization: Quantization) -> bool:
    """Return whether compiled layers were measured with these settings on a GPU; a manifest may request them anyway."""
    return strategy != "zero3" or (offload == "none" and quantization == "none")


def compile_seconds(workload: Workload) -> float:
    """Return the estimated compile time."""
    return _FUSED_COMPILE_SECONDS if workload.fused else _COMPILE_SECONDS


def _saved_seconds(context: PlanContext, eager: Searched, compiled: Searched) -> float | None:
    """Return the seconds that torch.compile saves in the run, compile time not included; None if unknown."""
    num_steps, gpu = estimate_run_length(context).num_steps, context.gpu
    is_known = gpu is not None and estimate_seconds_per_token(gpu, compiled.inputs.workload) is not None
    if num_steps is None or not is_known or eager.layout is None or compiled.layout is None:
        return None
    eager_seconds = estimate_step_seconds(eager.inputs, eager.layout)
    return num_steps * (eager_seconds - estimate_step_seconds(compiled.inputs, compiled.layout))


def make_compile_plan(
    context: PlanContext, workload: Workload, layout: Layout, *, captures: bool
) -> tuple[CompilePlan | None, list[Decision]]:
    """Return how to compile, and the decisions: per layer, or the whole model if kernel launches limit a long run."""
    config = context.config
    if not workload.compiled:
        keys = [key for key in ("torch_compile_backend", "torch_compile_mode") if getattr(config, key) is not None]
        if context.gpu is None or config.torch_compile_mode == "reduce-overhead" or not keys:
            return None, []
        reason = f"{' and '.join(keys)} in the manifest; torch.compile is off, and torch_compile true requests it"
        return None, [manifest_decision("compile options", "not used", reason)]
    scope: CompileScope = "layer"
    reason = "one compiled graph serves all layers; a CUDA graph launches the kernels"
    if not captures:
        scope, reason = _decide_scope(context, replace(workload, checkpointing=layout.checkpointing), layout)
    mode, remark = _decide_mode(config.torch_compile_mode)
    plan = CompilePlan(scope=scope, backend=config.torch_compile_backend or "inductor", mode=mode)
    target = "each layer" if scope == "layer" else "the model"
    options = f"{plan.backend}, mode {plan.mode or 'default'}"
    return plan, [plan_decision("compile scope", f"{target} ({options})", reason + remark)]


def _decide_mode(mode: str | None) -> tuple[str | None, str]:
    """Return the compile mode, without torch's CUDA graphs (they overwrite layer outputs too early), and a remark."""
    if mode == "reduce-overhead":
        return None, "; reduce-overhead: see CUDA graph"
    if mode == "max-autotune":
        return "max-autotune-no-cudagraphs", "; without torch's CUDA graphs, which overwrite outputs too early"
    return (None if mode == "default" else mode), ""


def _decide_scope(context: PlanContext, workload: Workload, layout: Layout) -> tuple[CompileScope, str]:
    if layout.strategy in SHARDED_STRATEGIES:
        return "layer", f"{layout.strategy} gathers and frees each layer separately"
    if layout.checkpointing != "none":
        return "layer", "each layer is checkpointed separately"
    per_token = estimate_seconds_per_token(context.gpu, workload) if context.gpu else None
    tokens = layout.micro_batch_size * estimate_slot_tokens(context)
    launching = estimate_launch_seconds(workload)
    if per_token is None or tokens * per_token >= launching:
        return "layer", "one graph serves all layers, so compiling is quick; kernel launches are not the bottleneck"
    model_seconds = _MODEL_COMPILE_SECONDS_PER_LAYER * workload.shape.num_layers
    slots = ceil(context.config.global_batch_size / context.num_ranks / layout.micro_batch_size)
    num_steps = estimate_run_length(context).num_steps
    saved = None if num_steps is None else num_steps * slots * launching * _MODEL_COMPILE_SAVING
    if saved is not None and saved < model_seconds:
        seconds = f"{format_duration(model_seconds)} to compile and saves {format_duration(saved)}"
        return "layer", f"kernel launches limit these short micro-steps, but one graph of all layers takes {seconds}"
    return "model", "micro-steps are so short that kernel launches limit them: one graph of all layers"


def decide_cuda_graph(
    context: PlanContext, settings: ModelSettings, inputs: SearchInputs, layout: Layout
) -> tuple[bool, list[Decision]]:
    """Return whether micro-steps run as a CUDA graph: on one GPU, or on DDP replicas of an adapter.

    Manifests request it with torch_compile_mode reduce-overhead; any other mode switches it off.
    """
    if context.gpu is None:
        return False, []
    name = "CUDA graph"
    is_requested = context.config.torch_compile_mode == "reduce-overhead"
    if not uses_cuda_graph(inputs, layout):
        if is_requested:
            return False, [hardware_decision(name, "off", _find_graph_obstacle(context, settings, layout))]
        reason = "torch_compile_mode in the manifest: only reduce-overhead allows one"
        return False, [manifest_decision(name, "off", reason)] if context.config.torch_compile_mode else []
    if is_requested:
        return True, [manifest_decision(name, "on", "reduce-overhead in the manifest: one graph per micro-step")]
    if is_launch_bound(inputs, layout):
        reason = "micro-steps are so short that kernel launches would limit them"
    else:
        reason = "no gaps between kernels"
        if layout.strategy == "ddp":
            reason += "; the adapter's gradients are all-reduced after it"
    return True, [plan_decision(name, "on", reason)]


def _find_graph_obstacle(context: PlanContext, settings: ModelSettings, layout: Layout) -> str:
    if layout.strategy != "single" and (layout.strategy != "ddp" or settings.adapter.kind == "full"):
        return f"{layout.strategy} communicates between kernels"
    if layout.offload != "none":
        return "offloading synchronizes with the host"
    return find_cuda_graph_obstacle(context, settings) or "not enough free memory for the graph's private memory pool"
