"""Logits -> each position's loss, and in their place their gradient: one kernel on a GPU, instead of six passes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_READ, _WRITTEN, _WARPS = 8192, 4096, 8  # logits at once


@triton.jit  # type: ignore[untyped-decorator]
def _cap(values, softcap, caps: tl.constexpr):  # type: ignore[no-untyped-def]
    if caps:
        # tanh by its exponential: Triton has none of its own for every GPU
        ratio = 2.0 / (1.0 + tl.exp(-2.0 * values / softcap)) - 1.0
        values = softcap * ratio
    return values


@triton.jit  # type: ignore[untyped-decorator]
def _sum_up(  # type: ignore[no-untyped-def]
    logits, targets, losses, log_sums, row_stride, num_logits, softcap, caps: tl.constexpr, block: tl.constexpr
):
    """A program takes one row."""
    row = tl.program_id(0)
    here = logits + tl.cast(row, tl.int64) * row_stride
    target = tl.load(targets + row)
    if target < 0:  # padding
        tl.store(losses + row, 0.0)
    else:
        highest, total = -float("inf"), 0.0
        for start in range(0, num_logits, block):
            places = start + tl.arange(0, block)
            values = tl.load(here + places, mask=places < num_logits, other=-float("inf")).to(tl.float32)
            values = tl.where(places < num_logits, _cap(values, softcap, caps), -float("inf"))
            new_highest = tl.maximum(highest, tl.max(values, axis=0))
            total = total * tl.exp(highest - new_highest) + tl.sum(tl.exp(values - new_highest), axis=0)
            highest = new_highest
        log_sum = highest + tl.log(total)
        tl.store(losses + row, log_sum - _cap(tl.load(here + target).to(tl.float32), softcap, caps))
        tl.store(log_sums + row, log_sum)


@triton.jit  # type: ignore[untyped-decorator]
def _differentiate(  # type: ignore[no-untyped-def]
    logits, targets, log_sums, row_stride, num_logits, softcap, caps: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(1)
    places = tl.program_id(0) * block + tl.arange(0, block)
    here = logits + tl.cast(row, tl.int64) * row_stride + places
    target = tl.load(targets + row)
    inside = places < num_logits
    if target < 0:
        tl.store(here, tl.zeros([block], logits.dtype.element_ty), mask=inside)
    else:
        values = _cap(tl.load(here, mask=inside, other=0.0).to(tl.float32), softcap, caps)
        delta = tl.exp(values - tl.load(log_sums + row)) - tl.where(places == target, 1.0, 0.0)
        if caps:
            delta *= 1.0 - (values / softcap) * (values / softcap)
        tl.store(here, delta.to(logits.dtype.element_ty), mask=inside)


def replace_logits(logits: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    """Each position's loss; the logits become their gradients. Those of a negative target are none."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits) == 0:
        return losses
    log_sums = torch.empty_like(losses)
    num_logits, caps = logits.shape[1], softcap is not None
    shape = logits.stride(0), num_logits, softcap or 0.0
    _sum_up[(len(logits),)](logits, targets, losses, log_sums, *shape, caps=caps, block=_READ, num_warps=_WARPS)
    grid = (triton.cdiv(num_logits, _WRITTEN), len(logits))
    _differentiate[grid](logits, targets, log_sums, *shape, caps=caps, block=_WRITTEN, num_warps=_WARPS)
    return losses
