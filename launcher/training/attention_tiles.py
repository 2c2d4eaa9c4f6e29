"""How our own attention kernels (attention_kernels.py) are launched: tiles, and the tensors that they read by tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from launcher.training import attention_kernels as kernels


@dataclass(frozen=True, slots=True)
class Tile:
    rows: int  # tokens times the heads that share a key head
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    forward: Tile
    queries: Tile  # their gradients
    keys: Tile  # those of keys and values


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """What a family does to its scores."""

    scale: float
    softcap: float | None = None
    window: int | None = None  # tokens looked back at, itself among them


class Heads:
    """Queries, keys and values, [tokens, heads, features] each; of each token where its document starts and ends."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, ends: Tensor, scores: Scores) -> None:
        self.query, self.key, self.value = query, key, value
        self.starts, self.ends, self.scores = starts, ends, scores
        self.num_tokens, self.num_heads, self.size = query.shape
        self.num_kv_heads = key.shape[1]
        self.group = self.num_heads // self.num_kv_heads
        self.padded = triton.next_power_of_2(self.group)

    def count_programs(self, tokens_per_tile: int) -> int:
        count: int = triton.cdiv(self.num_tokens, tokens_per_tile) * self.num_kv_heads
        return count

    def count_tokens(self, tile: Tile) -> int:
        return tile.rows // self.padded

    def rows_of(self, tensor: Tensor, tile: Tile) -> TensorDescriptor:
        """As tiles of rows are read: some tokens of the heads that share a key head."""
        return TensorDescriptor.from_tensor(tensor, [self.count_tokens(tile), self.padded, self.size])

    def keys_of(self, tensor: Tensor, tile: Tile) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor.flatten(1), [tile.keys, self.size])

    def arguments(self) -> tuple[int, int, float, float]:
        return self.num_tokens, self.num_kv_heads, self.scores.scale, self.scores.softcap or 0.0

    def constants(self, tile: Tile) -> dict[str, int | bool]:
        return {
            "group": self.group,
            "padded": self.padded,
            "size": self.size,
            "rows": tile.rows,
            "keys": tile.keys,
            "window": self.scores.window or 0,
            "caps": self.scores.softcap is not None,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }


def attend(heads: Heads, tile: Tile) -> tuple[Tensor, Tensor]:
    """The output, and of each head of each token the logarithm of its sum, to the base of two."""
    query = heads.query
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    log_sums = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    kernels.attend[(heads.count_programs(heads.count_tokens(tile)),)](
        heads.rows_of(query, tile),
        heads.keys_of(heads.key, tile),
        heads.keys_of(heads.value, tile),
        out,
        log_sums,
        heads.starts,
        *heads.arguments(),
        **heads.constants(tile),
    )
    return out, log_sums


def find_query_gradients(
    heads: Heads, out: Tensor, grad: Tensor, log_sums: Tensor, tile: Tile
) -> tuple[Tensor, Tensor]:
    """And how far each output lies along its own gradient, which the keys' gradients need."""
    found = torch.empty(heads.query.shape, dtype=heads.query.dtype, device=grad.device)
    alongs = torch.empty_like(log_sums)
    kernels.attend_back_queries[(heads.count_programs(heads.count_tokens(tile)),)](
        heads.rows_of(heads.query, tile),
        heads.keys_of(heads.key, tile),
        heads.keys_of(heads.value, tile),
        heads.rows_of(out, tile),
        heads.rows_of(grad, tile),
        log_sums,
        alongs,
        found,
        heads.starts,
        *heads.arguments(),
        **heads.constants(tile),
    )
    return found, alongs


def find_key_gradients(
    heads: Heads, grad: Tensor, log_sums: Tensor, alongs: Tensor, tile: Tile
) -> tuple[Tensor, Tensor]:
    """Those of the values too."""
    of_keys = torch.empty(heads.key.shape, dtype=heads.key.dtype, device=grad.device)
    of_values = torch.empty(heads.value.shape, dtype=heads.value.dtype, device=grad.device)
    kernels.attend_back_keys[(heads.count_programs(tile.keys),)](
        heads.rows_of(heads.query, tile),
        heads.keys_of(heads.key, tile),
        heads.keys_of(heads.value, tile),
        heads.rows_of(grad, tile),
        log_sums,
        alongs,
        of_keys,
        of_values,
        heads.starts,
        heads.ends,
        *heads.arguments(),
        **heads.constants(tile),
    )
    return of_keys, of_values
