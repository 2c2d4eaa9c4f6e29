"""Summed cross-entropy of the trained positions, computed in chunks so that not all logits exist at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from launcher.core.choices import LossKernel
from launcher.plan.estimate.memory.recipe import count_loss_chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class LMHead:
    """The LM head, with the scale and softcap that some families apply to logits."""

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    has_large_chunks: bool = False  # see has_large_chunks of the memory estimate
    new_ids: Tensor | None = None  # tokens whose rows are `new_rows` instead of those of `weight`
    new_rows: Tensor | None = None


# (hidden [trained, features], targets [trained], head) -> sum over positions
Loss = Callable[[Tensor, Tensor, LMHead], Tensor]
# (logits, which may be overwritten, targets) -> loss per position, and its gradient with respect to the logits
LossAndGrad = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    """Computes gradients in the forward pass, chunk by chunk, so that each chunk's logits can be freed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        new_rows: Tensor | None,
        new_ids: Tensor | None,
        targets: Tensor,
        loss_and_grad: LossAndGrad,
        has_large_chunks: bool,
    ) -> Tensor:
        needs_hidden, needs_weight, needs_bias, needs_rows, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs_bias else None
        grad_rows = torch.zeros_like(new_rows, dtype=torch.float32) if new_rows is not None and needs_rows else None
        losses: list[Tensor] = []
        size = count_loss_chunk(len(weight), is_large=has_large_chunks and needs_weight)
        for start in range(0, len(hidden), size):
            chunk = slice(start, start + size)
            # Without a name here, so that `loss_and_grad` can free the logits.
            chunk_losses, grad_logits = loss_and_grad(
                _project(hidden[chunk], weight, bias, new_rows, new_ids), targets[chunk]
            )
            losses.append(chunk_losses)
            if new_rows is not None:
                grad_new = grad_logits[:, new_ids]
                grad_logits[:, new_ids] = 0
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[chunk])
                if new_rows is not None:
                    grad_hidden[chunk] += grad_new @ new_rows
            if grad_rows is not None:
                _add_matmul(grad_rows, grad_new.T, hidden[chunk])
            if grad_weight is not None:
                _add_matmul(grad_weight, grad_logits.T, hidden[chunk])
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=torch.float32)
            del grad_logits  # before the next chunk's logits are allocated
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias, grad_rows)
        ctx.dtypes = hidden.dtype, *(None if tensor is None else tensor.dtype for tensor in (weight, bias, new_rows))
        return torch.cat(losses).sum() if losses else hidden.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients from forward, scaled in place to save memory; a second backward is not possible."""
        (scale,) = grads
        grads = tuple(None if grad is None else grad.mul_(scale) for grad in ctx.saved_tensors)
        cast = (None if grad is None else grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True))
        return (*cast, None, None, None, None)


def _project(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, new_rows: Tensor | None, new_ids: Tensor | None
) -> Tensor:
    logits = functional.linear(hidden, weight, bias)
    if new_rows is not None:
        logits[:, new_ids] = functional.linear(hidden, new_rows)
    return logits


def _add_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to an FP32 tensor in place; for 16-bit factors on a GPU by addmm, without a temporary."""
    if total.is_cuda and left.dtype != torch.float32:
        torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, out=total)
    else:
        total += left @ right


def _loss_and_grad(logits: Tensor, targets: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Return the loss per position and its gradient with respect to the logits: softmax(logits) - onehot(target)."""
    capped = _softcap(logits.float(), softcap)
    lse = torch.logsumexp(capped, dim=-1)
    losses = lse - capped.gather(1, targets[:, None]).squeeze(1)
    grad = torch.exp(capped - lse[:, None])
    grad.scatter_add_(1, targets[:, None], torch.full_like(grad[:, :1], -1.0))
    if softcap is not None:
        grad *= 1 - (capped / softcap) ** 2  # derivative of tanh
    return losses, grad.to(logits.dtype)


def _softcap(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def chunked_cross_entropy(hidden: Tensor, targets: Tensor, head: LMHead) -> Tensor:
    """Return the summed cross-entropy, computed chunk by chunk in plain torch, on any device."""
    return _in_chunks(hidden, targets, head, lambda logits, targets: _loss_and_grad(logits, targets, head.softcap))


def fused_cross_entropy(hidden: Tensor, targets: Tensor, head: LMHead) -> Tensor:
    """Return the summed cross-entropy, computed chunk by chunk with a Triton kernel between the matmuls; CUDA only."""
    from launcher.training.kernels.cross_entropy_triton import cross_entropy_in_place

    return _in_chunks(
        hidden, targets, head, lambda logits, targets: (cross_entropy_in_place(logits, targets, head.softcap), logits)
    )


def _in_chunks(hidden: Tensor, targets: Tensor, head: LMHead, loss_and_grad: LossAndGrad) -> Tensor:
    tensors: tuple[Tensor | None, ...] = (hidden, head.weight, head.bias, head.new_rows)
    if not torch.is_grad_enabled():  # needs_input_grad ignores torch.no_grad()
        tensors = tuple(None if tensor is None else tensor.detach() for tensor in tensors)
    total: Tensor = _ChunkedLinearCrossEntropy.apply(
        *tensors, head.new_ids, targets, loss_and_grad, head.has_large_chunks
    )
    return total


def full_logits_cross_entropy(hidden: Tensor, targets: Tensor, head: LMHead) -> Tensor:
    """Return the summed cross-entropy from all logits at once, as the reference for the chunked losses."""
    return functional.cross_entropy(compute_logits(hidden, head), targets, reduction="sum")


def compute_logits(hidden: Tensor, head: LMHead) -> Tensor:
    """Return all logits in FP32."""
    scaled = hidden if head.scale == 1.0 else hidden * head.scale
    logits = functional.linear(scaled, head.weight, head.bias)
    if head.new_rows is not None and head.new_ids is not None:
        logits = logits.index_copy(1, head.new_ids, functional.linear(scaled, head.new_rows).to(logits))
    return _softcap(logits.float(), head.softcap)


LOSSES: dict[LossKernel, Loss] = {
    "chunked": chunked_cross_entropy,
    "fused": fused_cross_entropy,
    "full_logits": full_logits_cross_entropy,
}


def trains_in_fp32(head: LMHead, compute_dtype: torch.dtype) -> bool:
    """Return whether a head is trained in more precision than it is computed in; its loss has large chunks then."""
    return head.weight.requires_grad and head.weight.dtype.itemsize > compute_dtype.itemsize


def compute_summed_loss(kernel: LossKernel, hidden: Tensor, targets: Tensor, head: LMHead) -> Tensor:
    """Return the summed loss, computed in autocast's dtype, or in the head's dtype if autocast is disabled."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype
    with torch.autocast(device, enabled=False):
        if head.scale != 1.0:
            hidden = hidden * head.scale
        bias, new_rows = (None if tensor is None else tensor.to(dtype) for tensor in (head.bias, head.new_rows))
        is_large = trains_in_fp32(head, dtype)
        cast_head = replace(
            head, weight=head.weight.to(dtype), bias=bias, new_rows=new_rows, scale=1.0, has_large_chunks=is_large
        )
        return LOSSES[kernel](hidden.to(dtype), targets, cast_head)
