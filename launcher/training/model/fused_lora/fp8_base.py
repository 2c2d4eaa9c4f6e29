"""Frozen linear layers whose weights are stored in FP8; see kernels/fp8.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher.training.kernels.fp8 import DTYPE, fp8_input_grad, fp8_linear, is_storable, quantize_rows
from launcher.training.model.fused_lora.reference import is_reference_forward


class Fp8Linear(nn.Linear):
    """A frozen linear layer whose weight is stored in FP8. `weight` dequantizes it, for PEFT and for reference results.

    The FP8 codes are not registered as a buffer: DDP would broadcast them, and NCCL does not support FP8.
    """

    codes: Tensor  # [out, in]
    scales: Tensor  # [out]
    compute_dtype: torch.dtype

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight in the compute dtype."""
        return (self.codes.float() * self.scales[:, None]).to(self.compute_dtype)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # nn.Linear's name
        """Return x W^T + bias, by an FP8 matmul except in the reference forward."""
        if is_reference_forward():
            return functional.linear(input, self.weight, self.bias)
        y: Tensor = _Fp8Matmul.apply(input.flatten(0, -2).to(self.compute_dtype), self.codes, self.scales)
        y = y.unflatten(0, input.shape[:-1])
        return y if self.bias is None else y + self.bias


class _Fp8Matmul(torch.autograd.Function):
    """Autograd function that maps x [tokens, in] to x W^T, where W is stored in FP8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scales)
        return fp8_linear(x, codes, scales, None, None)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        codes, scales = ctx.saved_tensors
        return fp8_input_grad(grads[0].contiguous(), codes, scales, None, None), None, None


def can_round(linear: Any) -> bool:
    """Return whether this is a frozen layer whose weight can be stored in FP8."""
    if type(linear) is not nn.Linear or linear.weight.requires_grad:
        return False
    return linear.weight.dtype.is_floating_point and is_storable(linear.in_features, linear.out_features)


@torch.no_grad()
def round_linears(linears: list[Any]) -> tuple[Tensor, Tensor]:
    """Turn linear layers into Fp8Linear, whose codes and scales are views of stacked tensors; return these tensors."""
    weight, num_outputs = linears[0].weight, sum(linear.out_features for linear in linears)
    codes = torch.empty(num_outputs, weight.shape[1], dtype=DTYPE, device=weight.device)
    scales = torch.empty(num_outputs, dtype=torch.float32, device=weight.device)
    row = 0
    for linear in linears:
        rows = slice(row, row + linear.out_features)
        rounded = quantize_rows(linear.weight)
        codes[rows].copy_(rounded.codes)
        scales[rows].copy_(torch.where(rounded.scales > 0, rounded.scales, 1.0))  # gradients are divided by them
        linear.compute_dtype = linear.weight.dtype
        del linear.weight
        linear.__class__ = Fp8Linear
        linear.codes, linear.scales = codes[rows], scales[rows]
        row += linear.out_features
    return codes, scales


def round_remaining(layers: list[nn.Module]) -> int:
    """Store the remaining frozen linear layers in FP8, where their sizes allow it; return how many were changed."""
    linears = [module for layer in layers for module in layer.modules() if can_round(module)]
    for linear in linears:
        round_linears([linear])
    return len(linears)
