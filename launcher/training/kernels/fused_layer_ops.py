"""Custom ops for the blocks of a decoder layer: `qkv` (norm, projections, RoPE), `mlp` and `out_proj`, with backward.

Each element-wise step writes directly into the tensor that the next matmul reads, next to the LoRA columns, and what
can be recomputed is not saved. torch.compile treats each op as opaque. README.md has the equations,
fused_projections.py the matmuls and the names; the autograd functions around these ops are in fused_layer_autograd.py.

A fused weight is a list: one dense tensor, or the tensors of fp8.Fp8Weights. Optional results are empty tensors,
because an op cannot return None.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from launcher.training.kernels import fp8
from launcher.training.kernels.elementwise import (
    Correction,
    QKNormRope,
    dropout,
    get_grad_dtype,
    qk_norm_rope,
    qk_norm_rope_backward,
    split_lora_grads,
    swiglu,
    swiglu_backward,
)
from launcher.training.kernels.fp8 import Fp8Rows, Fp8Weights
from launcher.training.kernels.fused_projections import (
    FusedWeight,
    multiply_rows,
    norm_and_project,
    project_backward,
    project_backward_fp8,
    single_input_grad,
    view_weight,
)
from launcher.training.kernels.seeded_dropout import DropoutSeed


def _get_seed(seeds: Tensor | None, index: int, rate: float) -> DropoutSeed | None:
    return None if seeds is None else DropoutSeed(seeds[index : index + 1], rate)


def _allocate_correction_grad(correction: Tensor) -> Correction | None:
    return Correction(correction, torch.empty_like(correction)) if correction.numel() else None


def _empty_lora_grads(like: Tensor, out_features: list[int], rank: int, in_features: int) -> tuple[Tensor, Tensor]:
    """Return uninitialized tensors with the shapes and the dtype of split_lora_grads' results."""
    dtype = get_grad_dtype(like.dtype)
    a_grad = like.new_empty(rank * len(out_features), in_features, dtype=dtype)
    return a_grad, like.new_empty(sum(out_features), rank, dtype=dtype)


def _empty_if(is_empty: bool, tensor: Tensor) -> Tensor:
    return tensor.new_empty(0) if is_empty else torch.empty_like(tensor)


def _empty_saved_input(weight: FusedWeight, num_tokens: int, seeds: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized tensors with the shapes of a Projection's `x`, `x_scales` and `x_lora`."""
    like = weight.scaled_B
    if isinstance(weight, Fp8Weights) and seeds is None:
        codes = like.new_empty(num_tokens, weight.in_features, dtype=fp8.DTYPE)
        return codes, like.new_empty(num_tokens, dtype=torch.float32), like.new_empty(num_tokens, weight.ranks)
    return like.new_empty(num_tokens, weight.in_features + weight.ranks), like.new_empty(0), like.new_empty(0)


@torch.library.custom_op("launcher::qkv", mutates_args=())
def qkv(
    residual: Tensor, norm_weight: Tensor, weight: list[Tensor], dora_scale: Tensor | None, q_norm: Tensor | None,
    k_norm: Tensor | None, cos: Tensor, sin: Tensor, eps: float, seeds: Tensor | None, dropout_rate: float,
    num_heads: int, num_kv_heads: int, bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return Q, K and V, and what backward needs: the normed input x, the projections and their dropout correction.

    x is returned as three tensors: `x`, `x_scales` and `x_lora` of Projection. `bias` is the frozen bias of the
    projections; it is supported with LoRA only, because DoRA would have to add it after its scaling.
    """
    rope = QKNormRope(dora_scale, q_norm, k_norm, cos, sin, eps)
    splits = seeds is not None and dora_scale is not None
    fused = view_weight(weight, in_features=residual.shape[1])
    seed = _get_seed(seeds, 0, dropout_rate)
    projected, x, x_scales, x_lora, correction = norm_and_project(residual, norm_weight, eps, fused, seed, splits)
    if bias is not None:
        projected += bias
    query, key, value = qk_norm_rope(projected, rope, num_heads, num_kv_heads, correction if splits else None)
    empty = projected.new_empty(0)
    return (
        query,
        key,
        empty if value is None else value,
        x,
        x_scales,
        x_lora,
        projected if rope.saves_qkv else empty,
        correction,
    )


@qkv.register_fake
def _(
    residual: Tensor, _norm_weight: Tensor, weight: list[Tensor], dora_scale: Tensor | None, q_norm: Tensor | None,
    k_norm: Tensor | None, cos: Tensor, sin: Tensor, eps: float, seeds: Tensor | None, _dropout_rate: float,
    num_heads: int, num_kv_heads: int, _bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rope = QKNormRope(dora_scale, q_norm, k_norm, cos, sin, eps)
    num_tokens, head_dim = len(residual), cos.shape[1]
    fused = view_weight(weight, in_features=residual.shape[1])
    like = fused.scaled_B
    key = like.new_empty(num_tokens, num_kv_heads, head_dim)
    projected = like.new_empty(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    return (
        like.new_empty(num_tokens, num_heads, head_dim),
        key,
        _empty_if(not rope.copies_values, key),
        *_empty_saved_input(fused, num_tokens, seeds),
        _empty_if(not rope.saves_qkv, projected),
        _empty_if(seeds is None or dora_scale is None, projected),
    )


@torch.library.custom_op("launcher::qkv_backward", mutates_args=())
def qkv_backward(
    query_grad: Tensor, key_grad: Tensor, value_grad: Tensor, x: Tensor, x_scales: Tensor, x_lora: Tensor,
    projected: Tensor, correction: Tensor, weight: list[Tensor], dora_scale: Tensor | None, q_norm: Tensor | None,
    k_norm: Tensor | None, cos: Tensor, sin: Tensor, eps: float, seeds: Tensor | None, dropout_rate: float,
    out_features: list[int], lora_scale: float, rank: int, needs_input_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the normed input, of all A, of all B, and of DoRA's scale."""
    rope = QKNormRope(dora_scale, q_norm, k_norm, cos, sin, eps)
    grads = (query_grad, key_grad, value_grad)
    fused, with_grad = view_weight(weight, out_features=sum(out_features)), _allocate_correction_grad(correction)
    scale_grad = None
    if isinstance(fused, Fp8Weights) and x_scales.numel():
        if dora_scale is None:
            rows = fp8.qk_norm_rope_backward(grads, projected, rope, fused.scales)
        else:
            grad = query_grad.new_empty(len(x), fused.out_features)
            scale_grad = qk_norm_rope_backward(grads, projected, rope, grad, None)
            rows = fp8.quantize_rows(grad, fused.scales)
        x_grad, a_grad, b_grad = project_backward_fp8(rows, Fp8Rows(x, x_scales), x_lora, fused, needs_input_grad)
    else:
        grad_ext = query_grad.new_empty(len(x), fused.out_features + fused.ranks, dtype=fused.scaled_B.dtype)
        scale_grad = qk_norm_rope_backward(grads, projected, rope, grad_ext, with_grad)
        seed = _get_seed(seeds, 0, dropout_rate)
        x_grad, a_grad, b_grad = project_backward(grad_ext, x, fused, seed, with_grad, needs_input_grad)
    lora_grads = split_lora_grads(a_grad, b_grad, out_features, lora_scale, rank)
    return x_grad, *lora_grads, query_grad.new_empty(0) if scale_grad is None else scale_grad


@qkv_backward.register_fake
def _(
    _query_grad: Tensor, _key_grad: Tensor, _value_grad: Tensor, x: Tensor, _x_scales: Tensor, _x_lora: Tensor,
    _projected: Tensor, _correction: Tensor, weight: list[Tensor], dora_scale: Tensor | None, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    out_features, _lora_scale, rank, needs_input_grad = rest[-4:]
    fused = view_weight(weight, out_features=sum(out_features))
    like = fused.scaled_B
    return (
        like.new_empty(len(x), fused.in_features) if needs_input_grad else like.new_empty(0),
        *_empty_lora_grads(like, out_features, rank, fused.in_features),
        like.new_empty(0) if dora_scale is None else torch.empty_like(dora_scale),
    )


@torch.library.custom_op("launcher::mlp", mutates_args=())
def mlp(
    residual: Tensor, norm_weight: Tensor, gate_up_weight: list[Tensor], down_weight: list[Tensor],
    dora_scale: Tensor | None, seeds: Tensor | None, dropout_rate: float, eps: float, gate_is_plain: bool,
    is_gelu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the MLP's output and its correction, and what backward needs: x, gate_up, its correction, hidden_lora.

    Corrections are empty except for DoRA with dropout. The normed input x is returned as three tensors: `x`, `x_scales`
    and `x_lora` of Projection. hidden_lora is down_proj's x_lora.
    """
    splits = seeds is not None and dora_scale is not None
    gate_up_fused = view_weight(gate_up_weight, in_features=residual.shape[1])
    down = view_weight(down_weight, in_features=gate_up_fused.out_features // 2)
    num_plain = down.in_features if splits and gate_is_plain else 0
    seed = _get_seed(seeds, 0, dropout_rate)
    gate_up, x, x_scales, x_lora, correction = norm_and_project(
        residual, norm_weight, eps, gate_up_fused, seed, splits, num_plain
    )
    if isinstance(down, Fp8Weights) and seed is None:
        rows = fp8.swiglu(gate_up, dora_scale, is_gelu=is_gelu)
        hidden_lora = fp8.project_rows(rows, down.lora_A)
        empty = gate_up.new_empty(0)
        return multiply_rows(rows, hidden_lora, down), empty, x, x_scales, x_lora, gate_up, correction, hidden_lora
    hidden_ext = gate_up.new_empty(len(gate_up), down.in_features + down.ranks)
    swiglu(gate_up, dora_scale, hidden_ext, correction if splits else None, is_gelu=is_gelu)
    hidden, hidden_lora = hidden_ext[:, : down.in_features], hidden_ext[:, down.in_features :]
    down_correction, down_seed = gate_up.new_empty(0), _get_seed(seeds, 1, dropout_rate)
    if down_seed is None:
        torch.mm(hidden, down.lora_A.t(), out=hidden_lora)
    else:
        side = gate_up.new_empty(len(gate_up), down.in_features)
        dropout(hidden, hidden if splits else side, down_seed, side if splits else None)
        torch.mm(hidden if splits else side, down.lora_A.t(), out=hidden_lora)
        down_correction = down.project_base(side, 0, down.out_features) if splits else down_correction
    return down.project(hidden_ext), down_correction, x, x_scales, x_lora, gate_up, correction, hidden_lora.contiguous()


@mlp.register_fake
def _(
    residual: Tensor, _norm_weight: Tensor, gate_up_weight: list[Tensor], down_weight: list[Tensor],
    dora_scale: Tensor | None, seeds: Tensor | None, _dropout_rate: float, _eps: float, gate_is_plain: bool,
    _is_gelu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    num_tokens, has_no_correction = len(residual), seeds is None or dora_scale is None
    gate_up = view_weight(gate_up_weight, in_features=residual.shape[1])
    down, like = view_weight(down_weight, in_features=gate_up.out_features // 2), gate_up.scaled_B
    y = like.new_empty(num_tokens, down.out_features)
    corrected_features = gate_up.out_features // 2 if gate_is_plain else gate_up.out_features
    return (
        y,
        _empty_if(has_no_correction, y),
        *_empty_saved_input(gate_up, num_tokens, seeds),
        like.new_empty(num_tokens, gate_up.out_features),
        _empty_if(has_no_correction, like.new_empty(num_tokens, corrected_features)),
        like.new_empty(num_tokens, down.ranks),
    )


@torch.library.custom_op("launcher::mlp_backward", mutates_args=())
def mlp_backward(
    grad_output: Tensor, down_correction_grad: Tensor, x: Tensor, x_scales: Tensor, x_lora: Tensor, gate_up: Tensor,
    correction: Tensor, hidden_lora: Tensor, gate_up_weight: list[Tensor], down_weight: list[Tensor],
    dora_scale: Tensor | None, seeds: Tensor | None, dropout_rate: float, out_features: list[int],
    lora_scales: list[float], ranks: list[int], is_gelu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the normed input, of A and B of gate and up, of A and B of down, and of DoRA's scale.

    `out_features` are those of gate_proj and up_proj, or of one matrix that holds both.
    """
    down = view_weight(down_weight, in_features=gate_up.shape[1] // 2)
    fused = view_weight(gate_up_weight, out_features=gate_up.shape[1])
    with_grad, down_seed = _allocate_correction_grad(correction), _get_seed(seeds, 1, dropout_rate)
    hidden_grad, grad_lora = single_input_grad(grad_output, down_correction_grad, down, down_seed)
    down_b_grad = grad_output.t() @ hidden_lora
    scale_grad, rows = None, None
    if isinstance(fused, Fp8Weights) and x_scales.numel() and dora_scale is None:
        rows = fp8.swiglu_backward(hidden_grad, gate_up, fused.scales, is_gelu=is_gelu)
        grad_ext = gate_up.new_empty(0)
    else:
        grad_ext = gate_up.new_empty(len(gate_up), fused.out_features + (0 if x_scales.numel() else fused.ranks))
        scale_grad = swiglu_backward(hidden_grad, gate_up, dora_scale, grad_ext, with_grad, is_gelu=is_gelu)
    hidden = hidden_grad  # swiglu_backward has overwritten it
    if down_seed is not None:
        dropout(hidden, hidden, down_seed)  # in place: each element is read before it is written, by the same thread
    down_grads = split_lora_grads(grad_lora.t() @ hidden, down_b_grad, [down.out_features], lora_scales[1], ranks[1])
    del grad_lora, hidden, hidden_grad
    if isinstance(fused, Fp8Weights) and x_scales.numel():
        rows = fp8.quantize_rows(grad_ext, fused.scales) if rows is None else rows
        x_grad, a_grad, b_grad = project_backward_fp8(rows, Fp8Rows(x, x_scales), x_lora, fused)
    else:
        seed = _get_seed(seeds, 0, dropout_rate)
        x_grad, a_grad, b_grad = project_backward(grad_ext, x, fused, seed, with_grad)
    gate_up_grads = split_lora_grads(a_grad, b_grad, out_features, lora_scales[0], ranks[0])
    return x_grad, *gate_up_grads, *down_grads, gate_up.new_empty(0) if scale_grad is None else scale_grad


@mlp_backward.register_fake
def _(
    grad_output: Tensor, _down_correction_grad: Tensor, x: Tensor, _x_scales: Tensor, _x_lora: Tensor,
    gate_up: Tensor, _correction: Tensor, _hidden_lora: Tensor, gate_up_weight: list[Tensor],
    _down_weight: list[Tensor], dora_scale: Tensor | None, _seeds: Tensor | None, _dropout_rate: float,
    out_features: list[int], _lora_scales: list[float], ranks: list[int], _is_gelu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    in_features = view_weight(gate_up_weight, out_features=gate_up.shape[1]).in_features
    return (
        gate_up.new_empty(len(x), in_features),
        *_empty_lora_grads(gate_up, out_features, ranks[0], in_features),
        *_empty_lora_grads(gate_up, [grad_output.shape[1]], ranks[1], gate_up.shape[1] // 2),
        gate_up.new_empty(0) if dora_scale is None else torch.empty_like(dora_scale),
    )


@torch.library.custom_op("launcher::out_proj", mutates_args=())
def out_proj(
    x: Tensor, weight: list[Tensor], seeds: Tensor, dropout_rate: float, splits: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o_proj(x) with LoRA dropout, its correction (empty without DoRA), and x_lora, which backward needs."""
    fused, side = view_weight(weight, in_features=x.shape[1]), torch.empty_like(x)
    seed = DropoutSeed(seeds, dropout_rate)
    if splits:
        x_ext = x.new_empty(len(x), fused.in_features + fused.ranks)
        dropout(x, x_ext, seed, side)
        torch.mm(x_ext[:, : fused.in_features], fused.lora_A.t(), out=x_ext[:, fused.in_features :])
        correction = fused.project_base(side, 0, fused.out_features)
        return fused.project(x_ext), correction, x_ext[:, fused.in_features :].contiguous()
    dropout(x, side, seed)
    x_lora = side @ fused.lora_A.t()
    y = fused.project_base(x, 0, fused.out_features)
    return torch.addmm(y, x_lora, fused.scaled_B.t()), x.new_empty(0), x_lora


@out_proj.register_fake
def _(
    x: Tensor, weight: list[Tensor], _seeds: Tensor, _dropout_rate: float, splits: bool
) -> tuple[Tensor, Tensor, Tensor]:
    fused = view_weight(weight, in_features=x.shape[1])
    y = x.new_empty(len(x), fused.out_features)
    return y, _empty_if(not splits, y), x.new_empty(len(x), fused.ranks)


@torch.library.custom_op("launcher::out_proj_backward", mutates_args=())
def out_proj_backward(
    grad_output: Tensor, correction_grad: Tensor, x: Tensor, x_lora: Tensor, weight: list[Tensor], seeds: Tensor,
    dropout_rate: float, lora_scale: float, rank: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x, A and B."""
    seed, dropped = DropoutSeed(seeds, dropout_rate), torch.empty_like(x)
    fused = view_weight(weight, in_features=x.shape[1])
    x_grad, grad_lora = single_input_grad(grad_output, correction_grad, fused, seed)
    dropout(x, dropped, seed)
    out_features = [grad_output.shape[1]]
    a_grad, b_grad = split_lora_grads(grad_lora.t() @ dropped, grad_output.t() @ x_lora, out_features, lora_scale, rank)
    return x_grad, a_grad, b_grad


@out_proj_backward.register_fake
def _(grad_output: Tensor, _correction_grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), *_empty_lora_grads(x, [grad_output.shape[1]], rest[-1], x.shape[1])
