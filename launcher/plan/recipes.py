"""A plan's memory recipe, read back from the plan: what its estimate was made from, at the sizes that were chosen."""

from __future__ import annotations

from launcher.memory import MemoryEstimate, Recipe, estimate_memory
from launcher.plan.model import Plan


def recipe_of(plan: Plan) -> Recipe:
    return Recipe(
        adapter=plan.adapter.kind,
        rank=plan.adapter.rank,
        target_modules=plan.adapter.target_modules,
        adapter_dropout=plan.adapter.dropout,
        quantization=plan.quantization_kind,
        compute_dtype=plan.precision.compute_dtype,
        base_dtype=plan.precision.base_dtype,
        trainable_dtype=plan.precision.trainable_dtype,
        optimizer=plan.optimizer.name,
        checkpointing=plan.checkpointing,
        compiled=plan.compile is not None,
        loss_kernel=plan.loss_kernel,
        attention=plan.attention.backend,
        packed=True,  # rows lie end to end, packed or not; at worst all are of full length
        sequence_length=plan.batch.sequence_length,
        micro_batch_size=plan.batch.micro_batch_size,
        # a graph's gradients live beside all activations, as where they accumulate
        accumulates_gradients=plan.batch.gradient_accumulation_steps > 1 or plan.cuda_graph,
        strategy=plan.strategy,
        offload=plan.offload,
        num_ranks=plan.batch.num_ranks,
        on_gpu=plan.hardware.gpu is not None,
    )


def estimate_plan(plan: Plan) -> MemoryEstimate:
    """As any machine would estimate it: without what runs of this one have taught."""
    return estimate_memory(plan.base, recipe_of(plan))
