"""Whether a micro-step is launched as one CUDA graph."""

from __future__ import annotations

from launcher.plan.basics import Basics
from launcher.plan.fit import Layout, estimate, is_launch_bound
from launcher.plan.model import Decision
from launcher.plan.situation import Situation, asked, decided, forced
from launcher.plan.sizing import Sizing

_MOST_OF_CARD = 0.85  # what a graph records in stays its own: an evaluation needs room beside it
_NAME = "CUDA graph"


def decide_graph(situation: Situation, basics: Basics, sizing: Sizing, layout: Layout) -> tuple[bool, list[Decision]]:
    """For one GPU. Manifests ask for it as torch.compile's mode reduce-overhead, and against it by any other mode."""
    if situation.gpu is None:
        return False, []
    wanted = situation.config.torch_compile_mode
    unable = _why_not(situation, basics, sizing, layout)
    if unable:
        return False, [forced(_NAME, "off", unable)] if wanted == "reduce-overhead" else []
    if wanted == "reduce-overhead":
        return True, [asked(_NAME, "on", "reduce-overhead in the manifest: the whole micro-step is one graph")]
    if wanted is not None:
        return False, []
    why = "no gaps between kernels: 4 % on an H200 where they are large"
    if is_launch_bound(sizing, layout):
        why = "micro-steps are so short that launching their kernels would be the limit"
    return True, [decided(_NAME, "on", why)]


def _why_not(situation: Situation, basics: Basics, sizing: Sizing, layout: Layout) -> str:
    if layout.strategy != "single":
        return f"{layout.strategy} exchanges between kernels"
    if basics.attention.backend in ("flex", "sdpa", "eager"):
        return f"attention by {basics.attention.backend} has another shape in each micro-batch"
    if basics.loss_kernel != "fused" or basics.precision.loss_scaling or layout.offload != "none":
        return "what is computed waits for the host"
    if basics.quantization_kind == "int8":
        return "8-bit products wait for the host"
    if not situation.config.packing:
        return "rows that are not packed have many shapes"
    if estimate(sizing, layout).total_bytes > _MOST_OF_CARD * sizing.budget.card_bytes:
        return "its memory stays its own, and there is not enough beside it"
    return ""
