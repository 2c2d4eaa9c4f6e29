"""Choice whether micro-steps are replayed as a CUDA graph."""

from __future__ import annotations

from launcher.plan.context import PlanContext, hardware_decision, manifest_decision, plan_decision
from launcher.plan.dtype_and_kernels import ModelSettings
from launcher.plan.memory_budget import SearchInputs, find_cuda_graph_obstacle
from launcher.plan.model import Decision
from launcher.plan.search import Layout, is_launch_bound, uses_cuda_graph

_NAME = "CUDA graph"


def decide_cuda_graph(
    context: PlanContext, settings: ModelSettings, inputs: SearchInputs, layout: Layout
) -> tuple[bool, list[Decision]]:
    """Return whether micro-steps run as a CUDA graph: on one GPU, or on DDP replicas of an adapter.

    Manifests request it with torch_compile_mode reduce-overhead; any other mode switches it off.
    """
    if context.gpu is None:
        return False, []
    is_requested = context.config.torch_compile_mode == "reduce-overhead"
    if not uses_cuda_graph(inputs, layout):
        obstacle = _find_obstacle(context, settings, layout)
        return False, [hardware_decision(_NAME, "off", obstacle)] if is_requested else []
    if is_requested:
        return True, [manifest_decision(_NAME, "on", "reduce-overhead in the manifest: one graph per micro-step")]
    if is_launch_bound(inputs, layout):
        reason = "micro-steps are so short that kernel launches would limit them"
    else:
        reason = "no gaps between kernels"
        if layout.strategy == "ddp":
            reason += "; the adapter's gradients are all-reduced after it"
    return True, [plan_decision(_NAME, "on", reason)]


def _find_obstacle(context: PlanContext, settings: ModelSettings, layout: Layout) -> str:
    if layout.strategy != "single" and (layout.strategy != "ddp" or settings.adapter.kind == "full"):
        return f"{layout.strategy} communicates between kernels"
    if layout.offload != "none":
        return "offloading synchronizes with the host"
    return find_cuda_graph_obstacle(context, settings) or "not enough free memory for the graph's private memory pool"
