"""Choice whether torch.compile pays off, and whether layers or the model are compiled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from launcher.core.choices import SHARDED_STRATEGIES, CompileScope
from launcher.core.units import format_duration
from launcher.hardware.model import Gpu
from launcher.plan.context import PlanContext, hardware_decision, manifest_decision, plan_decision
from launcher.plan.estimate.step_time import (
    Workload,
    estimate_launch_seconds,
    estimate_seconds_per_token,
    overlap_launch,
)
from launcher.plan.memory_budget import estimate_slot_tokens
from launcher.plan.model import CompilePlan, Decision
from launcher.plan.schedule import count_step_sequences
from launcher.plan.search import Layout

# 13 to 26 s measured with an H200 (cold cache, one graph for all layers); hosts of consumer GPUs are slower.
_COMPILE_SECONDS = 30.0
# Fused attention and MLP blocks leave less to compile: 13 to 18 s, about half of it for their own kernels.
_FUSED_COMPILE_SECONDS = 15.0
# Compiling all 28 layers of the 0.6B model as one graph took 159 s there, and made micro-steps of 2 x 2,048 tokens
# 15 % shorter.
_MODEL_COMPILE_SECONDS_PER_LAYER = 5.5
_MODEL_COMPILE_SAVING = 0.15


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileChoice:
    """Whether torch.compile is used, and the decision."""

    is_on: bool
    decision: Decision


def decide_compile(
    context: PlanContext, workload: Workload, num_steps: int | None, *, captures: bool = False
) -> CompileChoice:
    """Compare the run with and without torch.compile; `num_steps` is None if the number of rows is unknown.

    With a CUDA graph (`captures`), fewer kernels save no launch time.
    """
    config, gpu = context.config, context.gpu
    if gpu is None and (context.is_smoke or config.torch_compile is None):
        return _off(hardware_decision("torch.compile", "off", "no GPU: compiling takes longer than it saves"))
    if config.torch_compile is not None:
        state = "on" if config.torch_compile else "off"
        choice = manifest_decision("torch.compile", state, "torch_compile in the manifest")
        return CompileChoice(is_on=config.torch_compile, decision=choice)
    assert gpu is not None
    if context.base.experts is not None:
        return _off(plan_decision("torch.compile", "off", "mixtures of experts run by the code of transformers"))
    if gpu.compute_capability < (8, 0):
        return _off(hardware_decision("torch.compile", "off", f"{gpu.title}: fused kernels do not pay off on this GPU"))
    saved = _saved_seconds(context, gpu, workload, num_steps, captures=captures)
    if saved is None:
        return _on(plan_decision("torch.compile", "on", "fuses the kernels between matmuls"))
    takes = compile_seconds(workload)
    if saved < takes:
        reason = f"saves {format_duration(saved)} in this short run, but compiling takes {format_duration(takes)}"
        return _off(plan_decision("torch.compile", "off", reason))
    reason = f"fuses the kernels between matmuls, which saves about {format_duration(saved)}"
    return _on(plan_decision("torch.compile", "on", reason))


def compile_seconds(workload: Workload) -> float:
    """Return the estimated compile time."""
    return _FUSED_COMPILE_SECONDS if workload.fused else _COMPILE_SECONDS


def _saved_seconds(
    context: PlanContext, gpu: Gpu, workload: Workload, num_steps: int | None, *, captures: bool
) -> float | None:
    """Return the time saved, as if a step were one micro-step: the choice must not depend on the amount of memory."""
    if num_steps is None or estimate_seconds_per_token(gpu, workload) is None:
        return None
    slots = ceil(count_step_sequences(context) / context.num_ranks)
    tokens = slots * estimate_slot_tokens(context)
    eager, compiled = (
        overlap_launch(
            tokens * (estimate_seconds_per_token(gpu, way) or 0.0), 0.0 if captures else estimate_launch_seconds(way)
        )
        for way in (replace(workload, compiled=False), replace(workload, compiled=True))
    )
    return (eager - compiled) * num_steps


def _on(decision: Decision) -> CompileChoice:
    return CompileChoice(is_on=True, decision=decision)


def _off(decision: Decision) -> CompileChoice:
    return CompileChoice(is_on=False, decision=decision)


def disable_under_zero3(context: PlanContext, choice: CompileChoice, layout: Layout) -> CompileChoice:
    """Switch torch.compile off under ZeRO-3, which makes it compile every layer; unless the manifest requests it."""
    if layout.strategy != "zero3" or not choice.is_on or context.config.torch_compile is True:
        return choice
    reason = "ZeRO-3 compiles every layer separately: 139 s for the 28 layers of a 0.6B model on an H200"
    return _off(plan_decision("torch.compile", "off", reason))


def make_compile_plan(
    context: PlanContext, workload: Workload, layout: Layout, num_steps: int | None, *, captures: bool
) -> tuple[CompilePlan | None, list[Decision]]:
    """Compile per layer, unless launches limit a micro-step and the run is long enough for one graph of the model."""
    if not workload.compiled:
        return None, []
    config = context.config
    scope: CompileScope = "layer"
    reason = "one compiled graph serves all layers; a CUDA graph launches the kernels"
    if not captures:
        scope, reason = _decide_scope(context, replace(workload, checkpointing=layout.checkpointing), layout, num_steps)
    mode, remark = _decide_mode(config.torch_compile_mode)
    plan = CompilePlan(scope=scope, backend=config.torch_compile_backend or "inductor", mode=mode)
    target = "each layer" if scope == "layer" else "the model"
    options = f"{plan.backend}, mode {plan.mode or 'default'}"
    return plan, [plan_decision("compile scope", f"{target} ({options})", reason + remark)]


def _decide_mode(mode: str | None) -> tuple[str | None, str]:
    """Avoid torch's CUDA graphs, which overwrite a layer's outputs too early; our graph covers the full micro-step."""
    if mode == "reduce-overhead":
        return None, "; reduce-overhead: see CUDA graph"
    if mode == "max-autotune":
        return "max-autotune-no-cudagraphs", "; without torch's CUDA graphs, which overwrite outputs too early"
    return (None if mode == "default" else mode), ""


def _decide_scope(
    context: PlanContext, workload: Workload, layout: Layout, num_steps: int | None
) -> tuple[CompileScope, str]:
    if layout.strategy in SHARDED_STRATEGIES:
        return "layer", f"{layout.strategy} gathers and frees each layer separately"
    if layout.checkpointing != "none":
        return "layer", "each layer is checkpointed separately"
    per_token = estimate_seconds_per_token(context.gpu, workload) if context.gpu else None
    tokens = layout.micro_batch_size * estimate_slot_tokens(context)
    launching = estimate_launch_seconds(workload)
    if per_token is None or tokens * per_token >= launching:
        return "layer", "one graph serves all layers, so compiling is quick; launches are not the limit"
    model_seconds = _MODEL_COMPILE_SECONDS_PER_LAYER * workload.shape.num_layers
    slots = ceil(context.config.global_batch_size / context.num_ranks / layout.micro_batch_size)
    saved = None if num_steps is None else num_steps * slots * launching * _MODEL_COMPILE_SAVING
    if saved is not None and saved < model_seconds:
        seconds = f"{format_duration(model_seconds)} to compile and saves {format_duration(saved)}"
        return "layer", f"kernel launches limit these short micro-steps, but one graph of all layers takes {seconds}"
    return "model", "micro-steps are so short that kernel launches limit them: one graph of all layers"
