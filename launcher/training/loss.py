"""Cross-entropy of the trained positions, summed, without ever holding their logits whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from launcher.choices import LossKernel
from launcher.memory import count_loss_chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What makes logits of hidden states. Some families scale them, some cap them."""

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


# (hidden [trained, features], targets [trained], head) -> sum over positions
Loss = Callable[[Tensor, Tensor, Head], Tensor]
# (logits, which it may overwrite, targets) -> each position's loss, and its derivative by the logits
Differentiate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    """Gradients are made in the forward pass, chunk by chunk, so that each chunk's logits can be thrown away."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, differentiate: Differentiate
    ) -> Tensor:
        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wants_bias else None
        losses: list[Tensor] = []
        size = count_loss_chunk(len(weight))
        for start in range(0, len(hidden), size):
            chunk = slice(start, start + size)
            of_chunk, delta = differentiate(functional.linear(hidden[chunk], weight, bias), targets[chunk])
            losses.append(of_chunk)
            if grad_hidden is not None:
                torch.mm(delta, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                _add_product(grad_weight, delta.T, hidden[chunk])
            if grad_bias is not None:
                grad_bias += delta.sum(0, dtype=torch.float32)
            del delta  # before the next chunk's logits take as much
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return torch.cat(losses).sum() if losses else hidden.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """In place: the head's gradient is its largest tensor. So there is no second backward pass."""
        (scale,) = grads
        hidden, weight, bias = (None if grad is None else grad.mul_(scale) for grad in ctx.saved_tensors)
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            hidden,
            None if weight is None else weight.to(weight_dtype),
            None if bias is None else bias.to(bias_dtype),
            None,
            None,
        )


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Into FP32. On a GPU the product itself adds, so that it is not written and read once more."""
    if total.is_cuda and left.dtype != torch.float32:
        torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, out=total)
    else:
        total += left @ right


def _loss_and_delta(logits: Tensor, targets: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Each position's loss, and its derivative by the logits: softmax less one at the target."""
    wide = _cap(logits.float(), softcap)
    log_sum = torch.logsumexp(wide, dim=-1)
    losses = log_sum - wide.gather(1, targets[:, None]).squeeze(1)
    delta = torch.exp(wide - log_sum[:, None])
    delta.scatter_add_(1, targets[:, None], torch.full_like(delta[:, :1], -1.0))
    if softcap is not None:
        delta *= 1 - (wide / softcap) ** 2  # of the hyperbolic tangent
    return losses, delta.to(logits.dtype)


def _cap(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def chunked_cross_entropy(hidden: Tensor, targets: Tensor, head: Head) -> Tensor:
    """Runs anywhere."""
    return _in_chunks(hidden, targets, head, lambda logits, places: _loss_and_delta(logits, places, head.softcap))


def fused_cross_entropy(hidden: Tensor, targets: Tensor, head: Head) -> Tensor:
    """The same with one kernel for all that is not a product; CUDA only."""
    from launcher.training.loss_kernel import replace_logits

    return _in_chunks(
        hidden, targets, head, lambda logits, places: (replace_logits(logits, places, head.softcap), logits)
    )


def _in_chunks(hidden: Tensor, targets: Tensor, head: Head, differentiate: Differentiate) -> Tensor:
    weight, bias = head.weight, head.bias
    if not torch.is_grad_enabled():  # autograd tells a function what could need a gradient, not whether any is wanted
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    total: Tensor = _ChunkedLinearCrossEntropy.apply(hidden, weight, bias, targets, differentiate)
    return total


def full_logits_cross_entropy(hidden: Tensor, targets: Tensor, head: Head) -> Tensor:
    """What everybody does: for comparison, and as the reference of the others."""
    return functional.cross_entropy(make_logits(hidden, head), targets, reduction="sum")


def make_logits(hidden: Tensor, head: Head) -> Tensor:
    """All of them, in FP32."""
    scaled = hidden if head.scale == 1.0 else hidden * head.scale
    return _cap(functional.linear(scaled, head.weight, head.bias).float(), head.softcap)


LOSSES: dict[LossKernel, Loss] = {
    "chunked": chunked_cross_entropy,
    "fused": fused_cross_entropy,
    "full_logits": full_logits_cross_entropy,
}


def sum_loss(kernel: LossKernel, hidden: Tensor, targets: Tensor, head: Head) -> Tensor:
    """In the dtype that autocast asks for where it is on, cast here once: the kernels see one dtype throughout."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype
    with torch.autocast(device, enabled=False):
        if head.scale != 1.0:
            hidden = hidden * head.scale
        bias = None if head.bias is None else head.bias.to(dtype)
        cast_head = Head(weight=head.weight.to(dtype), bias=bias, softcap=head.softcap)
        return LOSSES[kernel](hidden.to(dtype), targets, cast_head)
