"""A base of four bits a weight (QLoRA): the matrix of a block is built before each of its products, and gone behind it.

bitsandbytes keeps two weights in a byte, the first in its upper half, as places in a table of sixteen levels; a scale
for each group of 64 weights; and these scales, less their mean, as places in a table of 256 levels, with a scale for
each 256 of them. What is built is what its own kernels make of that, bit for bit; theirs cannot write into a block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from launcher.training.kernels import kernels_run_on

# One tensor: the matrix itself. Eight: what it is built from, in the order of `unpack`'s arguments.
Stored = tuple[Tensor, ...]


@torch.library.custom_op("launcher::unpack", mutates_args=())
def unpack(
    codes: Tensor,
    levels: Tensor,
    scales: Tensor,
    scale_levels: Tensor,
    outer_scales: Tensor,
    means: Tensor,
    right: Tensor,
    below: Tensor,
    _after: Tensor | None,
) -> Tensor:
    """[W, right; below]. What a backward pass builds comes after a gradient: a compiler would keep the forward's."""
    num_out, ranks = right.shape
    num_in = below.shape[1] - ranks
    matrix = right.new_empty(num_out + ranks, num_in + ranks)
    if kernels_run_on(right.device):
        from launcher.training.packed_kernels import unpack_into

        unpack_into(matrix, (codes, levels, scales, scale_levels, outer_scales, means, right, below))
        return matrix
    of_groups = scale_levels[scales.long()].view(len(outer_scales), -1) * outer_scales[:, None] + means[:, None]
    places = torch.stack((codes >> 4, codes & 15), dim=1).long()
    weights = levels[places].view(len(scales), -1) * of_groups.view(-1, 1)
    matrix[:num_out, :num_in] = weights.view(num_out, num_in)
    matrix[:num_out, num_in:] = right
    matrix[num_out:] = below
    return matrix


@unpack.register_fake
def _(*arguments: Any) -> Tensor:
    right, below = arguments[6:8]
    made: Tensor = right.new_empty(len(right) + right.shape[1], below.shape[1])
    return made


def build(stored: Stored, after: Tensor | None = None) -> Tensor:
    """`after`: a gradient, in a backward pass."""
    return stored[0] if len(stored) == 1 else unpack(*stored, after)


def is_adapted_and_packed(module: Any) -> bool:
    """PEFT's layer around one of bitsandbytes', which may not be installed."""
    return type(module).__module__ == "peft.tuners.lora.bnb" and type(module).__name__ == "Linear4bit"


def is_packed(base: Any, dtype: torch.dtype) -> bool:
    """By bitsandbytes as we ask it to, in sizes that lie one behind the other."""
    if type(base).__name__ != "Linear4bit":
        return False
    weight, state = base.weight, getattr(base.weight, "quant_state", None)
    if state is None or not state.nested or weight.dtype != torch.uint8 or state.dtype != dtype:
        return False
    if getattr(state, "packing_format_for_cpu", False) or base.compute_dtype not in (None, dtype):
        return False
    if weight.device.type != "cpu" and not kernels_run_on(weight.device):
        return False
    num_weights = base.in_features * base.out_features
    fits = num_weights % (state.blocksize * state.state2.blocksize) == 0 and base.in_features % 8 == 0
    return fits and tuple(state.shape) == (base.out_features, base.in_features)


def pack(members: list[Any], ranks: int) -> Stored:
    """Their packed weights one behind the other; those of the members become views of it."""
    weights = [member.base_layer.weight for member in members]
    states = [weight.quant_state for weight in weights]
    codes = torch.cat([weight.data.flatten() for weight in weights])
    scales = torch.cat([state.absmax for state in states])
    outer_scales = torch.cat([state.state2.absmax for state in states])
    means = torch.cat([state.offset.float().expand(len(state.state2.absmax)) for state in states])
    for weight, state, own_codes, own_scales, own_outer in zip(
        weights,
        states,
        codes.split([weight.numel() for weight in weights]),
        scales.split([len(state.absmax) for state in states]),
        outer_scales.split([len(state.state2.absmax) for state in states]),
        strict=True,
    ):
        weight.data = own_codes.view(weight.shape)
        state.absmax, state.state2.absmax = own_scales, own_outer
    num_out, num_in, dtype = sum(member.out_features for member in members), members[0].in_features, states[0].dtype
    right = torch.zeros(num_out, ranks, dtype=dtype, device=codes.device)
    below = torch.zeros(ranks, num_in + ranks, dtype=dtype, device=codes.device)
    return codes, states[0].code, scales, states[0].state2.code, outer_scales, means, right, below
