"""Linear layers whose NF4 weight FSDP2 can shard: codes and scales are the bytes of one parameter.

bitsandbytes keeps the scales of a weight outside of its parameter, where FSDP2 does not find them, so accelerate leaves
such weights unsharded. The parameter has the dtype that FSDP2 gathers in: torch 2.11 would convert uint8, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.fsdp import is_fsdp_enabled

from launcher.training.kernels.nf4 import GROUP_SIZE, OUTER_GROUP_SIZE, dequantize

_FP32_BYTES = 4


class Layout(NamedTuple):
    """Shape and dtype of a dense weight, and the dtype that its bytes are stored as."""

    out_features: int
    in_features: int
    dtype: torch.dtype
    storage: torch.dtype

    def byte_counts(self) -> tuple[int, int, int, int, int]:
        """Return the sizes in bytes of absmax_scale, absmax_offset, absmax, codes and padding, in this order."""
        num_weights = self.out_features * self.in_features
        num_groups = num_weights // GROUP_SIZE
        outer = _FP32_BYTES * -(-num_groups // OUTER_GROUP_SIZE)
        # FP32 values are first, so that they are aligned.
        return outer, outer, num_groups, num_weights // 2, -(num_groups + num_weights // 2) % _FP32_BYTES


def can_store_as_bytes(linear: nn.Linear) -> bool:
    """Return whether Nf4Linear supports a layer: its quantization groups are complete, and its rows are aligned."""
    return linear.weight.numel() % GROUP_SIZE == 0 and linear.in_features % 8 == 0


class Nf4Linear(nn.Linear):
    """A frozen linear layer that dequantizes its weight for each matmul, in the forward and in the backward pass."""

    levels: Tensor
    absmax_levels: Tensor

    def __init__(
        self, linear: nn.Linear, layout: Layout, packed: Tensor, levels: Tensor, absmax_levels: Tensor
    ) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.layout = layout
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        # Copies, because accelerate restores a buffer that layers share in only one of them.
        self.register_buffer("levels", levels.clone(), persistent=False)
        self.register_buffer("absmax_levels", absmax_levels.clone(), persistent=False)

    @property
    def W_q(self) -> Tensor:  # noqa: N802
        """The quantized weight. PEFT calls `dequantize` on layers with this attribute, which DoRA needs."""
        return self.weight

    def dequantize(self) -> Tensor:
        """Return the dense weight [out, in] in the dtype that it was loaded in."""
        return _dequantize(self.weight, self.levels, self.absmax_levels, self.layout, None)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Return x W^T + bias."""
        y: Tensor = _Nf4Matmul.apply(input, self.weight, self.levels, self.absmax_levels, self.layout)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _Nf4Matmul(torch.autograd.Function):
    """Autograd function for x W^T that saves the bytes of W for the backward pass instead of the dense weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, levels: Tensor, absmax_levels: Tensor, layout: Layout) -> Tensor:
        ctx.save_for_backward(packed, levels, absmax_levels)
        ctx.layout, ctx.input_dtype = layout, x.dtype
        return functional.linear(x, _dequantize(packed, levels, absmax_levels, layout, None).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        packed, levels, absmax_levels = ctx.saved_tensors
        weight = _dequantize(packed, levels, absmax_levels, ctx.layout, dy)
        return (dy @ weight.to(dy.dtype)).to(ctx.input_dtype), None, None, None, None


def _dequantize(packed: Tensor, levels: Tensor, absmax_levels: Tensor, layout: Layout, after: Tensor | None) -> Tensor:
    scale, offset, absmax, codes, _ = packed.view(torch.uint8).split(list(layout.byte_counts()))
    scaled_b = packed.new_empty(layout.out_features, 0, dtype=layout.dtype)  # no LoRA next to it
    lora_a = packed.new_empty(0, layout.in_features, dtype=layout.dtype)
    scales = scale.view(torch.float32), offset.view(torch.float32)
    return dequantize(codes, levels, absmax, absmax_levels, *scales, scaled_b, lora_a, after)


def shard_nf4_weights(model: PreTrainedModel, device: torch.device, storage: torch.dtype) -> None:
    """Replace the linear modules of the decoder layers with Nf4Linear, quantizing each weight on the device.

    With RAM-efficient loading only rank 0 has the weights, and accelerate broadcasts its bytes.
    """
    from bitsandbytes import functional as bnb

    has_weights = not is_fsdp_enabled() or torch.distributed.get_rank() == 0
    levels, absmax_levels = bnb.get_4bit_type("nf4", device="cpu"), bnb.create_dynamic_map().float().cpu()

    def make_nf4(linear: nn.Linear) -> nn.Module:
        if not can_store_as_bytes(linear):
            return linear
        layout = Layout(linear.out_features, linear.in_features, linear.weight.dtype, storage)
        packed = torch.empty(sum(layout.byte_counts()), dtype=torch.uint8, device=linear.weight.device)
        if has_weights:
            packed.copy_(_quantize(linear.weight.data.to(device), layout))
        tables = levels.to(packed.device), absmax_levels.to(packed.device)
        return Nf4Linear(linear, layout, packed.view(storage), *tables)

    replace_linears(model, make_nf4)


def replace_linears(model: PreTrainedModel, replacement: Callable[[nn.Linear], nn.Module]) -> None:
    """Replace the linear modules of the decoder layers one by one, so that only one exists twice at a time."""
    layers: Any = model.get_decoder().layers
    for parent in [module for layer in layers for module in layer.modules()]:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, replacement(child))


def round_to_nf4(model: PreTrainedModel, dtype: torch.dtype, *, double_quantization: bool, sharded: bool) -> None:
    """Replace the weights of the decoder layers' linear modules by the values that NF4 has for them, in place.

    A QLoRA training computes with these, converted from a base in `dtype`; its adapter compensates for their errors.
    `sharded`: with FSDP2, which leaves a few shapes unquantized.
    """
    from bitsandbytes import functional as bnb

    layers: Any = model.get_decoder().layers
    for linear in [module for layer in layers for module in layer.modules() if type(module) is nn.Linear]:
        if sharded and not can_store_as_bytes(linear):
            continue
        codes, state = bnb.quantize_4bit(
            linear.weight.data.to(dtype),
            blocksize=GROUP_SIZE,
            compress_statistics=double_quantization,
            quant_type="nf4",
        )
        linear.weight.data.copy_(bnb.dequantize_4bit(codes, state))


def _quantize(weight: Tensor, layout: Layout) -> Tensor:
    """Return a weight as NF4 bytes in the order of Layout.byte_counts, quantized by bitsandbytes."""
    from bitsandbytes import functional as bnb

    codes, state = bnb.quantize_4bit(
        weight, blocksize=GROUP_SIZE, compress_statistics=True, quant_type="nf4", quant_storage=torch.uint8
    )
    scale: Tensor = state.state2.absmax.float()
    offset = torch.zeros_like(scale) + state.offset.float()
    padding = codes.new_zeros(layout.byte_counts()[-1])
    parts = scale.view(torch.uint8), offset.view(torch.uint8), state.absmax, codes, padding
    return torch.cat([part.flatten() for part in parts])
