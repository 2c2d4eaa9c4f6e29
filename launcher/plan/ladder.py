"""The OOM ladder: what to give up next, in order, each rung with the same global batch and less memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from launcher.plan.fit import Layout, accumulation_steps, estimate, fits_host
from launcher.plan.model import Rung
from launcher.plan.sizing import LEVELS, Sizing
from launcher.plan.strategy import TITLES, Candidate


def make_ladder(sizing: Sizing, layout: Layout, candidates: tuple[Candidate, ...]) -> tuple[Rung, ...]:
    rungs: list[Rung] = []
    lowest = estimate(sizing, layout).total_bytes
    for action, lower in _steps_down(layout, candidates):
        memory = estimate(sizing, lower, cautious=True)
        predicted = memory.total_bytes
        if predicted >= lowest or not fits_host(sizing, memory):
            continue
        lowest = predicted
        rungs.append(
            Rung(
                action=action,
                micro_batch_size=lower.micro_batch_size,
                gradient_accumulation_steps=accumulation_steps(sizing, lower),
                checkpointing=lower.checkpointing,
                strategy=lower.strategy,
                offload=lower.offload,
                predicted_bytes=predicted,
            )
        )
    return tuple(rungs)


def _steps_down(layout: Layout, candidates: tuple[Candidate, ...]) -> Iterator[tuple[str, Layout]]:
    while layout.micro_batch_size > 1:
        layout = replace(layout, micro_batch_size=layout.micro_batch_size // 2)
        yield f"micro-batch {layout.micro_batch_size}", layout
    for level in LEVELS[LEVELS.index(layout.checkpointing) + 1 :]:
        layout = replace(layout, checkpointing=level)
        yield f"gradient checkpointing: {level}", layout
    here = (layout.strategy, layout.offload)
    later = candidates[candidates.index(here) + 1 :] if here in candidates else ()
    for strategy, offload in later:
        moved = "" if offload == "none" else f" with {offload.replace('_', ' ')} on the CPU"
        yield f"{TITLES[strategy]}{moved}", replace(layout, strategy=strategy, offload=offload)
