"""Triton kernel that builds a fused weight [[W, s B], [A, 0]] from NF4 weights and the adapter, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from launcher.training.kernels.nf4 import OUTER_GROUP_SIZE, Nf4Weights

_GROUPS = 32  # quantization groups per program


@triton.jit  # type: ignore[untyped-decorator]
def _dequantize_kernel(  # type: ignore[no-untyped-def]
    weight, codes, levels, absmax, absmax_levels, absmax_scale, absmax_offset, scaled_B, lora_A, num_groups, b_numel,
    a_numel, out_features, in_features_div_8, ranks_div_8, group: tl.constexpr, outer_group: tl.constexpr,
    groups: tl.constexpr,
):  # fmt: skip
    """Build [[W, s B], [A, 0]]: the first programs dequantize W, the next ones copy s B, the last ones copy A."""
    size: tl.constexpr = groups * group
    num_dequantizing, num_copying_b = tl.cdiv(num_groups, groups), tl.cdiv(b_numel, size)
    program = tl.program_id(0)
    in_features, ranks = 8 * in_features_div_8, 8 * ranks_div_8  # so that the compiler knows that rows are aligned
    stride = in_features + ranks
    if program < num_dequantizing:
        group_ids = program * groups + tl.arange(0, groups)
        group_mask = group_ids < num_groups
        scale = tl.load(absmax_levels + tl.load(absmax + group_ids, mask=group_mask, other=0).to(tl.int32))
        scale = scale * tl.load(absmax_scale + group_ids // outer_group, mask=group_mask, other=0.0)
        scale = (scale + tl.load(absmax_offset + group_ids // outer_group, mask=group_mask, other=0.0))[:, None]
        offsets = group_ids[:, None] * (group // 2) + tl.arange(0, group // 2)[None, :]
        byte = tl.load(codes + offsets, mask=group_mask[:, None], other=0).to(tl.int32)
        base = tl.interleave(tl.load(levels + (byte >> 4)) * scale, tl.load(levels + (byte & 15)) * scale)
        base_indices = group_ids[:, None] * group + tl.arange(0, group)[None, :]
        address = weight + (base_indices // in_features).to(tl.int64) * stride + base_indices % in_features
        tl.store(address, base.to(weight.dtype.element_ty), mask=group_mask[:, None])
    elif program < num_dequantizing + num_copying_b:
        indices = (program - num_dequantizing) * size + tl.arange(0, size)
        rows, columns = indices // ranks, indices % ranks
        mask = indices < b_numel
        values = tl.load(scaled_B + indices, mask=mask)
        tl.store(weight + rows.to(tl.int64) * stride + in_features + columns, values, mask=mask)
    else:
        indices = (program - num_dequantizing - num_copying_b) * size + tl.arange(0, size)
        mask = indices < a_numel
        values = tl.load(lora_A + indices, mask=mask)
        tl.store(weight + out_features.to(tl.int64) * stride + indices, values, mask=mask)


def dequantize_into(weight: Tensor, stored: Nf4Weights) -> None:
    """Write the dense fused weight into `weight`."""
    num_groups, b_numel, a_numel = stored.absmax.numel(), stored.scaled_B.numel(), stored.lora_A.numel()
    out_features, ranks = stored.scaled_B.shape
    group = 2 * stored.codes.numel() // num_groups
    num_copying = triton.cdiv(b_numel, _GROUPS * group) + triton.cdiv(a_numel, _GROUPS * group)
    _dequantize_kernel[(triton.cdiv(num_groups, _GROUPS) + num_copying,)](
        weight,
        *stored,
        num_groups,
        b_numel,
        a_numel,
        out_features,
        (weight.shape[1] - ranks) // 8,
        ranks // 8,
        group=group,
        outer_group=OUTER_GROUP_SIZE,
        groups=_GROUPS,
        enable_fp_fusion=False,  # bitsandbytes rounds between the scale and the offset
    )
