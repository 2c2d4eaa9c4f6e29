"""FP8 matmuls of linear layers in E4M3, with one scale per row of each operand.

    y  = (x8 W8^T) * x_scale ⊗ w_scale + x_lora (s B)^T        x8 = round(x / x_scale), w_scale per output
    dx = (g8 W8)   * g_scale           + dy_lora A             g8 = round(dy * w_scale / g_scale)

The scale of a row of W belongs to the summed dimension in the backward pass, so dy is multiplied by it before it is
rounded. W8 is stored if W is frozen; a trained W is rounded before each matmul. LoRA's terms are added to the same
accumulators in the compute dtype. Each function dispatches to a Triton kernel (fp8_triton.py, fp8_matmul_triton.py) or
to plain torch, the reference for tests. README.md has the equations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from launcher.training.kernels import elementwise
from launcher.training.kernels.availability import supports_triton

DTYPE = torch.float8_e4m3fn
_LARGEST = 448.0
SMALLEST = 1e-30  # rows whose largest magnitude is not above it become zeros: the inverse of their scale may overflow
_ALIGNED = 16  # features; what tensor cores and the copy engine load
TOKENS_PER_NORM_GRAD = 8  # summed in registers before they are written


class Fp8Weights(NamedTuple):
    """A fused weight [[W, s B], [A, 0]] whose W is stored in FP8.

    The methods are those of fused_projections.DenseWeight; they round inputs and gradients in separate passes.
    """

    codes: Tensor  # [out, in]
    scales: Tensor  # [out], fp32
    grad_B: Tensor  # [out, ranks]: scaled_B / scales, for gradients that were multiplied by the scales
    scaled_B: Tensor  # [out, ranks]
    lora_A: Tensor  # [ranks, in]

    @property
    def in_features(self) -> int:
        """Number of input features, which is the same for all fused matrices."""
        return self.codes.shape[1]

    @property
    def ranks(self) -> int:
        """Sum of the LoRA ranks of the fused matrices."""
        return len(self.lora_A)

    @property
    def out_features(self) -> int:
        """Sum of the output features of the fused matrices."""
        return len(self.codes)

    def project(self, x_ext: Tensor, start: int = 0, out: Tensor | None = None) -> Tensor:
        """Return x W^T + x_lora (s B)^T for the outputs from `start` on, given x_ext = [x, x_lora]."""
        x, x_lora = x_ext[:, : self.in_features], x_ext[:, self.in_features :]
        y = fp8_linear(x, self.codes[start:], self.scales[start:], x_lora, self.scaled_B[start:])
        return y if out is None else out.copy_(y)

    def project_base(self, x: Tensor, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Return x W^T, without LoRA's term, for the outputs from `start` to `stop`."""
        y = fp8_linear(x, self.codes[start:stop], self.scales[start:stop], None, None)
        return y if out is None else out.copy_(y)

    def input_grad(self, grad_ext: Tensor, start: int = 0) -> Tensor:
        """Return dx = dy W + dy_lora A, given grad_ext = [dy, dy_lora], whose dy has the outputs from `start` on."""
        num_outputs = self.out_features - start
        grad, grad_lora = grad_ext[:, :num_outputs], grad_ext[:, num_outputs:]
        return fp8_input_grad(grad, self.codes[start:], self.scales[start:], grad_lora, self.lora_A)

    def base_input_grad(self, grad: Tensor, start: int, stop: int) -> Tensor:
        """Return dy W, without LoRA's term, for the outputs from `start` to `stop`."""
        return fp8_input_grad(grad, self.codes[start:stop], self.scales[start:stop], None, None)


class Fp8Rows(NamedTuple):
    """An activation or a gradient in FP8."""

    codes: Tensor  # [tokens, features]
    scales: Tensor  # [tokens], fp32


class LoraTerm(NamedTuple):
    """LoRA's part of a matmul: left [tokens, ranks] @ right, where right is [ranks, features] or transposed."""

    left: Tensor
    right: Tensor
    is_transposed: bool


def is_storable(in_features: int, out_features: int) -> bool:
    """Return whether a matrix can be stored in FP8: both sizes must be multiples of 16."""
    return in_features % _ALIGNED == 0 and out_features % _ALIGNED == 0


def quantize_rows(x: Tensor, column_scales: Tensor | None = None) -> Fp8Rows:
    """Round x, or x * column_scales, to FP8."""
    if supports_triton(x.device):
        from launcher.training.kernels import fp8_triton

        return Fp8Rows(*fp8_triton.quantize_rows(x, column_scales))
    return _round_rows(x.float() if column_scales is None else x.float() * column_scales)


def quantize_visibly(x: Tensor) -> Fp8Rows:
    """Round x to FP8; under torch.compile in plain torch, to be fused with what computes x."""
    return _round_rows(x.float()) if torch.compiler.is_compiling() else quantize_rows(x)


def quantize_weights(weights: Sequence[Tensor]) -> Fp8Rows:
    """Round matrices that share an input, stacked, to FP8."""
    num_outputs = sum(len(weight) for weight in weights)
    codes = weights[0].new_empty(num_outputs, weights[0].shape[1], dtype=DTYPE)
    scales = weights[0].new_empty(num_outputs, dtype=torch.float32)
    row = 0
    for weight in weights:
        rows = slice(row, row + len(weight))
        _quantize_into(weight, Fp8Rows(codes[rows], scales[rows]))
        row += len(weight)
    return Fp8Rows(codes, scales)


def _quantize_into(x: Tensor, out: Fp8Rows) -> None:
    if supports_triton(x.device):
        from launcher.training.kernels import fp8_triton

        fp8_triton.quantize_rows(x, None, out=out)
        return
    for target, source in zip(out, _round_rows(x.float()), strict=True):
        target.copy_(source)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
    """Return RMSNorm(x) in FP8."""
    if supports_triton(x.device):
        from launcher.training.kernels import fp8_triton

        return Fp8Rows(*fp8_triton.quantize_rows(x, weight, eps))
    normed = torch.empty_like(x, dtype=torch.float32)
    elementwise.rms_norm(x, weight, eps, normed)
    return _round_rows(normed)


def swiglu(gate_up: Tensor, dora_scale: Tensor | None, *, is_gelu: bool) -> Fp8Rows:
    """Return SiLU(gate) * up, or GELU(gate) * up, in FP8; gate_up is [tokens, gate + up features]."""
    if supports_triton(gate_up.device):
        from launcher.training.kernels import fp8_triton

        return Fp8Rows(*fp8_triton.swiglu(gate_up, dora_scale, is_gelu=is_gelu))
    hidden = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2, dtype=torch.float32)
    elementwise.swiglu(gate_up, dora_scale, hidden, is_gelu=is_gelu)
    return _round_rows(hidden)


def swiglu_backward(
    grad: Tensor, gate_up: Tensor, column_scales: Tensor, *, is_gelu: bool, unrounded: Tensor | None = None
) -> Fp8Rows:
    """Return d(gate_up) * column_scales in FP8, without DoRA; overwrite `grad` with the recomputed forward output.

    d(gate_up) itself is written into `unrounded`, if it is given.
    """
    if supports_triton(grad.device):
        from launcher.training.kernels import fp8_triton

        return Fp8Rows(*fp8_triton.swiglu_backward(grad, gate_up, column_scales, is_gelu=is_gelu, unrounded=unrounded))
    out = torch.empty_like(gate_up, dtype=torch.float32)
    elementwise.swiglu_backward(grad, gate_up, None, out, is_gelu=is_gelu)
    if unrounded is not None:
        unrounded.copy_(out)
    return quantize_rows(out, column_scales)


class UnroundedGrads(NamedTuple):
    """Buffers for gradients of a projection and QK-norms whose weights are trained."""

    qkv: Tensor  # [tokens, features]
    norms: Tensor | None  # of the weights of q_norm and k_norm: parts [parts, 2, head_dim] to be summed, fp32

    @staticmethod
    def allocate(x: Tensor, num_features: int, head_dim: int, *, has_norms: bool) -> UnroundedGrads:
        """Return uninitialized buffers for the gradients of projections of x."""
        num_parts = -(-len(x) // TOKENS_PER_NORM_GRAD)
        norms = x.new_empty(num_parts, 2, head_dim, dtype=torch.float32) if has_norms else None
        return UnroundedGrads(x.new_empty(len(x), num_features), norms)


def qk_norm_rope_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv: Tensor,
    rope: elementwise.QKNormRope,
    column_scales: Tensor,
    unrounded: UnroundedGrads | None = None,
) -> Fp8Rows:
    """Return d(qkv) * column_scales in FP8, without DoRA, given dQ, dK and dV; fill `unrounded`, if it is given."""
    if supports_triton(grads[0].device):
        from launcher.training.kernels import fp8_triton

        args = rope.norms, rope.cos, rope.sin, rope.eps
        return Fp8Rows(*fp8_triton.qk_norm_rope_backward(grads, qkv, *args, column_scales, unrounded))
    out = grads[0].new_empty(len(grads[0]), len(column_scales), dtype=torch.float32)
    elementwise.qk_norm_rope_backward(grads, qkv, rope, out)
    if unrounded is not None:
        unrounded.qkv.copy_(out)
        if unrounded.norms is not None:
            unrounded.norms.zero_()[0] = elementwise.qk_norm_weight_grads(grads, qkv, rope)
    return quantize_rows(out, column_scales)


def matmul(rows: Fp8Rows, codes: Tensor, scales: Tensor | None, dtype: torch.dtype, lora: LoraTerm | None) -> Tensor:
    """Return rows @ codes^T * scales + LoRA's term in `dtype`; codes are [out, in], scales [out] or all 1."""
    if codes.is_cuda and torch.cuda.get_device_capability(codes.device) == (9, 0) and supports_triton(codes.device):
        from launcher.training.kernels import fp8_matmul_triton

        return fp8_matmul_triton.matmul(rows.codes, rows.scales, codes, scales, dtype, lora)
    if codes.is_cuda:
        ones = rows.scales.new_ones(len(codes)) if scales is None else scales
        scale_a, scale_b = rows.scales[:, None], ones[None, :]
        y = torch._scaled_mm(
            rows.codes, codes.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=True
        )
        return y if lora is None else y.addmm_(lora.left, lora.right.t() if lora.is_transposed else lora.right)
    y = (rows.codes.float() @ codes.float().t()) * rows.scales[:, None]
    y = y if scales is None else y * scales
    if lora is not None:
        y = y + lora.left.float() @ (lora.right.t() if lora.is_transposed else lora.right).float()
    return y.to(dtype)


def transpose(codes: Tensor) -> Tensor:
    """Return the transposed matrix, contiguous: tensor cores read FP8 along the summed dimension only."""
    if supports_triton(codes.device):
        from launcher.training.kernels import fp8_matmul_triton

        return fp8_matmul_triton.transpose(codes)
    return codes.t().contiguous()


def project_rows(rows: Fp8Rows, lora_A: Tensor) -> Tensor:
    """Return x_lora = rows @ A^T in A's dtype."""
    if supports_triton(lora_A.device):
        from launcher.training.kernels import fp8_matmul_triton

        return fp8_matmul_triton.project_rows(rows.codes, rows.scales, lora_A.t())
    return (_dequantize(rows) @ lora_A.float().t()).to(lora_A.dtype)


def project_grad_rows(rows: Fp8Rows, grad_B: Tensor) -> Tensor:
    """Return dy (s B) in B's dtype, for rows = dy * column_scales and grad_B = s B / column_scales."""
    if supports_triton(grad_B.device):
        from launcher.training.kernels import fp8_matmul_triton

        return fp8_matmul_triton.project_rows(rows.codes, rows.scales, grad_B)
    return (_dequantize(rows) @ grad_B.float()).to(grad_B.dtype)


def lora_A_grad(rows: Fp8Rows, grad_lora: Tensor) -> Tensor:
    """Return dA [ranks, in] = grad_lora^T x in fp32, possibly as [parts, ranks, in] that are to be summed."""
    if supports_triton(grad_lora.device):
        from launcher.training.kernels import fp8_matmul_triton

        return fp8_matmul_triton.sum_products(rows.codes, rows.scales, grad_lora, None, transposed=False)
    return grad_lora.float().t() @ _dequantize(rows)


def lora_B_grad(rows: Fp8Rows, x_lora: Tensor, column_scales: Tensor) -> Tensor:
    """Return dB / s [out, ranks] = dy^T x_lora in fp32, for rows = dy * column_scales.

    The result may be [parts, out, ranks], to be summed over the parts.
    """
    if supports_triton(x_lora.device):
        from launcher.training.kernels import fp8_matmul_triton

        return fp8_matmul_triton.sum_products(rows.codes, rows.scales, x_lora, column_scales, transposed=True)
    return (_dequantize(rows) / column_scales).t() @ x_lora.float()


def _round_rows(x: Tensor) -> Fp8Rows:
    largest = x.abs().amax(dim=1)
    scales = torch.where(largest > SMALLEST, largest / _LARGEST, 0.0)
    return Fp8Rows((x / torch.where(scales > 0, scales, 1.0)[:, None]).to(DTYPE), scales)


def _dequantize(rows: Fp8Rows) -> Tensor:
    return rows.codes.float() * rows.scales[:, None]


@torch.library.custom_op("launcher::fp8_linear", mutates_args=())
def fp8_linear(x: Tensor, codes: Tensor, scales: Tensor, x_lora: Tensor | None, scaled_B: Tensor | None) -> Tensor:
    """Return x W^T + x_lora (s B)^T for W in FP8; rounds x to FP8."""
    lora = None if x_lora is None or scaled_B is None else LoraTerm(x_lora, scaled_B, is_transposed=True)
    return matmul(quantize_rows(x), codes, scales, x.dtype, lora)


@fp8_linear.register_fake
def _(x: Tensor, codes: Tensor, *_rest: Any) -> Tensor:
    return x.new_empty(len(x), len(codes))


@torch.library.custom_op("launcher::fp8_input_grad", mutates_args=())
def fp8_input_grad(
    grad: Tensor, codes: Tensor, scales: Tensor, grad_lora: Tensor | None, lora_A: Tensor | None
) -> Tensor:
    """Return dx = dy W + dy_lora A for W in FP8; rounds dy to FP8."""
    lora = None if grad_lora is None or lora_A is None else LoraTerm(grad_lora, lora_A, is_transposed=False)
    return matmul(quantize_rows(grad, scales), transpose(codes), None, grad.dtype, lora)


@fp8_input_grad.register_fake
def _(grad: Tensor, codes: Tensor, *_rest: Any) -> Tensor:
    return grad.new_empty(len(grad), codes.shape[1])


@torch.library.custom_op("launcher::dequantize_fp8", mutates_args=())
def dequantize_fp8(
    codes: Tensor, scales: Tensor, _grad_B: Tensor, scaled_B: Tensor, lora_A: Tensor, _after: Tensor | None
) -> Tensor:
    """Return the dense fused weight [[W, s B], [A, 0]], with W converted from FP8; for `_after` see nf4.dequantize."""
    (out_features, ranks), in_features = scaled_B.shape, lora_A.shape[1]
    weight = scaled_B.new_zeros(out_features + ranks, in_features + ranks)
    weight[:out_features, :in_features] = codes.float() * scales[:, None]
    weight[:out_features, in_features:] = scaled_B
    weight[out_features:, :in_features] = lora_A
    return weight


@dequantize_fp8.register_fake
def _(
    _codes: Tensor, _scales: Tensor, _grad_B: Tensor, scaled_B: Tensor, lora_A: Tensor, _after: Tensor | None
) -> Tensor:
    ranks = scaled_B.shape[1]
    return scaled_B.new_empty(len(scaled_B) + ranks, lora_A.shape[1] + ranks)
