"""Custom ops for the blocks of a decoder layer: `qkv` (norm, projections, RoPE), `mlp` and `out_proj`, with backward.

Each element-wise step writes directly into the tensor that the next matmul reads, next to the LoRA columns, and what
can be recomputed is not saved. torch.compile treats each op as opaque. README.md has the equations; the autograd
functions around these ops are in fused_layer_autograd.py.

Names: x_ext = [x, x_lora] with x_lora = d A^T, where d = dropout(x); grad_ext = [dy, dy (s B)]. With DoRA and dropout
("splits") the output is y = c * (d_ext [W, s B]^T) + (x - d) W^T; the second matmul is the `correction`. Optional
results are empty tensors, because an op cannot return None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from launcher.training.kernels.elementwise import (
    Correction,
    QKNormRope,
    copy_columns,
    dropout,
    dropout_backward,
    get_grad_dtype,
    qk_norm_rope,
    qk_norm_rope_backward,
    rms_norm,
    rms_norm_dropout,
    split_lora_grads,
    swiglu,
    swiglu_backward,
)
from launcher.training.kernels.seeded_dropout import DropoutSeed


@dataclass(frozen=True, slots=True)
class _FusedWeight:
    """Views of a fused weight [[W, s B], [A, 0]] of shape [out + ranks, in + ranks]."""

    full: Tensor
    in_features: int

    @property
    def ranks(self) -> int:
        return self.full.shape[1] - self.in_features

    @property
    def out_features(self) -> int:
        return len(self.full) - self.ranks

    @property
    def base(self) -> Tensor:
        return self.full[: self.out_features, : self.in_features]

    @property
    def scaled_B(self) -> Tensor:
        return self.full[: self.out_features, self.in_features :]

    @property
    def lora_A(self) -> Tensor:
        return self.full[self.out_features :, : self.in_features]

    @property
    def base_and_B(self) -> Tensor:
        """[W, s B], for the forward matmul y = x_ext [W, s B]^T."""
        return self.full[: self.out_features]

    @property
    def base_and_A(self) -> Tensor:
        """[W; A], for the backward matmul dx = grad_ext [W; A]."""
        return self.full[:, : self.in_features]


def _get_seed(seeds: Tensor | None, index: int, rate: float) -> DropoutSeed | None:
    return None if seeds is None else DropoutSeed(seeds[index : index + 1], rate)


def _norm_and_project(
    residual: Tensor, norm_weight: Tensor, eps: float, weight: _FusedWeight, seed: DropoutSeed | None, splits: bool,
    num_plain: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return x_ext, y and the correction for x = RMSNorm(residual).

    The first `num_plain` rows of W have no adapter: with `splits` they multiply x itself and need no correction.
    """
    num_tokens, in_features = residual.shape
    x_ext = weight.full.new_empty(num_tokens, weight.full.shape[1])
    x, x_lora = x_ext[:, :in_features], x_ext[:, in_features:]
    if seed is None:
        rms_norm(residual, norm_weight, eps, x_ext)
        torch.mm(x, weight.lora_A.t(), out=x_lora)
        return x_ext, x_ext @ weight.base_and_B.t(), x_ext.new_empty(0)
    side = x_ext.new_empty(num_tokens, in_features)
    normed = torch.empty_like(side) if num_plain else None
    rms_norm_dropout(residual, norm_weight, eps, x_ext, side, seed, splits=splits, normed=normed)
    torch.mm(x if splits else side, weight.lora_A.t(), out=x_lora)
    correction = side @ weight.base[num_plain:].t() if splits else x_ext.new_empty(0)
    if normed is None:
        return x_ext, x_ext @ weight.base_and_B.t(), correction
    y = x_ext.new_empty(num_tokens, weight.out_features)
    torch.mm(normed, weight.base[:num_plain].t(), out=y[:, :num_plain])
    torch.mm(x_ext, weight.base_and_B[num_plain:].t(), out=y[:, num_plain:])
    return x_ext, y, correction


def _project_backward(
    grad_ext: Tensor, x_ext: Tensor, weight: _FusedWeight, seed: DropoutSeed | None, correction: Correction | None,
    needs_input_grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dx, dA and dB of the fused weight; fills the LoRA columns of grad_ext = [dy, dy (s B)].

    dB is one matmul for all matrices, which reads dy once; only its diagonal blocks are used (split_lora_grads).
    """
    if seed is not None and correction is not None:
        return _project_backward_split(grad_ext, x_ext, weight, seed, correction.grad, needs_input_grad)
    in_features, out_features = weight.in_features, weight.out_features
    grad_output, grad_lora, x = grad_ext[:, :out_features], grad_ext[:, out_features:], x_ext[:, :in_features]
    x_grad = grad_ext.new_empty(0)
    torch.mm(grad_output, weight.scaled_B, out=grad_lora)
    b_grad = grad_output.t() @ x_ext[:, in_features:]
    if seed is None:
        if needs_input_grad:
            x_grad = grad_ext @ weight.base_and_A
        return x_grad, grad_lora.t() @ x, b_grad
    dropped = torch.empty_like(x, memory_format=torch.contiguous_format)
    dropout(x, dropped, seed)
    a_grad = grad_lora.t() @ dropped
    if needs_input_grad:
        x_grad = grad_output @ weight.base
        dropout_backward(x_grad, torch.mm(grad_lora, weight.lora_A, out=dropped), seed)
    return x_grad, a_grad, b_grad


def _project_backward_split(
    grad_ext: Tensor, x_ext: Tensor, weight: _FusedWeight, seed: DropoutSeed, correction_grad: Tensor,
    needs_input_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Handle DoRA with dropout: one matmul for dropout(x), one for x - dropout(x), one for rows without an adapter."""
    in_features, out_features = weight.in_features, weight.out_features
    num_plain = out_features - correction_grad.shape[1]
    grad_output, grad_lora = grad_ext[:, num_plain:out_features], grad_ext[:, out_features:]
    torch.mm(grad_output, weight.scaled_B[num_plain:], out=grad_lora)
    b_grad = grad_ext.new_zeros(out_features, weight.ranks)
    torch.mm(grad_output.t(), x_ext[:, in_features:], out=b_grad[num_plain:])
    a_grad = grad_lora.t() @ x_ext[:, :in_features]
    if not needs_input_grad:
        return grad_ext.new_empty(0), a_grad, b_grad
    x_grad = correction_grad @ weight.base[num_plain:]
    dropout_backward(x_grad, grad_ext[:, num_plain:] @ weight.base_and_A[num_plain:], seed, splits=True)
    if num_plain:
        x_grad.addmm_(grad_ext[:, :num_plain], weight.base[:num_plain])
    return x_grad, a_grad, b_grad


def _allocate_correction_grad(correction: Tensor) -> Correction | None:
    return Correction(correction, torch.empty_like(correction)) if correction.numel() else None


def _empty_lora_grads(like: Tensor, out_features: list[int], rank: int, in_features: int) -> tuple[Tensor, Tensor]:
    """Return tensors of the shapes that split_lora_grads returns."""
    dtype = get_grad_dtype(like.dtype)
    a_grad = like.new_empty(rank * len(out_features), in_features, dtype=dtype)
    return a_grad, like.new_empty(sum(out_features), rank, dtype=dtype)


def _empty_if(is_empty: bool, tensor: Tensor) -> Tensor:
    return tensor.new_empty(0) if is_empty else torch.empty_like(tensor)


@torch.library.custom_op("launcher::qkv", mutates_args=())
def qkv(
    residual: Tensor, norm_weight: Tensor, weight: Tensor, dora_scale: Tensor | None, q_norm: Tensor | None,
    k_norm: Tensor | None, cos: Tensor, sin: Tensor, eps: float, seeds: Tensor | None, dropout_rate: float,
    num_heads: int, num_kv_heads: int, bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return query, key, value for attention; and x_ext, the projections and the correction, saved for backward.

    `bias` is the frozen bias of the projections, for LoRA only: DoRA would have to add it after its scaling.
    """
    rope = QKNormRope(dora_scale, q_norm, k_norm, cos, sin, eps)
    splits = seeds is not None and dora_scale is not None
    fused = _FusedWeight(weight, residual.shape[1])
    seed = _get_seed(seeds, 0, dropout_rate)
    x_ext, projected, correction = _norm_and_project(residual, norm_weight, eps, fused, seed, splits)
    if bias is not None:
        projected += bias
    query, key, value = qk_norm_rope(projected, rope, num_heads, num_kv_heads, correction if splits else None)
    empty = projected.new_empty(0)
    return query, key, empty if value is None else value, x_ext, projected if rope.saves_qkv else empty, correction


@qkv.register_fake
def _(
    residual: Tensor, _norm_weight: Tensor, weight: Tensor, dora_scale: Tensor | None, q_norm: Tensor | None,
    k_norm: Tensor | None, cos: Tensor, sin: Tensor, eps: float, seeds: Tensor | None, _dropout_rate: float,
    num_heads: int, num_kv_heads: int, _bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rope = QKNormRope(dora_scale, q_norm, k_norm, cos, sin, eps)
    num_tokens, head_dim = len(residual), cos.shape[1]
    key = weight.new_empty(num_tokens, num_kv_heads, head_dim)
    projected = weight.new_empty(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    return (
        weight.new_empty(num_tokens, num_heads, head_dim),
        key,
        _empty_if(not rope.copies_values, key),
        weight.new_empty(num_tokens, weight.shape[1]),
        _empty_if(not rope.saves_qkv, projected),
        _empty_if(seeds is None or dora_scale is None, projected),
    )


@torch.library.custom_op("launcher::qkv_backward", mutates_args=())
def qkv_backward(
    query_grad: Tensor, key_grad: Tensor, value_grad: Tensor, x_ext: Tensor, projected: Tensor, correction: Tensor,
    weight: Tensor, dora_scale: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor, sin: Tensor,
    eps: float, seeds: Tensor | None, dropout_rate: float, out_features: list[int], lora_scale: float, rank: int,
    needs_input_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the normed input, of all A, of all B, and of DoRA's scale."""
    rope = QKNormRope(dora_scale, q_norm, k_norm, cos, sin, eps)
    grads = (query_grad, key_grad, value_grad)
    grad_ext, with_grad = x_ext.new_empty(len(x_ext), len(weight)), _allocate_correction_grad(correction)
    scale_grad = qk_norm_rope_backward(grads, projected, rope, grad_ext, with_grad)
    fused = _FusedWeight(weight, weight.shape[1] - (len(weight) - sum(out_features)))
    seed = _get_seed(seeds, 0, dropout_rate)
    x_grad, a_grad, b_grad = _project_backward(grad_ext, x_ext, fused, seed, with_grad, needs_input_grad)
    lora_grads = split_lora_grads(a_grad, b_grad, out_features, lora_scale, rank)
    return x_grad, *lora_grads, x_ext.new_empty(0) if scale_grad is None else scale_grad


@qkv_backward.register_fake
def _(
    _query_grad: Tensor, _key_grad: Tensor, _value_grad: Tensor, x_ext: Tensor, _projected: Tensor,
    _correction: Tensor, weight: Tensor, dora_scale: Tensor | None, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    out_features, _lora_scale, rank, needs_input_grad = rest[-4:]
    in_features = weight.shape[1] - (len(weight) - sum(out_features))
    return (
        x_ext.new_empty(len(x_ext), in_features) if needs_input_grad else x_ext.new_empty(0),
        *_empty_lora_grads(x_ext, out_features, rank, in_features),
        x_ext.new_empty(0) if dora_scale is None else torch.empty_like(dora_scale),
    )


@torch.library.custom_op("launcher::mlp", mutates_args=())
def mlp(
    residual: Tensor, norm_weight: Tensor, gate_up_weight: Tensor, down_weight: Tensor, dora_scale: Tensor | None,
    seeds: Tensor | None, dropout_rate: float, eps: float, gate_is_plain: bool, is_gelu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the output and its correction; and x_ext, gate_up, its correction and down_proj's x_lora for backward."""
    splits = seeds is not None and dora_scale is not None
    gate_up_fused = _FusedWeight(gate_up_weight, residual.shape[1])
    down = _FusedWeight(down_weight, gate_up_fused.out_features // 2)
    num_plain = down.in_features if splits and gate_is_plain else 0
    seed = _get_seed(seeds, 0, dropout_rate)
    x_ext, gate_up, correction = _norm_and_project(residual, norm_weight, eps, gate_up_fused, seed, splits, num_plain)
    hidden_ext = gate_up.new_empty(len(gate_up), down_weight.shape[1])
    swiglu(gate_up, dora_scale, hidden_ext, correction if splits else None, is_gelu=is_gelu)
    hidden, hidden_lora = hidden_ext[:, : down.in_features], hidden_ext[:, down.in_features :]
    down_correction, down_seed = gate_up.new_empty(0), _get_seed(seeds, 1, dropout_rate)
    if down_seed is None:
        torch.mm(hidden, down.lora_A.t(), out=hidden_lora)
    else:
        side = gate_up.new_empty(len(gate_up), down.in_features)
        dropout(hidden, hidden if splits else side, down_seed, side if splits else None)
        torch.mm(hidden if splits else side, down.lora_A.t(), out=hidden_lora)
        down_correction = side @ down.base.t() if splits else down_correction
    return hidden_ext @ down.base_and_B.t(), down_correction, x_ext, gate_up, correction, hidden_lora.contiguous()


@mlp.register_fake
def _(
    residual: Tensor, _norm_weight: Tensor, gate_up_weight: Tensor, down_weight: Tensor, dora_scale: Tensor | None,
    seeds: Tensor | None, _dropout_rate: float, _eps: float, gate_is_plain: bool, _is_gelu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    num_tokens, has_no_correction = len(residual), seeds is None or dora_scale is None
    gate_up_features = _FusedWeight(gate_up_weight, residual.shape[1]).out_features
    down = _FusedWeight(down_weight, gate_up_features // 2)
    y = gate_up_weight.new_empty(num_tokens, down.out_features)
    corrected_features = gate_up_features // 2 if gate_is_plain else gate_up_features
    return (
        y,
        _empty_if(has_no_correction, y),
        gate_up_weight.new_empty(num_tokens, gate_up_weight.shape[1]),
        gate_up_weight.new_empty(num_tokens, gate_up_features),
        _empty_if(has_no_correction, gate_up_weight.new_empty(num_tokens, corrected_features)),
        gate_up_weight.new_empty(num_tokens, down.ranks),
    )


@torch.library.custom_op("launcher::mlp_backward", mutates_args=())
def mlp_backward(
    grad_output: Tensor, down_correction_grad: Tensor, x_ext: Tensor, gate_up: Tensor, correction: Tensor,
    hidden_lora: Tensor, gate_up_weight: Tensor, down_weight: Tensor, dora_scale: Tensor | None, seeds: Tensor | None,
    dropout_rate: float, out_features: list[int], lora_scales: list[float], ranks: list[int], is_gelu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the normed input, of A and B of gate and up, of A and B of down, and of DoRA's scale.

    `out_features` are those of gate_proj and up_proj, or of one matrix that holds both.
    """
    num_tokens, intermediate = len(grad_output), gate_up.shape[1] // 2
    down = _FusedWeight(down_weight, intermediate)
    with_grad, down_seed = _allocate_correction_grad(correction), _get_seed(seeds, 1, dropout_rate)
    hidden_grad, grad_lora = _input_grad(grad_output, down_correction_grad, down, down_seed)
    down_b_grad = grad_output.t() @ hidden_lora
    grad_ext = gate_up.new_empty(num_tokens, len(gate_up_weight))
    scale_grad = swiglu_backward(hidden_grad, gate_up, dora_scale, grad_ext, with_grad, is_gelu=is_gelu)
    hidden = hidden_grad  # swiglu_backward has overwritten it
    if down_seed is not None:
        dropout(hidden, hidden, down_seed)  # in place: each element is read before it is written, by the same thread
    down_grads = split_lora_grads(grad_lora.t() @ hidden, down_b_grad, [down.out_features], lora_scales[1], ranks[1])
    del grad_lora, hidden, hidden_grad
    fused = _FusedWeight(gate_up_weight, gate_up_weight.shape[1] - (len(gate_up_weight) - gate_up.shape[1]))
    seed = _get_seed(seeds, 0, dropout_rate)
    x_grad, a_grad, b_grad = _project_backward(grad_ext, x_ext, fused, seed, with_grad)
    gate_up_grads = split_lora_grads(a_grad, b_grad, out_features, lora_scales[0], ranks[0])
    return x_grad, *gate_up_grads, *down_grads, gate_up.new_empty(0) if scale_grad is None else scale_grad


def _input_grad(
    grad_output: Tensor, correction_grad: Tensor, weight: _FusedWeight, seed: DropoutSeed | None
) -> tuple[Tensor, Tensor]:
    """Return dx and dy (s B) of a single projection (down_proj or o_proj)."""
    if seed is not None and not correction_grad.numel():
        grad_lora = grad_output @ weight.scaled_B
        x_grad = grad_output @ weight.base
        dropout_backward(x_grad, grad_lora @ weight.lora_A, seed)
        return x_grad, grad_lora
    grad_ext = grad_output.new_empty(len(grad_output), len(weight.full))
    copy_columns(grad_output, grad_ext)
    grad_lora = torch.mm(grad_output, weight.scaled_B, out=grad_ext[:, weight.out_features :])
    x_grad = grad_ext @ weight.base_and_A
    if seed is None:
        return x_grad, grad_lora
    remainder_grad = correction_grad @ weight.base
    dropout_backward(remainder_grad, x_grad, seed, splits=True)
    return remainder_grad, grad_lora


@mlp_backward.register_fake
def _(
    grad_output: Tensor, _down_correction_grad: Tensor, x_ext: Tensor, gate_up: Tensor, _correction: Tensor,
    _hidden_lora: Tensor, gate_up_weight: Tensor, _down_weight: Tensor, dora_scale: Tensor | None,
    _seeds: Tensor | None, _dropout_rate: float, out_features: list[int], _lora_scales: list[float], ranks: list[int],
    _is_gelu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    intermediate = gate_up.shape[1] // 2
    in_features = gate_up_weight.shape[1] - (len(gate_up_weight) - gate_up.shape[1])
    return (
        x_ext.new_empty(len(x_ext), in_features),
        *_empty_lora_grads(x_ext, out_features, ranks[0], in_features),
        *_empty_lora_grads(x_ext, [grad_output.shape[1]], ranks[1], intermediate),
        x_ext.new_empty(0) if dora_scale is None else torch.empty_like(dora_scale),
    )


@torch.library.custom_op("launcher::out_proj", mutates_args=())
def out_proj(
    x: Tensor, weight: Tensor, seeds: Tensor, dropout_rate: float, splits: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o_proj(x) with LoRA dropout, its correction, and x_lora, saved for backward."""
    fused, side, seed = _FusedWeight(weight, x.shape[1]), torch.empty_like(x), DropoutSeed(seeds, dropout_rate)
    if splits:
        x_ext = x.new_empty(len(x), weight.shape[1])
        dropout(x, x_ext, seed, side)
        torch.mm(x_ext[:, : fused.in_features], fused.lora_A.t(), out=x_ext[:, fused.in_features :])
        correction = side @ fused.base.t()
        return x_ext @ fused.base_and_B.t(), correction, x_ext[:, fused.in_features :].contiguous()
    dropout(x, side, seed)
    x_lora = side @ fused.lora_A.t()
    return torch.addmm(x @ fused.base.t(), x_lora, fused.scaled_B.t()), x.new_empty(0), x_lora


@out_proj.register_fake
def _(x: Tensor, weight: Tensor, _seeds: Tensor, _dropout_rate: float, splits: bool) -> tuple[Tensor, Tensor, Tensor]:
    fused = _FusedWeight(weight, x.shape[1])
    y = x.new_empty(len(x), fused.out_features)
    return y, _empty_if(not splits, y), x.new_empty(len(x), fused.ranks)


@torch.library.custom_op("launcher::out_proj_backward", mutates_args=())
def out_proj_backward(
    grad_output: Tensor, correction_grad: Tensor, x: Tensor, x_lora: Tensor, weight: Tensor, seeds: Tensor,
    dropout_rate: float, lora_scale: float, rank: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x, A and B."""
    seed, dropped = DropoutSeed(seeds, dropout_rate), torch.empty_like(x)
    x_grad, grad_lora = _input_grad(grad_output, correction_grad, _FusedWeight(weight, x.shape[1]), seed)
    dropout(x, dropped, seed)
    out_features = [grad_output.shape[1]]
    a_grad, b_grad = split_lora_grads(grad_lora.t() @ dropped, grad_output.t() @ x_lora, out_features, lora_scale, rank)
    return x_grad, a_grad, b_grad


@out_proj_backward.register_fake
def _(grad_output: Tensor, _correction_grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), *_empty_lora_grads(x, [grad_output.shape[1]], rest[-1], x.shape[1])
