"""A block's matrix from four bits a weight, and from the adapter's rows and columns, in one launch: see packed.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from launcher.training.packed import Stored

_GROUPS = 32  # of weights that have one scale, for each program


@triton.jit  # type: ignore[untyped-decorator]
def _unpack(  # type: ignore[no-untyped-def]
    matrix,
    codes,
    levels,
    scales,
    scale_levels,
    outer_scales,
    means,
    right,
    below,
    num_groups,
    num_right,
    num_below,
    num_out,
    eighth_in,
    eighth_ranks,
    group: tl.constexpr,
    outer_group: tl.constexpr,
    groups: tl.constexpr,
):
    """The first programs unpack weights, the next copy the columns at their right, the last the rows below them."""
    size: tl.constexpr = groups * group
    num_unpacking, num_beside = tl.cdiv(num_groups, groups), tl.cdiv(num_right, size)
    program = tl.program_id(0)
    num_in, ranks = 8 * eighth_in, 8 * eighth_ranks  # so the compiler sees where rows begin, and stores more at a time
    stride = num_in + ranks
    if program < num_unpacking:
        here = program * groups + tl.arange(0, groups)
        real = here < num_groups
        scale = tl.load(scale_levels + tl.load(scales + here, mask=real, other=0).to(tl.int32))
        scale = scale * tl.load(outer_scales + here // outer_group, mask=real, other=0.0)
        scale = (scale + tl.load(means + here // outer_group, mask=real, other=0.0))[:, None]
        places = here[:, None] * (group // 2) + tl.arange(0, group // 2)[None, :]
        both = tl.load(codes + places, mask=real[:, None], other=0).to(tl.int32)
        weights = tl.interleave(tl.load(levels + (both >> 4)) * scale, tl.load(levels + (both & 15)) * scale)
        order = here[:, None] * group + tl.arange(0, group)[None, :]
        address = matrix + (order // num_in).to(tl.int64) * stride + order % num_in
        tl.store(address, weights.to(matrix.dtype.element_ty), mask=real[:, None])
    elif program < num_unpacking + num_beside:
        numbers = (program - num_unpacking) * size + tl.arange(0, size)
        rows, columns = numbers // ranks, numbers % ranks
        known = numbers < num_right
        values = tl.load(right + numbers, mask=known)
        tl.store(matrix + rows.to(tl.int64) * stride + num_in + columns, values, mask=known)
    else:
        numbers = (program - num_unpacking - num_beside) * size + tl.arange(0, size)
        known = numbers < num_below
        values = tl.load(below + numbers, mask=known)
        tl.store(matrix + num_out.to(tl.int64) * stride + numbers, values, mask=known)


def unpack_into(matrix: Tensor, stored: Stored) -> None:
    codes, _, scales, _, outer_scales, _, right, below = stored
    num_groups, num_right, num_below = scales.numel(), right.numel(), below.numel()
    num_out, ranks = right.shape
    group = 2 * codes.numel() // num_groups
    num_beside = triton.cdiv(num_right, _GROUPS * group) + triton.cdiv(num_below, _GROUPS * group)
    _unpack[(triton.cdiv(num_groups, _GROUPS) + num_beside,)](
        matrix,
        *stored,
        num_groups,
        num_right,
        num_below,
        num_out,
        (matrix.shape[1] - ranks) // 8,
        ranks // 8,
        group=group,
        outer_group=num_groups // outer_scales.numel(),
        groups=_GROUPS,
        enable_fp_fusion=False,  # bitsandbytes rounds between a scale and its mean
    )
