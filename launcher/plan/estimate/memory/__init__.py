"""Estimate of the peak memory of one rank, term by term, from shapes alone; it needs neither torch nor a GPU."""

from launcher.plan.estimate.memory.estimate import (
    CONTEXT_BYTES,
    MemoryEstimate,
    MemoryTerm,
    count_allocated,
    estimate_memory,
)
from launcher.plan.estimate.memory.recipe import (
    FUSED_FAMILIES,
    FUSED_HEAD_DIMS,
    FUSED_QKV_FAMILIES,
    SELECTIVE_MIN_INNER,
    SHARED_INPUTS,
    Recipe,
    count_fused_ranks,
    count_loss_chunk,
    count_new_rows,
    count_saved,
    count_trainable,
    explain_layer_path,
    fuses_mlp,
    select_stacks,
)

__all__ = [
    "CONTEXT_BYTES",
    "FUSED_FAMILIES",
    "FUSED_HEAD_DIMS",
    "FUSED_QKV_FAMILIES",
    "SELECTIVE_MIN_INNER",
    "SHARED_INPUTS",
    "MemoryEstimate",
    "MemoryTerm",
    "Recipe",
    "count_allocated",
    "count_fused_ranks",
    "count_loss_chunk",
    "count_new_rows",
    "count_saved",
    "count_trainable",
    "estimate_memory",
    "explain_layer_path",
    "fuses_mlp",
    "select_stacks",
]
