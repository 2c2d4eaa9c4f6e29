"""Causal attention over packed documents by our Triton kernels, as a custom op that torch.compile does not trace into.

Names follow FlashAttention-2. Tensors are [tokens, heads, head_dim]; `doc_starts` and `doc_ends` hold, per token, the
bounds of its document in `cu_seqlens`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from launcher.core.choices import OWN_GROUP, OWN_HEAD_SIZES
from launcher.training.kernels import varlen_attention_triton as kernels


@dataclass(frozen=True, slots=True)
class Tile:
    """Block sizes and launch options of one kernel."""

    block_m: int  # tokens times the query heads that share a KV head
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Tiles of the kernels for the output, for dQ, and for dK and dV."""

    forward: Tile
    dq: Tile
    dkdv: Tile


# Tuned by benchmarks/attention.py on an H200.
TILES: dict[int, Tiles] = {
    64: Tiles(forward=Tile(64, 32, 4, 3), dq=Tile(64, 64, 4, 3), dkdv=Tile(64, 64, 4, 2)),
    128: Tiles(forward=Tile(64, 32, 4, 3), dq=Tile(64, 64, 4, 3), dkdv=Tile(64, 64, 4, 2)),
    256: Tiles(forward=Tile(64, 32, 4, 3), dq=Tile(32, 64, 4, 2), dkdv=Tile(64, 64, 8, 2)),
}
SOFTCAP_DKDV = Tile(32, 64, 4, 3)  # with a softcap: a larger tile has no registers left for its derivative


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreOptions:
    """How a model transforms its attention scores."""

    sm_scale: float
    softcap: float | None = None
    window: int | None = None  # visible tokens, the query's own included


class AttentionInputs:
    """Q, K, V, document bounds and score options, with methods that turn them into arguments of the kernels."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        doc_starts: Tensor,
        doc_ends: Tensor,
        options: ScoreOptions,
        sinks: Tensor | None = None,
    ) -> None:
        self.q, self.k, self.v, self.sinks = q, k, v, sinks
        self.doc_starts, self.doc_ends, self.options = doc_starts, doc_ends, options
        self.num_tokens, self.num_heads, self.head_dim = q.shape
        self.num_kv_heads = k.shape[1]
        self.group = self.num_heads // self.num_kv_heads
        self.padded_group = triton.next_power_of_2(self.group)

    def count_programs(self, tokens_per_tile: int) -> int:
        """Return the grid size: one program per KV head and tile of `tokens_per_tile` tokens."""
        count: int = triton.cdiv(self.num_tokens, tokens_per_tile) * self.num_kv_heads
        return count

    def tokens_per_tile(self, tile: Tile) -> int:
        """Return the number of tokens in a query tile, whose rows are tokens times the query heads of one KV head."""
        return tile.block_m // self.padded_group

    def describe_q(self, tensor: Tensor, tile: Tile) -> TensorDescriptor:
        """Return the tensor descriptor of Q, O or dO; a tile is some tokens of the query heads that share a KV head."""
        return TensorDescriptor.from_tensor(tensor, [self.tokens_per_tile(tile), self.padded_group, self.head_dim])

    def describe_kv(self, tensor: Tensor, tile: Tile) -> TensorDescriptor:
        """Return the tensor descriptor of K or V; a tile is `block_n` tokens of one KV head."""
        return TensorDescriptor.from_tensor(tensor.flatten(1), [tile.block_n, self.head_dim])

    def arguments(self) -> tuple[int, int, float, float]:
        """Return the scalar arguments that the forward kernel and both backward kernels have in common."""
        return self.num_tokens, self.num_kv_heads, self.options.sm_scale, self.options.softcap or 0.0

    def constants(self, tile: Tile) -> dict[str, int | bool]:
        """Return the tl.constexpr arguments that the forward kernel and both backward kernels have in common."""
        return {
            "group": self.group,
            "padded_group": self.padded_group,
            "head_dim": self.head_dim,
            "block_m": tile.block_m,
            "block_n": tile.block_n,
            "window": self.options.window or 0,
            "has_softcap": self.options.softcap is not None,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }


def choose_tiles(inputs: AttentionInputs) -> Tiles:
    """Return the tiles tuned for the inputs' head_dim, and for softcapping if the model uses it."""
    tiles = TILES[inputs.head_dim]
    if inputs.options.softcap is None or inputs.head_dim > 128:
        return tiles
    return replace(tiles, dkdv=SOFTCAP_DKDV)


def compute_output(inputs: AttentionInputs, tile: Tile) -> tuple[Tensor, Tensor]:
    """Return the output and, per token and head, the log-sum-exp (base 2) of the scores."""
    q = inputs.q
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    kernels.attn_fwd[(inputs.count_programs(inputs.tokens_per_tile(tile)),)](
        inputs.describe_q(q, tile),
        inputs.describe_kv(inputs.k, tile),
        inputs.describe_kv(inputs.v, tile),
        o,
        lse,
        inputs.doc_starts,
        lse if inputs.sinks is None else inputs.sinks,
        *inputs.arguments(),
        **inputs.constants(tile),
        has_sinks=inputs.sinks is not None,
    )
    return o, lse


def compute_dq(inputs: AttentionInputs, o: Tensor, do: Tensor, lse: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """Return dQ and delta = rowsum(dO * O), which dK and dV need."""
    dq = torch.empty(inputs.q.shape, dtype=inputs.q.dtype, device=do.device)
    delta = torch.empty_like(lse)
    kernels.attn_bwd_dq[(inputs.count_programs(inputs.tokens_per_tile(tile)),)](
        inputs.describe_q(inputs.q, tile),
        inputs.describe_kv(inputs.k, tile),
        inputs.describe_kv(inputs.v, tile),
        inputs.describe_q(o, tile),
        inputs.describe_q(do, tile),
        lse,
        delta,
        dq,
        inputs.doc_starts,
        *inputs.arguments(),
        **inputs.constants(tile),
    )
    return dq, delta


def compute_dkdv(inputs: AttentionInputs, do: Tensor, lse: Tensor, delta: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """Return dK and dV."""
    dk = torch.empty(inputs.k.shape, dtype=inputs.k.dtype, device=do.device)
    dv = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=do.device)
    kernels.attn_bwd_dkdv[(inputs.count_programs(tile.block_n),)](
        inputs.describe_q(inputs.q, tile),
        inputs.describe_kv(inputs.k, tile),
        inputs.describe_kv(inputs.v, tile),
        inputs.describe_q(do, tile),
        lse,
        delta,
        dk,
        dv,
        inputs.doc_starts,
        inputs.doc_ends,
        *inputs.arguments(),
        **inputs.constants(tile),
    )
    return dk, dv


@torch.library.custom_op("launcher::varlen_attention", mutates_args=())
def _varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    doc_starts: Tensor,
    doc_ends: Tensor,
    sm_scale: float,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    options = ScoreOptions(sm_scale=sm_scale, softcap=softcap, window=window)
    q, k, v = _for_descriptor(q), _for_descriptor(k), _for_descriptor(v)
    inputs = AttentionInputs(q, k, v, doc_starts, doc_ends, options, sinks)
    return compute_output(inputs, choose_tiles(inputs).forward)


@_varlen_attention.register_fake
def _(q: Tensor, *_arguments: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("launcher::varlen_attention_backward", mutates_args=())
def _varlen_attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    doc_starts: Tensor,
    doc_ends: Tensor,
    sm_scale: float,
    softcap: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    options = ScoreOptions(sm_scale=sm_scale, softcap=softcap, window=window)
    inputs = AttentionInputs(_for_descriptor(q), _for_descriptor(k), _for_descriptor(v), doc_starts, doc_ends, options)
    do, tiles = _for_descriptor(do), choose_tiles(inputs)
    dq, delta = compute_dq(inputs, o, do, lse, tiles.dq)
    return dq, *compute_dkdv(inputs, do, lse, delta, tiles.dkdv)


@_varlen_attention_backward.register_fake
def _(_do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _for_descriptor(tensor: Tensor) -> Tensor:
    """Return the tensor if TMA can read it (heads contiguous, tokens 16-byte aligned), else a contiguous copy."""
    is_dense = tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]
    is_aligned = (tensor.stride(0) * tensor.element_size()) % 16 == 0 and tensor.data_ptr() % 16 == 0
    return tensor if is_dense and is_aligned else tensor.contiguous()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, doc_starts, doc_ends, *options, sinks = inputs
    ctx.save_for_backward(q, k, v, *output, doc_starts, doc_ends, sinks)
    ctx.options = options


def _backward(ctx: Any, do: Tensor, _lse_grad: Tensor) -> tuple[Tensor | None, ...]:
    *saved, sinks = ctx.saved_tensors
    grads = _varlen_attention_backward(do, *saved, *ctx.options)
    dsinks = _compute_dsinks(do, saved[3], saved[4], sinks) if ctx.needs_input_grad[-1] else None
    return (*grads, None, None, None, None, None, dsinks)


def _compute_dsinks(do: Tensor, o: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks [heads]: dS = P (dP - delta) with dP = 0, as a sink has no value."""
    delta = (do.float() * o.float()).sum(-1)
    p = torch.exp2(sinks.float() * math.log2(math.e) - lse)
    return -(p * delta).sum(0).to(sinks.dtype)


_varlen_attention.register_autograd(_backward, setup_context=_setup_context)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    doc_starts: Tensor,
    doc_ends: Tensor,
    sm_scale: float | None,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return causal attention within each document.

    `doc_starts` and `doc_ends` are int32, one value per token; `sinks` has a score per query head.
    """
    head_dim, group = q.shape[2], q.shape[1] // k.shape[1]
    if head_dim not in OWN_HEAD_SIZES or group > OWN_GROUP:
        raise NotImplementedError(
            f"triton: this backend does not support head_dim {head_dim} with {group} query heads per KV head"
        )
    sm_scale = head_dim**-0.5 if sm_scale is None else sm_scale
    o: Tensor = _varlen_attention(q, k, v, doc_starts, doc_ends, sm_scale, softcap, window, sinks)[0]
    return o
