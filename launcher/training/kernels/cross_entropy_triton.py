"""Triton cross-entropy that overwrites the logits with their gradient: two kernels instead of six passes in torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_READ_BLOCK, _WRITE_BLOCK, _WARPS = 8192, 4096, 8


@triton.jit  # type: ignore[untyped-decorator]
def _softcap(logits, softcap, has_softcap: tl.constexpr):  # type: ignore[no-untyped-def]
    if has_softcap:
        # tanh from exp, because Triton has no tanh for every GPU
        tanh = 2.0 / (1.0 + tl.exp(-2.0 * logits / softcap)) - 1.0
        logits = softcap * tanh
    return logits


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy_kernel(  # type: ignore[no-untyped-def]
    logits, targets, losses, lse_ptr, row_stride, vocab_size, softcap, has_softcap: tl.constexpr, block: tl.constexpr
):
    """Compute the loss and the log-sum-exp of each row, with one program per row."""
    row = tl.program_id(0)
    row_ptr = logits + tl.cast(row, tl.int64) * row_stride
    target = tl.load(targets + row)
    if target < 0:  # padding
        tl.store(losses + row, 0.0)
    else:
        m, total = -float("inf"), 0.0
        for start in range(0, vocab_size, block):
            columns = start + tl.arange(0, block)
            row_logits = tl.load(row_ptr + columns, mask=columns < vocab_size, other=-float("inf")).to(tl.float32)
            row_logits = tl.where(columns < vocab_size, _softcap(row_logits, softcap, has_softcap), -float("inf"))
            m_new = tl.maximum(m, tl.max(row_logits, axis=0))
            total = total * tl.exp(m - m_new) + tl.sum(tl.exp(row_logits - m_new), axis=0)
            m = m_new
        lse = m + tl.log(total)
        tl.store(losses + row, lse - _softcap(tl.load(row_ptr + target).to(tl.float32), softcap, has_softcap))
        tl.store(lse_ptr + row, lse)


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy_backward_kernel(  # type: ignore[no-untyped-def]
    logits, targets, lse_ptr, row_stride, vocab_size, softcap, has_softcap: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(1)
    columns = tl.program_id(0) * block + tl.arange(0, block)
    block_ptr = logits + tl.cast(row, tl.int64) * row_stride + columns
    target = tl.load(targets + row)
    mask = columns < vocab_size
    if target < 0:
        tl.store(block_ptr, tl.zeros([block], logits.dtype.element_ty), mask=mask)
    else:
        row_logits = _softcap(tl.load(block_ptr, mask=mask, other=0.0).to(tl.float32), softcap, has_softcap)
        grad = tl.exp(row_logits - tl.load(lse_ptr + row)) - tl.where(columns == target, 1.0, 0.0)
        if has_softcap:
            grad *= 1.0 - (row_logits / softcap) * (row_logits / softcap)
        tl.store(block_ptr, grad.to(logits.dtype.element_ty), mask=mask)


def cross_entropy_in_place(logits: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    """Return the loss per position and overwrite the logits with their gradient; both are 0 for negative targets."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits) == 0:
        return losses
    lse = torch.empty_like(losses)
    vocab_size, has_softcap = logits.shape[1], softcap is not None
    shape = logits.stride(0), vocab_size, softcap or 0.0
    _cross_entropy_kernel[(len(logits),)](
        logits, targets, losses, lse, *shape, has_softcap=has_softcap, block=_READ_BLOCK, num_warps=_WARPS
    )
    grid = (triton.cdiv(vocab_size, _WRITE_BLOCK), len(logits))
    _cross_entropy_backward_kernel[grid](
        logits, targets, lse, *shape, has_softcap=has_softcap, block=_WRITE_BLOCK, num_warps=_WARPS
    )
    return losses
