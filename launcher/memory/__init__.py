"""Predicts the peak memory of one rank, term by term, from shapes alone. Pure: no torch, no GPU."""

from launcher.memory.estimate import CONTEXT_BYTES, MemoryEstimate, MemoryTerm, count_allocated, estimate_memory
from launcher.memory.recipe import (
    JOINED_FAMILIES,
    JOINED_HEADS,
    SELECTIVE_MIN_INNER,
    SHARED_INPUTS,
    Recipe,
    count_block_ranks,
    count_loss_chunk,
    count_trainable,
    joins_mlp,
)

__all__ = [
    "CONTEXT_BYTES",
    "JOINED_FAMILIES",
    "JOINED_HEADS",
    "SELECTIVE_MIN_INNER",
    "SHARED_INPUTS",
    "MemoryEstimate",
    "MemoryTerm",
    "Recipe",
    "count_allocated",
    "count_block_ranks",
    "count_loss_chunk",
    "count_trainable",
    "estimate_memory",
    "joins_mlp",
]
