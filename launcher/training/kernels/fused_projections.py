"""Matmuls with a fused weight [[W, s B], [A, 0]] whose W is dense or in FP8, forward and backward.

The ops of fused_layer_ops.py use them. Names: x_ext = [x, x_lora] with x_lora = d A^T, where d = dropout(x);
grad_ext = [dy, dy (s B)]. With DoRA and dropout ("splits") the output is y = c * (d_ext [W, s B]^T) + (x - d) W^T; the
second matmul is the `correction`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from launcher.training.kernels import fp8
from launcher.training.kernels.elementwise import (
    Correction,
    copy_columns,
    dropout,
    dropout_backward,
    rms_norm,
    rms_norm_dropout,
)
from launcher.training.kernels.fp8 import Fp8Rows, Fp8Weights
from launcher.training.kernels.seeded_dropout import DropoutSeed


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A dense fused weight [[W, s B], [A, 0]] of shape [out + ranks, in + ranks], with views of its parts."""

    full: Tensor
    in_features: int

    @property
    def ranks(self) -> int:
        """Sum of the LoRA ranks of the fused matrices."""
        return self.full.shape[1] - self.in_features

    @property
    def out_features(self) -> int:
        """Sum of the output features of the fused matrices."""
        return len(self.full) - self.ranks

    @property
    def scaled_B(self) -> Tensor:
        """The scaled matrices B: s B [out, ranks]."""
        return self.full[: self.out_features, self.in_features :]

    @property
    def lora_A(self) -> Tensor:
        """LoRA's A of all fused matrices, stacked: [ranks, in]."""
        return self.full[self.out_features :, : self.in_features]

    def project(self, x_ext: Tensor, start: int = 0, out: Tensor | None = None) -> Tensor:
        """Return x W^T + x_lora (s B)^T for the outputs from `start` on, given x_ext = [x, x_lora]."""
        return torch.mm(x_ext, self.full[start : self.out_features].t(), out=out)

    def project_base(self, x: Tensor, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Return x W^T, without LoRA's term, for the outputs from `start` to `stop`."""
        return torch.mm(x, self.full[start:stop, : self.in_features].t(), out=out)

    def input_grad(self, grad_ext: Tensor, start: int = 0) -> Tensor:
        """Return dx = dy W + dy_lora A, given grad_ext = [dy, dy_lora], whose dy has the outputs from `start` on."""
        return grad_ext @ self.full[start:, : self.in_features]

    def base_input_grad(self, grad: Tensor, start: int, stop: int) -> Tensor:
        """Return dy W, without LoRA's term, for the outputs from `start` to `stop`."""
        return grad @ self.full[start:stop, : self.in_features]


FusedWeight = DenseWeight | Fp8Weights


def view_weight(
    stored: Sequence[Tensor], *, in_features: int | None = None, out_features: int | None = None
) -> FusedWeight:
    """Return the fused weight that an op received as a list: one dense tensor, or the tensors of Fp8Weights.

    For a dense tensor, `in_features` or `out_features` must be given.
    """
    if len(stored) > 1:
        return Fp8Weights(*stored)
    if in_features is None:
        assert out_features is not None
        in_features = stored[0].shape[1] - (len(stored[0]) - out_features)
    return DenseWeight(stored[0], in_features)


class Projection(NamedTuple):
    """The result of a projection, and what its backward pass needs. Unused parts are empty."""

    y: Tensor
    x: Tensor  # x_ext; or the codes of x, if W is in FP8 and there is no dropout
    x_scales: Tensor  # of these codes
    x_lora: Tensor  # of these codes
    correction: Tensor


def norm_and_project(
    residual: Tensor, norm_weight: Tensor, eps: float, weight: FusedWeight, seed: DropoutSeed | None, splits: bool,
    num_plain: int = 0,
) -> Projection:  # fmt: skip
    """Multiply x = RMSNorm(residual) by a fused weight, with LoRA dropout if `seed` is given.

    With `splits` (DoRA and dropout), the first `num_plain` rows of W, which have no adapter, are multiplied by x itself
    instead of dropout(x) and need no correction.
    """
    num_tokens, in_features = residual.shape
    # One tensor each, because results of an op must not alias.
    no_scales, no_lora, no_correction = (weight.scaled_B.new_empty(0) for _ in range(3))
    if isinstance(weight, Fp8Weights) and seed is None:
        rows = fp8.rms_norm(residual, norm_weight, eps)
        x_lora = fp8.project_rows(rows, weight.lora_A)
        return Projection(multiply_rows(rows, x_lora, weight), *rows, x_lora, no_correction)
    x_ext = weight.scaled_B.new_empty(num_tokens, in_features + weight.ranks)
    x, x_lora = x_ext[:, :in_features], x_ext[:, in_features:]
    if seed is None:
        rms_norm(residual, norm_weight, eps, x_ext)
        torch.mm(x, weight.lora_A.t(), out=x_lora)
        return Projection(weight.project(x_ext), x_ext, no_scales, no_lora, no_correction)
    side = x_ext.new_empty(num_tokens, in_features)
    normed = torch.empty_like(side) if num_plain else None
    rms_norm_dropout(residual, norm_weight, eps, x_ext, side, seed, splits=splits, normed=normed)
    torch.mm(x if splits else side, weight.lora_A.t(), out=x_lora)
    correction = weight.project_base(side, num_plain, weight.out_features) if splits else no_correction
    if normed is None:
        return Projection(weight.project(x_ext), x_ext, no_scales, no_lora, correction)
    y = x_ext.new_empty(num_tokens, weight.out_features)
    weight.project_base(normed, 0, num_plain, out=y[:, :num_plain])
    weight.project(x_ext, num_plain, out=y[:, num_plain:])
    return Projection(y, x_ext, no_scales, no_lora, correction)


def multiply_rows(rows: Fp8Rows, x_lora: Tensor, weight: Fp8Weights) -> Tensor:
    """Return x W^T + x_lora (s B)^T for x in FP8."""
    lora = fp8.LoraTerm(x_lora, weight.scaled_B, is_transposed=True)
    return fp8.matmul(rows, weight.codes, weight.scales, x_lora.dtype, lora)


def multiply_grad_rows(rows: Fp8Rows, grad_lora: Tensor, weight: Fp8Weights) -> Tensor:
    """Return dx = dy W + grad_lora A, given `rows` = dy * weight.scales in FP8."""
    lora = fp8.LoraTerm(grad_lora, weight.lora_A, is_transposed=False)
    return fp8.matmul(rows, fp8.transpose(weight.codes), None, grad_lora.dtype, lora)


def project_backward_fp8(
    rows: Fp8Rows, x_rows: Fp8Rows, x_lora: Tensor, weight: Fp8Weights, needs_input_grad: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, dA and dB of a fused weight, given `rows` = dy * weight.scales and x in FP8.

    dA and dB may be parts that are to be summed, as split_lora_grads does.
    """
    grad_lora = fp8.project_grad_rows(rows, weight.grad_B)
    x_grad = multiply_grad_rows(rows, grad_lora, weight) if needs_input_grad else grad_lora.new_empty(0)
    return x_grad, fp8.lora_A_grad(x_rows, grad_lora), fp8.lora_B_grad(rows, x_lora, weight.scales)


def project_backward(
    grad_ext: Tensor, x_ext: Tensor, weight: FusedWeight, seed: DropoutSeed | None, correction: Correction | None,
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
            x_grad = weight.input_grad(grad_ext)
        return x_grad, grad_lora.t() @ x, b_grad
    dropped = torch.empty_like(x, memory_format=torch.contiguous_format)
    dropout(x, dropped, seed)
    a_grad = grad_lora.t() @ dropped
    if needs_input_grad:
        x_grad = weight.base_input_grad(grad_output, 0, out_features)
        dropout_backward(x_grad, torch.mm(grad_lora, weight.lora_A, out=dropped), seed)
    return x_grad, a_grad, b_grad


def _project_backward_split(
    grad_ext: Tensor, x_ext: Tensor, weight: FusedWeight, seed: DropoutSeed, correction_grad: Tensor,
    needs_input_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dx, dA and dB for DoRA with dropout; dx sums those of dropout(x), x - dropout(x) and unadapted rows."""
    in_features, out_features = weight.in_features, weight.out_features
    num_plain = out_features - correction_grad.shape[1]
    grad_output, grad_lora = grad_ext[:, num_plain:out_features], grad_ext[:, out_features:]
    torch.mm(grad_output, weight.scaled_B[num_plain:], out=grad_lora)
    b_grad = grad_ext.new_zeros(out_features, weight.ranks)
    torch.mm(grad_output.t(), x_ext[:, in_features:], out=b_grad[num_plain:])
    a_grad = grad_lora.t() @ x_ext[:, :in_features]
    if not needs_input_grad:
        return grad_ext.new_empty(0), a_grad, b_grad
    x_grad = weight.base_input_grad(correction_grad, num_plain, out_features)
    dropout_backward(x_grad, weight.input_grad(grad_ext[:, num_plain:], num_plain), seed, splits=True)
    if num_plain:
        x_grad += weight.base_input_grad(grad_ext[:, :num_plain], 0, num_plain)
    return x_grad, a_grad, b_grad


def single_input_grad(
    grad_output: Tensor, correction_grad: Tensor, weight: FusedWeight, seed: DropoutSeed | None
) -> tuple[Tensor, Tensor]:
    """Return dx and dy (s B) of a projection that shares its input with no other (down_proj or o_proj)."""
    out_features = weight.out_features
    if isinstance(weight, Fp8Weights) and seed is None:
        grad_lora = grad_output @ weight.scaled_B
        return multiply_grad_rows(fp8.quantize_rows(grad_output, weight.scales), grad_lora, weight), grad_lora
    if seed is not None and not correction_grad.numel():
        grad_lora = grad_output @ weight.scaled_B
        x_grad = weight.base_input_grad(grad_output, 0, out_features)
        dropout_backward(x_grad, grad_lora @ weight.lora_A, seed)
        return x_grad, grad_lora
    grad_ext = grad_output.new_empty(len(grad_output), out_features + weight.ranks)
    copy_columns(grad_output, grad_ext)
    grad_lora = torch.mm(grad_output, weight.scaled_B, out=grad_ext[:, out_features:])
    x_grad = weight.input_grad(grad_ext)
    if seed is None:
        return x_grad, grad_lora
    remainder_grad = weight.base_input_grad(correction_grad, 0, out_features)
    dropout_backward(remainder_grad, x_grad, seed, splits=True)
    return remainder_grad, grad_lora
