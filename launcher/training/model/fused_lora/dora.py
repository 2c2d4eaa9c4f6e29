"""DoRA: y = m / ||W + s B A|| * (W + s B A) x, with a trained magnitude m per output row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from launcher.training.kernels.elementwise import scale_columns, scale_columns_backward
from launcher.training.model.fused_lora.weights import ADAPTER_NAME


def apply_magnitude(y: Tensor, member: Any, row_norms: Tensor, correction: Tensor | None = None) -> Tensor:
    """Scale y by m / ||W + s B A|| and add the dropout correction. The norm gets no gradient, as in the DoRA paper."""
    scale = member.lora_magnitude_vector[ADAPTER_NAME].weight / row_norms
    if not torch.compiler.is_compiling():
        scaled: Tensor = _ScaleColumns.apply(y, scale, correction)
        return scaled
    result = (y * scale).to(y.dtype)  # the compiler fuses it with what follows
    return result if correction is None else result + correction


class _ScaleColumns(torch.autograd.Function):
    """Autograd function for y * scale + correction, with one pass over memory in each direction."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, scale: Tensor, correction: Tensor | None) -> Tensor:
        out = torch.empty_like(y, memory_format=torch.contiguous_format)
        scale_columns(y, scale, correction, out)
        ctx.save_for_backward(y, scale)
        ctx.has_correction = correction is not None
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        grad_output = grads[0].contiguous()
        y, scale = ctx.saved_tensors
        y_grad = torch.empty_like(y, memory_format=torch.contiguous_format)
        scale_grad = scale_columns_backward(grad_output, y, scale, y_grad)
        return y_grad, scale_grad, grad_output if ctx.has_correction else None
