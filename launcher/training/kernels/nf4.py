"""NF4 base weights (QLoRA): a fused weight is dequantized before each of its matmuls and freed afterwards.

bitsandbytes stores two 4-bit indices per byte, the first in the upper half, into a table of 16 levels; one scale
(absmax) per group of 64 weights; and, with double quantization, these scales minus their mean as 8-bit indices into a
table of 256 levels, with an fp32 scale per 256 of them. Our dequantization equals that of bitsandbytes bit for bit;
theirs cannot write into a fused weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from launcher.core.choices import NF4_GROUP_SIZES
from launcher.training.kernels.availability import supports_triton
from launcher.training.kernels.fp8 import Fp8Weights, dequantize_fp8

GROUP_SIZE, OUTER_GROUP_SIZE = NF4_GROUP_SIZES


class Nf4Weights(NamedTuple):
    """A fused weight [[W, s B], [A, 0]] whose W is stored in NF4; fields are ordered as `dequantize`'s arguments."""

    codes: Tensor  # uint8, two weights each
    levels: Tensor  # [16], fp32
    absmax: Tensor  # [groups], uint8
    absmax_levels: Tensor  # [256], fp32
    absmax_scale: Tensor  # [groups / 256], fp32
    absmax_offset: Tensor  # [groups / 256], fp32
    scaled_B: Tensor  # [out, ranks]
    lora_A: Tensor  # [ranks, in + ranks], with the zeros to its right


# A fused weight as it is stored: one dense tensor, or the tensors of Nf4Weights or Fp8Weights. A tuple for autograd.
StoredWeights = tuple[Tensor, ...]


@torch.library.custom_op("launcher::dequantize", mutates_args=())
def dequantize(
    codes: Tensor,
    levels: Tensor,
    absmax: Tensor,
    absmax_levels: Tensor,
    absmax_scale: Tensor,
    absmax_offset: Tensor,
    scaled_B: Tensor,
    lora_A: Tensor,
    _after: Tensor | None,
) -> Tensor:
    """Return the dense fused weight [[W, s B], [A, 0]], with W dequantized from NF4.

    `_after` is not read. In the backward pass it is a gradient: this dependency keeps torch.compile from reusing the
    weight of the forward pass, which would have to stay in memory until then.
    """
    out_features, ranks = scaled_B.shape
    in_features = lora_A.shape[1] - ranks
    weight = scaled_B.new_empty(out_features + ranks, in_features + ranks)
    if supports_triton(scaled_B.device):
        from launcher.training.kernels.nf4_triton import dequantize_into

        stored = Nf4Weights(codes, levels, absmax, absmax_levels, absmax_scale, absmax_offset, scaled_B, lora_A)
        dequantize_into(weight, stored)
        return weight
    outer_groups = torch.arange(len(absmax), device=absmax.device) // OUTER_GROUP_SIZE
    group_scales = absmax_levels[absmax.long()] * absmax_scale[outer_groups] + absmax_offset[outer_groups]
    indices = torch.stack((codes >> 4, codes & 15), dim=1).long()
    base = levels[indices].view(len(absmax), -1) * group_scales.view(-1, 1)
    weight[:out_features, :in_features] = base.view(out_features, in_features)
    weight[:out_features, in_features:] = scaled_B
    weight[out_features:] = lora_A
    return weight


@dequantize.register_fake
def _(*arguments: Any) -> Tensor:
    scaled_b, lora_a = arguments[6:8]
    weight: Tensor = scaled_b.new_empty(len(scaled_b) + scaled_b.shape[1], lora_a.shape[1])
    return weight


def materialize(stored: StoredWeights, after: Tensor | None = None) -> Tensor:
    """Return the fused weight as a dense tensor, dequantized if necessary; for `after` see `dequantize`."""
    if len(stored) == 1:
        return stored[0]
    return dequantize_fp8(*stored, after) if is_fp8(stored) else dequantize(*stored, after)


def prepare_weight(stored: StoredWeights, after: Tensor | None = None) -> list[Tensor]:
    """Return the tensors of a fused weight for fused_projections.view_weight: FP8 as stored, NF4 dequantized."""
    return list(stored) if is_fp8(stored) else [materialize(stored, after)]


def is_fp8(stored: StoredWeights) -> bool:
    """Return whether the base's weights are stored in FP8."""
    return len(stored) == len(Fp8Weights._fields)


def is_lora_4bit(module: Any) -> bool:
    """Return whether a module is PEFT's LoRA layer around a 4-bit layer of bitsandbytes, without importing either."""
    return type(module).__module__ == "peft.tuners.lora.bnb" and type(module).__name__ == "Linear4bit"


def is_fusable_4bit(base: Any, dtype: torch.dtype) -> bool:
    """Return whether a 4-bit layer can be fused: it needs double quantization, this dtype and only complete groups."""
    if type(base).__name__ != "Linear4bit":
        return False
    weight, state = base.weight, getattr(base.weight, "quant_state", None)
    if state is None or not state.nested or weight.dtype != torch.uint8 or state.dtype != dtype:
        return False
    if getattr(state, "packing_format_for_cpu", False) or base.compute_dtype not in (None, dtype):
        return False
    if weight.device.type != "cpu" and not supports_triton(weight.device):
        return False
    num_weights = base.in_features * base.out_features
    fits = num_weights % (state.blocksize * state.state2.blocksize) == 0 and base.in_features % 8 == 0
    return fits and tuple(state.shape) == (base.out_features, base.in_features)


def concat_4bit_weights(members: list[Any], ranks: int) -> Nf4Weights:
    """Concatenate the quantized weights of several layers; the layers' own tensors become views of the result."""
    weights = [member.base_layer.weight for member in members]
    states = [weight.quant_state for weight in weights]
    codes = torch.cat([weight.data.flatten() for weight in weights])
    absmax = torch.cat([state.absmax for state in states])
    absmax_scale = torch.cat([state.state2.absmax for state in states])
    absmax_offset = torch.cat([state.offset.float().expand(len(state.state2.absmax)) for state in states])
    for weight, state, codes_view, absmax_view, absmax_scale_view in zip(
        weights,
        states,
        codes.split([weight.numel() for weight in weights]),
        absmax.split([len(state.absmax) for state in states]),
        absmax_scale.split([len(state.state2.absmax) for state in states]),
        strict=True,
    ):
        weight.data = codes_view.view(weight.shape)
        state.absmax, state.state2.absmax = absmax_view, absmax_scale_view
    out_features, in_features = sum(member.out_features for member in members), members[0].in_features
    dtype, device = states[0].dtype, codes.device
    return Nf4Weights(
        codes=codes,
        levels=states[0].code,
        absmax=absmax,
        absmax_levels=states[0].state2.code,
        absmax_scale=absmax_scale,
        absmax_offset=absmax_offset,
        scaled_B=torch.zeros(out_features, ranks, dtype=dtype, device=device),
        lora_A=torch.zeros(ranks, in_features + ranks, dtype=dtype, device=device),
    )
