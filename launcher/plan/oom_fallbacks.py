"""OOM fallbacks: settings to retry with after CUDA out of memory. Each needs less memory; the global batch stays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from launcher.core.choices import SHARDED_STRATEGIES
from launcher.plan.estimate.memory import MemoryTerm
from launcher.plan.memory_budget import LEVELS, SearchInputs
from launcher.plan.model import CompilePlan, Decision, OomFallback, Plan
from launcher.plan.search import Layout, count_accumulation_steps, estimate_layout_memory, fits_host_memory
from launcher.plan.strategy import TITLES, Candidate
from launcher.plan.torch_compile import is_compile_measured


def make_oom_fallbacks(
    inputs: SearchInputs, layout: Layout, candidates: tuple[Candidate, ...]
) -> tuple[OomFallback, ...]:
    """Return the fallbacks in order; each is predicted to need less memory than the one before."""
    fallbacks: list[OomFallback] = []
    lowest = estimate_layout_memory(inputs, layout).total_bytes
    for action, lower in _iterate_layouts(layout, candidates, is_whole=inputs.recipe.optimizer_in_bwd):
        memory = estimate_layout_memory(inputs, lower, cautious=True)
        if memory.total_bytes >= lowest or not fits_host_memory(inputs, memory):
            continue
        lowest = memory.total_bytes
        fallbacks.append(
            OomFallback(
                action=action,
                micro_batch_size=lower.micro_batch_size,
                gradient_accumulation_steps=count_accumulation_steps(inputs, lower),
                checkpointing=lower.checkpointing,
                strategy=lower.strategy,
                offload=lower.offload,
                predicted_bytes=lowest,
            )
        )
    return tuple(fallbacks)


def _iterate_layouts(
    layout: Layout, candidates: tuple[Candidate, ...], *, is_whole: bool
) -> Iterator[tuple[str, Layout]]:
    """Yield each change to try and the layout after it, in order; with `is_whole`, the batch stays one micro-batch."""
    while layout.micro_batch_size > 1 and not is_whole:
        layout = replace(layout, micro_batch_size=layout.micro_batch_size // 2)
        yield f"micro-batch {layout.micro_batch_size}", layout
    for level in LEVELS[LEVELS.index(layout.checkpointing) + 1 :]:
        layout = replace(layout, checkpointing=level)
        yield f"gradient checkpointing: {level}", layout
    current = Candidate(layout.strategy, layout.offload)
    later = candidates[candidates.index(current) + 1 :] if current in candidates else ()
    for strategy, offload in later:
        moved = "" if offload == "none" else f" with {offload.replace('_', ' ')} on the CPU"
        yield f"{TITLES[strategy]}{moved}", replace(layout, strategy=strategy, offload=offload)


def apply_next_fallback(plan: Plan) -> Plan | None:
    """Return the plan with its next OOM fallback applied, or None if there is none left.

    The global batch and the order of samples do not change.
    """
    if not plan.oom_fallbacks:
        return None
    fallback, *remaining = plan.oom_fallbacks
    batch = plan.batch
    slots = fallback.micro_batch_size * fallback.gradient_accumulation_steps * batch.num_ranks
    changed = {
        "micro_batch_size": fallback.micro_batch_size,
        "gradient_accumulation_steps": fallback.gradient_accumulation_steps,
        "empty_slots": slots - batch.global_batch_size,
        "eval_batch_size": min(batch.eval_batch_size, fallback.micro_batch_size),
    }
    context = [term for term in plan.memory.terms if term.name == "context"]
    other = fallback.predicted_bytes - sum(term.num_bytes for term in context)
    total = MemoryTerm(name="other", num_bytes=max(0, other), note=f"predicted for the OOM fallback: {fallback.action}")
    decision = Decision(
        name="OOM fallback", value=fallback.action, reason="CUDA out of memory without it", decided_by="hardware"
    )
    is_replicated, quantization = fallback.strategy in ("single", "ddp"), plan.quantization
    return plan.model_copy(
        update={
            "batch": batch.model_copy(update=changed),
            "checkpointing": fallback.checkpointing,
            "compile": _restrict_compile(plan, fallback),
            "quantization": quantization and quantization.stored_for(fallback.strategy, plan.precision.compute_dtype),
            "strategy": fallback.strategy,
            "offload": fallback.offload,
            "cuda_graph": plan.cuda_graph and is_replicated and fallback.offload == "none",
            "defer_gradient_sync": plan.defer_gradient_sync and fallback.strategy == "ddp",
            "memory": plan.memory.model_copy(update={"terms": (total, *context)}),
            "oom_fallbacks": tuple(remaining),
            "decisions": (*plan.decisions, decision),
        }
    )


def _restrict_compile(plan: Plan, fallback: OomFallback) -> CompilePlan | None:
    """Return how a fallback compiles: per layer if layers are checkpointed or sharded; None if not measured."""
    is_same_engine = (fallback.strategy, fallback.offload) == (plan.strategy, plan.offload)
    if plan.compile is None:
        return None
    if not is_same_engine and not is_compile_measured(fallback.strategy, fallback.offload, plan.quantization_kind):
        return None
    if fallback.checkpointing == "none" and fallback.strategy not in SHARDED_STRATEGIES:
        return plan.compile
    return plan.compile.model_copy(update={"scope": "layer"})
