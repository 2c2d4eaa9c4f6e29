"""Logits -> each position's loss, and in their place their gradient: one kernel on a GPU, instead of six passes."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 16_384, 32
_PROGRAMS_PER_UNIT = 1


@triton.jit  # type: ignore[untyped-decorator]
def _cap(values, softcap, caps: tl.constexpr):  # type: ignore[no-untyped-def]
    if caps:
        # tanh by its exponential: Triton has none of its own for every GPU
        ratio = 2.0 / (1.0 + tl.exp(-2.0 * values / softcap)) - 1.0
        values = softcap * ratio
    return values


@triton.jit  # type: ignore[untyped-decorator]
def _replace_logits(  # type: ignore[no-untyped-def]
    logits, targets, losses, num_rows, row_stride, num_logits, softcap, caps: tl.constexpr, block: tl.constexpr
):
    """A program takes row after row: as many rows as there are programs stay in the cache until they are read again.

    The target's logit is read first: the first reduction keeps warps behind it together.
    """
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        here = logits + tl.cast(row, tl.int64) * row_stride
        target = tl.load(targets + row)
        if target < 0:  # padding
            tl.store(losses + row, 0.0)
            for start in range(0, num_logits, block):
                places = start + tl.arange(0, block)
                tl.store(here + places, tl.zeros([block], logits.dtype.element_ty), mask=places < num_logits)
        else:
            at_target = _cap(tl.load(here + target).to(tl.float32), softcap, caps)
            highest, total = -float("inf"), 0.0
            for start in range(0, num_logits, block):
                places = start + tl.arange(0, block)
                values = tl.load(here + places, mask=places < num_logits, other=-float("inf")).to(tl.float32)
                values = tl.where(places < num_logits, _cap(values, softcap, caps), -float("inf"))
                new_highest = tl.maximum(highest, tl.max(values))
                total = total * tl.exp(highest - new_highest) + tl.sum(tl.exp(values - new_highest))
                highest = new_highest
            log_sum = highest + tl.log(total)
            tl.store(losses + row, log_sum - at_target)
            for start in range(0, num_logits, block):
                places = start + tl.arange(0, block)
                values = tl.load(here + places, mask=places < num_logits, other=0.0).to(tl.float32)
                values = _cap(values, softcap, caps)
                delta = tl.exp(values - log_sum) - tl.where(places == target, 1.0, 0.0)
                if caps:
                    delta *= 1.0 - (values / softcap) * (values / softcap)
                tl.store(here + places, delta.to(logits.dtype.element_ty), mask=places < num_logits)


@cache
def _count_programs(device: torch.device) -> int:
    return _PROGRAMS_PER_UNIT * int(torch.cuda.get_device_properties(device).multi_processor_count)


def replace_logits(logits: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    """Each position's loss; the logits become their gradients. Those of a negative target are none."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits) == 0:
        return losses
    _replace_logits[(min(len(logits), _count_programs(logits.device)),)](
        logits,
        targets,
        losses,
        len(logits),
        logits.stride(0),
        logits.shape[1],
        softcap or 0.0,
        caps=softcap is not None,
        block=_BLOCK,
        num_warps=_WARPS,
    )
    return losses
