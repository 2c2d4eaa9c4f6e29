"""Predicts the peak memory of one rank, term by term, from shapes alone. Pure: no torch, no GPU."""

from launcher.memory.estimate import CONTEXT_BYTES, MemoryEstimate, MemoryTerm, estimate_memory
from launcher.memory.recipe import SELECTIVE_MIN_INNER, Recipe, count_loss_chunk, count_trainable

__all__ = [
    "CONTEXT_BYTES",
    "SELECTIVE_MIN_INNER",
    "MemoryEstimate",
    "MemoryTerm",
    "Recipe",
    "count_loss_chunk",
    "count_trainable",
    "estimate_memory",
]
