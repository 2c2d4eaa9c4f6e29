"""Whether torch.compile pays, and what is compiled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from launcher.choices import SHARDED_STRATEGIES, CompileScope
from launcher.hardware import Gpu
from launcher.plan.fit import Layout
from launcher.plan.model import CompilePlan, Decision
from launcher.plan.situation import Situation, asked, decided, forced
from launcher.plan.sizing import estimate_slot_tokens
from launcher.speed import Workload, host_seconds, launched_seconds, seconds_per_token
from launcher.units import format_duration

# 13 to 26 s measured on the host of an H200 (cold cache, one graph for all layers); hosts of consumer cards are slower.
_COMPILE_SECONDS = 30.0
# Joined halves leave the compiler little: 13 to 18 s, of which their own kernels, needed anyway, are about half.
_JOINED_COMPILE_SECONDS = 15.0
# All 28 layers of the 0.6B as one graph took 159 s there, and made micro-steps of 2 x 2,048 tokens 15 % shorter.
MODEL_COMPILE_SECONDS_PER_LAYER = 5.5
MODEL_SAVES = 0.15


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileChoice:
    is_on: bool
    decision: Decision


def decide_compile(
    situation: Situation, workload: Workload, num_steps: int | None, *, captures: bool = False
) -> CompileChoice:
    """Compare with and without over the whole run; `num_steps` is None where the number of rows is unknown.

    Where a CUDA graph launches all kernels at once, fewer of them save nothing by being fewer.
    """
    config, gpu = situation.config, situation.gpu
    if gpu is None and (situation.is_smoke or config.torch_compile is None):
        return _off(forced("torch.compile", "off", "no GPU: compiling would take longer than it saves"))
    if config.torch_compile is not None:
        state = "on" if config.torch_compile else "off"
        choice = asked("torch.compile", state, "torch_compile in the manifest")
        return CompileChoice(is_on=config.torch_compile, decision=choice)
    assert gpu is not None
    if gpu.compute_capability < (8, 0):
        return _off(forced("torch.compile", "off", f"{gpu.title}: its fused kernels are not worth compiling for"))
    saved = _saved_seconds(situation, gpu, workload, num_steps, captures=captures)
    if saved is None:
        return _on(decided("torch.compile", "on", "fuses what is between the matrix products"))
    takes = compile_seconds(workload)
    if saved < takes:
        reason = f"saves {format_duration(saved)} in this short run, compiling takes {format_duration(takes)}"
        return _off(decided("torch.compile", "off", reason))
    reason = f"fuses what is between the matrix products: saves about {format_duration(saved)}"
    return _on(decided("torch.compile", "on", reason))


def compile_seconds(workload: Workload) -> float:
    return _JOINED_COMPILE_SECONDS if workload.joined else _COMPILE_SECONDS


def _saved_seconds(
    situation: Situation, gpu: Gpu, workload: Workload, num_steps: int | None, *, captures: bool
) -> float | None:
    """As if a rank took all its slots at once: the answer must not depend on how much memory there is."""
    if num_steps is None or seconds_per_token(gpu, workload) is None:
        return None
    slots = ceil(situation.config.global_batch_size / situation.num_ranks)
    tokens = slots * estimate_slot_tokens(situation)
    eager, compiled = (
        launched_seconds(tokens * (seconds_per_token(gpu, way) or 0.0), 0.0 if captures else host_seconds(way))
        for way in (replace(workload, compiled=False), replace(workload, compiled=True))
    )
    return (eager - compiled) * num_steps


def _on(decision: Decision) -> CompileChoice:
    return CompileChoice(is_on=True, decision=decision)


def _off(decision: Decision) -> CompileChoice:
    return CompileChoice(is_on=False, decision=decision)


def without_partitions(situation: Situation, choice: CompileChoice, layout: Layout) -> CompileChoice:
    """ZeRO-3 puts other weights under each layer, so that each is compiled anew, unless the manifest insists."""
    if layout.strategy != "zero3" or not choice.is_on or situation.config.torch_compile is True:
        return choice
    why = "under ZeRO-3 every layer is compiled by itself: 139 s for the 28 layers of a 0.6B model on an H200"
    return _off(decided("torch.compile", "off", why))


def make_compile_plan(
    situation: Situation, workload: Workload, layout: Layout, num_steps: int | None, *, captures: bool
) -> tuple[CompilePlan | None, list[Decision]]:
    """One graph a layer, unless launching is what limits a micro-step, and the run long enough for one large graph."""
    if not workload.compiled:
        return None, []
    config = situation.config
    scope: CompileScope = "layer"
    why = "one graph serves all layers; launching is left to the CUDA graph"
    if not captures:
        scope, why = _decide_scope(situation, replace(workload, checkpointing=layout.checkpointing), layout, num_steps)
    mode, remark = _decide_mode(config.torch_compile_mode)
    plan = CompilePlan(scope=scope, backend=config.torch_compile_backend or "inductor", mode=mode)
    what = "each layer" if scope == "layer" else "the whole model"
    how = f"{plan.backend}, mode {plan.mode or 'default'}"
    return plan, [decided("compiled piece", f"{what} ({how})", why + remark)]


def _decide_mode(wanted: str | None) -> tuple[str | None, str]:
    """torch's CUDA graphs reuse memory of a layer's outputs while the next still need them: ours is one of all."""
    if wanted == "reduce-overhead":
        return None, "; reduce-overhead is about the CUDA graph: see there"
    if wanted == "max-autotune":
        return "max-autotune-no-cudagraphs", "; without torch's CUDA graphs, whose outputs are overwritten too early"
    return (None if wanted == "default" else wanted), ""


def _decide_scope(
    situation: Situation, workload: Workload, layout: Layout, num_steps: int | None
) -> tuple[CompileScope, str]:
    if layout.strategy in SHARDED_STRATEGIES:
        return "layer", f"{layout.strategy} gathers and frees each layer between graphs"
    if layout.checkpointing != "none":
        return "layer", "each layer is checkpointed by itself"
    per_token = seconds_per_token(situation.gpu, workload) if situation.gpu else None
    tokens = layout.micro_batch_size * estimate_slot_tokens(situation)
    launching = host_seconds(workload)
    if per_token is None or tokens * per_token >= launching:
        return "layer", "one graph serves all layers, so compiling is quick; the GPU is busy anyway"
    longer = MODEL_COMPILE_SECONDS_PER_LAYER * workload.shape.num_layers
    slots = ceil(situation.config.global_batch_size / situation.num_ranks / layout.micro_batch_size)
    saved = None if num_steps is None else num_steps * slots * launching * MODEL_SAVES
    if saved is not None and saved < longer:
        costs = f"one graph of all layers takes {format_duration(longer)} to compile and saves {format_duration(saved)}"
        return "layer", f"launching limits these short micro-steps, but {costs}"
    return "model", "micro-steps are so short here that launching them is the limit: one large graph"
