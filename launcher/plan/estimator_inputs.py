"""Inputs of the memory and step-time estimates: of a plan that is being made, and of a finished one."""

from __future__ import annotations

from dataclasses import replace

from launcher.base_models.shapes import ModelShape
from launcher.hardware.model import Hardware
from launcher.plan.dtype_and_kernels import ModelSettings
from launcher.plan.estimate.memory import MemoryEstimate, estimate_memory
from launcher.plan.estimate.memory.recipe import Recipe, fuses_mlp
from launcher.plan.estimate.step_time import Workload
from launcher.plan.model import Plan


def make_simplest_recipe(
    settings: ModelSettings | Plan, hardware: Hardware, sequence_length: int, *, compiled: bool
) -> Recipe:
    """Return the memory estimate's inputs for the simplest layout: strategy single, micro-batch 1, no checkpointing."""
    return Recipe(
        adapter=settings.adapter.kind,
        rank=settings.adapter.rank,
        target_modules=settings.adapter.target_modules,
        target_parameters=settings.adapter.target_parameters,
        modules_to_save=settings.adapter.modules_to_save,
        adapter_dropout=settings.adapter.dropout,
        quantization=settings.quantization_kind,
        compute_dtype=settings.precision.compute_dtype,
        base_dtype=settings.precision.base_dtype,
        trainable_dtype=settings.precision.trainable_dtype,
        fp8_base=settings.precision.fp8_base,
        fp8_layers=settings.precision.fp8_layers,
        optimizer=settings.optimizer.name,
        optimizer_in_bwd=settings.optimizer.in_backward,
        checkpointing="none",
        compiled=compiled,
        loss_kernel=settings.loss_kernel,
        attention=settings.attention.backend,
        sequence_length=sequence_length,
        micro_batch_size=1,
        strategy="single",
        offload="none",
        num_ranks=hardware.num_ranks,
        on_gpu=hardware.gpu is not None,
        has_kernels=hardware.gpu is None or hardware.gpu.has_kernels,
    )


def recipe_from_plan(plan: Plan) -> Recipe:
    """Return the inputs of the memory estimate of a finished plan."""
    smallest = make_simplest_recipe(plan, plan.hardware, plan.batch.sequence_length, compiled=plan.compile is not None)
    return replace(
        smallest,
        checkpointing=plan.checkpointing,
        micro_batch_size=plan.batch.micro_batch_size,
        # a CUDA graph keeps gradients alive during the forward pass, as gradient accumulation does
        accumulates_gradients=plan.batch.gradient_accumulation_steps > 1 or plan.cuda_graph,
        graphed=plan.cuda_graph,
        strategy=plan.strategy,
        offload=plan.offload,
        num_ranks=plan.hardware.gpus_per_node if plan.strategy == "hsdp" else plan.batch.num_ranks,
    )


def make_workload(shape: ModelShape, recipe: Recipe, document_tokens: float, trained_share: float = 1.0) -> Workload:
    """Return the inputs of the step-time estimate: those of the memory estimate, and two averages of the data."""
    has_dropout = recipe.adapter_dropout > 0
    return Workload(
        shape=shape,
        adapter=recipe.adapter,
        quantization=recipe.quantization,
        compute_dtype=recipe.compute_dtype,
        fp8_base=recipe.fp8_base,
        fp8_layers=recipe.fp8_layers,
        compiled=recipe.compiled,
        checkpointing=recipe.checkpointing,
        document_tokens=document_tokens,
        trained_share=trained_share,
        # DoRA applies its dropout to the base output as well
        repeated_modules=recipe.target_modules if recipe.adapter == "dora" and has_dropout else (),
        has_dropout=has_dropout,
        fused=fuses_mlp(shape, recipe),
    )


def workload_from_plan(plan: Plan, document_tokens: float, trained_share: float = 1.0) -> Workload:
    """Return the inputs of the step-time estimate of a plan."""
    return make_workload(plan.base, recipe_from_plan(plan), document_tokens, trained_share)


def estimate_plan_memory(plan: Plan) -> MemoryEstimate:
    """Return the memory estimate of a plan, without calibration by measured runs."""
    return estimate_memory(plan.base, recipe_from_plan(plan))
