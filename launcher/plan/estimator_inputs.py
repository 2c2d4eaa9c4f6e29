"""Inputs of the memory and step-time estimates, taken from a finished plan."""

from __future__ import annotations

from launcher.plan.estimate.memory import MemoryEstimate, estimate_memory
from launcher.plan.estimate.memory.recipe import Recipe, fuses_mlp
from launcher.plan.estimate.step_time import Workload
from launcher.plan.model import Plan


def recipe_from_plan(plan: Plan) -> Recipe:
    """Return the inputs of the memory estimate."""
    return Recipe(
        adapter=plan.adapter.kind,
        rank=plan.adapter.rank,
        target_modules=plan.adapter.target_modules,
        target_parameters=plan.adapter.target_parameters,
        modules_to_save=plan.adapter.modules_to_save,
        adapter_dropout=plan.adapter.dropout,
        quantization=plan.quantization_kind,
        compute_dtype=plan.precision.compute_dtype,
        base_dtype=plan.precision.base_dtype,
        trainable_dtype=plan.precision.trainable_dtype,
        fp8_base=plan.precision.fp8_base,
        optimizer=plan.optimizer.name,
        optimizer_in_bwd=plan.optimizer.in_backward,
        checkpointing=plan.checkpointing,
        compiled=plan.compile is not None,
        loss_kernel=plan.loss_kernel,
        attention=plan.attention.backend,
        sequence_length=plan.batch.sequence_length,
        micro_batch_size=plan.batch.micro_batch_size,
        # a CUDA graph keeps gradients alive during the forward pass, as gradient accumulation does
        accumulates_gradients=plan.batch.gradient_accumulation_steps > 1 or plan.cuda_graph,
        graphed=plan.cuda_graph,
        strategy=plan.strategy,
        offload=plan.offload,
        num_ranks=plan.batch.num_ranks,
        on_gpu=plan.hardware.gpu is not None,
        has_kernels=plan.hardware.gpu is None or plan.hardware.gpu.has_kernels,
    )


def workload_from_plan(plan: Plan, document_tokens: float) -> Workload:
    """Return the inputs of the step-time estimate; `document_tokens` is the mean document length in the data."""
    return Workload(
        shape=plan.base,
        adapter=plan.adapter.kind,
        quantization=plan.quantization_kind,
        compute_dtype=plan.precision.compute_dtype,
        fp8_base=plan.precision.fp8_base,
        compiled=plan.compile is not None,
        checkpointing=plan.checkpointing,
        document_tokens=document_tokens,
        repeated_modules=plan.adapter.repeated_modules,
        has_dropout=plan.adapter.dropout > 0,
        fused=fuses_mlp(plan.base, recipe_from_plan(plan)),
    )


def estimate_plan_memory(plan: Plan) -> MemoryEstimate:
    """Return the memory estimate of a plan, without calibration by measured runs."""
    return estimate_memory(plan.base, recipe_from_plan(plan))
