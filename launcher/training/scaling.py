"""What DoRA does behind a product: a trained length for each row of the matrix, whatever W + sBA has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from launcher.training.blocks import ADAPTER
from launcher.training.layer_passes import scale, scale_back


def normalise(output: Tensor, member: Any, lengths: Tensor, rest: Tensor | None = None) -> Tensor:
    """The norm is taken for a constant, as in the paper. The rest is added behind that."""
    scales = member.lora_magnitude_vector[ADAPTER].weight / lengths
    if not torch.compiler.is_compiling():
        scaled: Tensor = _Scaled.apply(output, scales, rest)
        return scaled
    result = (output * scales).to(output.dtype)  # the compiler joins it with what follows
    return result if rest is None else result + rest


class _Scaled(torch.autograd.Function):
    """One pass each way."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, scales: Tensor, rest: Tensor | None) -> Tensor:
        out = torch.empty_like(y, memory_format=torch.contiguous_format)
        scale(y, scales, rest, out)
        ctx.save_for_backward(y, scales)
        ctx.is_added = rest is not None
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        grad = grads[0].contiguous()
        y, scales = ctx.saved_tensors
        y_grad = torch.empty_like(y, memory_format=torch.contiguous_format)
        of_scales = scale_back(grad, y, scales, y_grad)
        return y_grad, of_scales, grad if ctx.is_added else None
