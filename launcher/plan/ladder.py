"""The OOM ladder: what to give up next, in order, each rung with the same global batch and less memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from launcher.choices import SHARDED_STRATEGIES
from launcher.memory import MemoryTerm
from launcher.plan.fit import Layout, accumulation_steps, estimate, fits_host
from launcher.plan.model import CompilePlan, Decision, Plan, Rung
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


def take_rung(plan: Plan) -> Plan | None:
    """The plan one rung lower; None where the ladder ends. The global batch and the order of samples stay."""
    if not plan.ladder:
        return None
    rung, *lower = plan.ladder
    batch = plan.batch
    slots = rung.micro_batch_size * rung.gradient_accumulation_steps * batch.num_ranks
    changed = {
        "micro_batch_size": rung.micro_batch_size,
        "gradient_accumulation_steps": rung.gradient_accumulation_steps,
        "empty_slots": slots - batch.global_batch_size,
        "eval_batch_size": min(batch.eval_batch_size, rung.micro_batch_size),
    }
    context = [term for term in plan.memory.terms if term.name == "context"]
    rest = rung.predicted_bytes - sum(term.num_bytes for term in context)
    total = MemoryTerm(name="all else", num_bytes=max(0, rest), note=f"as the ladder predicts it: {rung.action}")
    decision = Decision(
        name="out of memory", value=rung.action, reason="the memory was full with more", decided_by="hardware"
    )
    return plan.model_copy(
        update={
            "batch": batch.model_copy(update=changed),
            "checkpointing": rung.checkpointing,
            "compile": _compile_for(plan, rung),
            **(_for_partitions(plan) if rung.strategy == "zero3" else {}),
            "strategy": rung.strategy,
            "offload": rung.offload,
            "cuda_graph": plan.cuda_graph and rung.strategy in ("single", "ddp") and rung.offload == "none",
            "adds_up_behind": plan.adds_up_behind and rung.strategy == "ddp",
            "memory": plan.memory.model_copy(update={"terms": (total, *context)}),
            "ladder": tuple(lower),
            "decisions": (*plan.decisions, decision),
        }
    )


def _compile_for(plan: Plan, rung: Rung) -> CompilePlan | None:
    """Layers that are checkpointed or gathered one by one are compiled so."""
    if plan.compile is None or (rung.checkpointing == "none" and rung.strategy not in SHARDED_STRATEGIES):
        return plan.compile
    return plan.compile.model_copy(update={"scope": "layer"})


def _for_partitions(plan: Plan) -> dict[str, object]:
    """What a plan for ZeRO-3 has: 4-bit weights stored in the dtype of the others, and no compiled layers."""
    storage = plan.quantization
    if storage is not None and storage.kind == "int4":
        storage = storage.model_copy(update={"storage_dtype": plan.precision.compute_dtype})
    return {"quantization": storage, "compile": None}
