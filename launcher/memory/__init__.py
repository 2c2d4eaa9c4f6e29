"""Predicts the peak memory of one rank, term by term, from shapes alone. Pure: no torch, no GPU."""

from launcher.memory.estimate import MemoryEstimate, MemoryTerm, estimate_memory
from launcher.memory.recipe import CHUNKED_LOSS_TOKENS, SELECTIVE_MIN_INNER, Recipe, count_trainable

__all__ = [
    "CHUNKED_LOSS_TOKENS",
    "SELECTIVE_MIN_INNER",
    "MemoryEstimate",
    "MemoryTerm",
    "Recipe",
    "count_trainable",
    "estimate_memory",
]
