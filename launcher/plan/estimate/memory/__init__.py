"""Estimate of the peak memory of one rank, term by term, from shapes alone; it needs neither torch nor a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from launcher.base_models.shapes import ModelShape
from launcher.core.choices import DEEPSPEED_STRATEGIES, SHARDED_STRATEGIES, Strategy
from launcher.core.frozen_model import Frozen
from launcher.core.units import MIB
from launcher.plan.estimate.memory.recipe import Recipe, count_loss_chunk, fuses_lora, has_buckets, has_large_chunks
from launcher.plan.estimate.memory.static import estimate_static
from launcher.plan.estimate.memory.step import estimate_step_memory

_CUBLAS_BYTES = 64 * MIB  # two handles, forward and backward; identical in every measurement
_GRAPH_BYTES = 120 * MIB  # cuBLAS workspaces of two more streams, and a static batch; 113 to 125 MiB measured
CONTEXT_BYTES = 768 * MIB  # CUDA context and loaded kernels, 751 to 763 MiB measured


class MemoryTerm(Frozen):
    """One term of the peak memory."""

    name: str
    num_bytes: int
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Peak memory of one rank. Terms have a fixed order and include those of zero bytes."""

    terms: tuple[MemoryTerm, ...]
    host_bytes: int  # in CPU memory, per rank: offloaded state

    @property
    def total_bytes(self) -> int:
        """Sum of all terms."""
        return sum(term.num_bytes for term in self.terms)

    @property
    def allocated_bytes(self) -> int:
        """Bytes counted by torch's allocator."""
        return count_allocated(self.terms)


def count_allocated(terms: Iterable[MemoryTerm]) -> int:
    """Return the bytes that torch's allocator counts: everything except the CUDA context."""
    return sum(term.num_bytes for term in terms if term.name != "context")


@lru_cache(maxsize=4096)  # the search for the best plan repeats many of them
def estimate_memory(shape: ModelShape, recipe: Recipe) -> MemoryEstimate:
    """Estimate the peak memory of one rank in a steady training step: torch's allocations and the CUDA context.

    Not included: loading (quantization holds a matrix in full precision) and fragmentation of the allocator.
    """
    static = estimate_static(shape, recipe)
    updated = static.gradients + static.update if recipe.optimizer_in_bwd else 0.0
    activations, loss, transient = estimate_step_memory(shape, recipe, updated)
    gradients = 0.0 if recipe.optimizer_in_bwd else static.gradients
    if not recipe.accumulates_gradients and not recipe.optimizer_in_bwd:
        # one backward pass: gradients grow while activations are freed, so the peak holds the larger of the two
        kept = gradients / 2 if has_buckets(recipe) else 0.0  # the buckets are permanent
        gradients = kept + max(0.0, gradients - kept - activations - loss)
    workspace = transient + static.working_set
    if not recipe.optimizer_in_bwd:  # after the backward pass, the update has gradients and its own tensors only
        workspace = max(workspace, static.gradients - gradients + static.update - activations - loss)
    workspace += _CUBLAS_BYTES if recipe.on_gpu else 0
    workspace += _GRAPH_BYTES if recipe.graphed else 0
    approximate = "" if recipe.on_gpu else "; calibrated on GPUs, approximate on a CPU"
    sizes = (
        ("weights", static.weights, _describe_weights(recipe)),
        ("adapter", static.adapter, _describe_adapter(recipe) if static.adapter else "none"),
        ("gradients", gradients, "of the trainable parameters" + _describe_gradients(recipe)),
        ("optimizer", static.optimizer, _describe_optimizer(recipe)),
        ("activations", activations, f"checkpointing {recipe.checkpointing}{approximate}"),
        ("loss", loss, _describe_loss(shape, recipe)),
        ("workspace", workspace, "one layer's backward pass, library buffers, gathered and dequantized weights"),
        ("context", CONTEXT_BYTES if recipe.on_gpu else 0, "CUDA context and kernels" if recipe.on_gpu else "no GPU"),
    )
    terms = tuple(MemoryTerm(name=name, num_bytes=math.ceil(size), note=note) for name, size, note in sizes)
    return MemoryEstimate(terms=terms, host_bytes=math.ceil(static.host))


def _describe_weights(recipe: Recipe) -> str:
    if recipe.offload == "optimizer_and_parameters":
        return "in CPU memory"
    dtype = recipe.base_dtype
    if recipe.adapter == "full" and recipe.strategy in DEEPSPEED_STRATEGIES:
        dtype = recipe.compute_dtype  # the fp32 master weights count as optimizer state
    kind = {"none": dtype, "int4": "NF4, double quantization"}
    if recipe.fp8_base:
        return f"fp8, embeddings and head in {dtype}"
    return kind[recipe.quantization] + _describe_shards(recipe, SHARDED_STRATEGIES)


def _describe_adapter(recipe: Recipe) -> str:
    fused = f", and in {recipe.compute_dtype} inside the base's fused weights" if fuses_lora(recipe) else ""
    return f"trainable weights in {recipe.trainable_dtype}{fused}"


def _describe_optimizer(recipe: Recipe) -> str:
    if recipe.offload != "none" or recipe.optimizer == "paged_adamw_8bit":
        return "in CPU memory"
    return recipe.optimizer + _describe_shards(recipe, SHARDED_STRATEGIES | DEEPSPEED_STRATEGIES)


def _describe_gradients(recipe: Recipe) -> str:
    if recipe.optimizer_in_bwd:
        return ", one layer at a time: counted as workspace"
    if not recipe.accumulates_gradients:
        return ", only the part beyond the activations freed before"
    if has_buckets(recipe):
        return ", and DDP's buckets"
    return _describe_shards(recipe, SHARDED_STRATEGIES | {"zero2"})


def _describe_shards(recipe: Recipe, strategies: frozenset[Strategy]) -> str:
    return f", 1/{recipe.num_ranks} of them" if recipe.strategy in strategies and recipe.num_ranks > 1 else ""


def _describe_loss(shape: ModelShape, recipe: Recipe) -> str:
    positions = recipe.micro_batch_size * recipe.sequence_length
    if recipe.loss_kernel == "full_logits":
        return f"all logits of {positions:,} positions"
    chunk = count_loss_chunk(shape.vocab_size, is_large=has_large_chunks(shape, recipe))
    return f"{recipe.loss_kernel}, {min(positions, chunk):,} positions at a time"
