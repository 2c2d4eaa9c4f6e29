"""What a person should know beside the decisions: limits of the card, waste, better ways that were not asked for."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.gpus import format_limits
from launcher.plan.advice import fits_quantised, on_hardware, whole_candidates
from launcher.plan.fit import Layout, best_layout, step_parts, step_seconds
from launcher.plan.situation import Situation
from launcher.plan.sizing import Sizing
from launcher.units import format_gib

# Below this share of a step nobody needs to be told that links are waited for.
_WORTH_TELLING = 0.1
_COPIES = 3  # of what is trained, in FP32, gathered for a checkpoint: weights and two states
_MUCH = 0.5  # of a node's CPU memory


def make_notes(situation: Situation, sizing: Sizing, layout: Layout) -> Iterator[str]:
    ranks, batch = situation.num_ranks, situation.config.global_batch_size
    if ranks > batch:
        yield f"{ranks - batch} of {ranks} GPUs have nothing to do: the global batch has {batch} sequences"
    faster = _fewer_ranks(sizing, layout)
    if faster is not None:
        yield faster
    if layout.offload != "none" and fits_quantised(sizing):
        yield "with base_models[0].quantization int4 it would fit without offloading, and train many times faster"
    if situation.gpu is not None:
        limits = format_limits(situation.gpu, is_alone=ranks == 1)
        if limits:
            yield f"{situation.gpu.title}: {'; '.join(limits)}"
    if situation.base.basis == "approximate":
        yield (
            f"{situation.base.model_type} is not an architecture this launcher knows: read as llama's, "
            "so parameters and memory are approximate"
        )
    snapshot = int(_COPIES * sizing.gradient_bytes)
    if situation.gpu is not None and snapshot > _MUCH * sizing.budget.host_bytes:
        yield (
            f"a checkpoint takes {format_gib(snapshot)} of CPU memory on the first rank, its node has "
            f"{format_gib(sizing.budget.host_bytes)}: saving may end the run"
        )
    failed = situation.options.failed_bytes
    if failed is not None:
        yield (
            f"a run like this one was predicted to need {format_gib(failed)} and ran out of memory here "
            f"({situation.options.failed_when}): this plan stays below"
        )
    if len(situation.manifest.base_models) > 1:
        others = ", ".join(entry.name for entry in situation.manifest.base_models[1:])
        yield f"the manifest has further base models ({others}); --base picks one"


def _fewer_ranks(sizing: Sizing, layout: Layout) -> str | None:
    """Where links are the limit, fewer GPUs may finish sooner: a note, since the user asked for these."""
    seconds = step_seconds(sizing, layout)
    _, waiting = step_parts(sizing, layout)
    hardware = sizing.hardware
    if hardware.num_ranks == 1 or waiting < _WORTH_TELLING * seconds:
        return None
    fewer = [(hardware.gpus_per_node, nodes) for nodes in range(hardware.nodes - 1, 0, -1)]
    fewer += [(gpus, 1) for gpus in (4, 2, 1) if gpus < hardware.gpus_per_node]
    best: tuple[float, str] | None = None
    for gpus, nodes in fewer:
        smaller = on_hardware(sizing, hardware.model_copy(update={"gpus_per_node": gpus, "nodes": nodes}))
        found = best_layout(smaller, whole_candidates(smaller))
        if found is not None:
            estimate = step_seconds(smaller, found)
            if estimate < 0.9 * min(seconds, best[0] if best else seconds):
                best = (estimate, f"{gpus} GPUs" if nodes == 1 else f"{nodes} nodes of {gpus} GPUs")
    return None if best is None else f"{best[1]} would finish sooner: {best[0]:.2f} s a step, not {seconds:.2f}"
