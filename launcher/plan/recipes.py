"""What a plan's estimates of memory and speed are made from, read back from the plan, at the sizes that were chosen."""

from __future__ import annotations

from launcher.memory import MemoryEstimate, Recipe, estimate_memory, joins_mlp
from launcher.plan.model import Plan
from launcher.speed import Workload


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
        sequence_length=plan.batch.sequence_length,
        micro_batch_size=plan.batch.micro_batch_size,
        # a graph's gradients live beside all activations, as where they accumulate
        accumulates_gradients=plan.batch.gradient_accumulation_steps > 1 or plan.cuda_graph,
        graphed=plan.cuda_graph,
        strategy=plan.strategy,
        offload=plan.offload,
        num_ranks=plan.batch.num_ranks,
        on_gpu=plan.hardware.gpu is not None,
        has_kernels=plan.hardware.gpu is None or plan.hardware.gpu.has_kernels,
    )


def workload_of(plan: Plan, document_tokens: float) -> Workload:
    """`document_tokens`: over which attention reaches, on average; only the data can tell."""
    return Workload(
        shape=plan.base,
        adapter=plan.adapter.kind,
        quantization=plan.quantization_kind,
        compute_dtype=plan.precision.compute_dtype,
        compiled=plan.compile is not None,
        checkpointing=plan.checkpointing,
        document_tokens=document_tokens,
        repeated=plan.adapter.repeated_modules,
        drops=plan.adapter.dropout > 0,
        joined=joins_mlp(plan.base, recipe_of(plan)),
    )


def estimate_plan(plan: Plan) -> MemoryEstimate:
    """As any machine would estimate it: without what runs of this one have taught."""
    return estimate_memory(plan.base, recipe_of(plan))
