"""Whether a micro-step is launched as one CUDA graph."""

from __future__ import annotations

from launcher.plan.basics import Basics
from launcher.plan.fit import Layout, is_captured, is_launch_bound
from launcher.plan.model import Decision
from launcher.plan.situation import Situation, asked, decided, forced
from launcher.plan.sizing import Sizing, why_not_captured

_NAME = "CUDA graph"


def decide_graph(situation: Situation, basics: Basics, sizing: Sizing, layout: Layout) -> tuple[bool, list[Decision]]:
    """For one GPU, or replicas of an adapter. Manifests ask for it as torch.compile's mode reduce-overhead, and against
    it by any other mode."""
    if situation.gpu is None:
        return False, []
    wanted = situation.config.torch_compile_mode
    if not is_captured(sizing, layout):
        why = _why_not(situation, basics, layout)
        return False, [forced(_NAME, "off", why)] if wanted == "reduce-overhead" else []
    if wanted == "reduce-overhead":
        return True, [asked(_NAME, "on", "reduce-overhead in the manifest: the whole micro-step is one graph")]
    why = "no gaps between kernels"
    if layout.strategy == "ddp":
        why += "; the adapter's gradients are exchanged behind it"
    if is_launch_bound(sizing, layout):
        why = "micro-steps are so short that launching their kernels would be the limit"
    return True, [decided(_NAME, "on", why)]


def _why_not(situation: Situation, basics: Basics, layout: Layout) -> str:
    if layout.strategy != "single" and (layout.strategy != "ddp" or basics.adapter.kind == "full"):
        return f"{layout.strategy} exchanges between kernels"
    if layout.offload != "none":
        return "what is computed waits for the host"
    why = why_not_captured(situation, basics)
    return why or "its memory stays its own, and there is not enough beside it"
