"""Which fused ops run the decoder layers of a built model, to be compared with what the plan said."""

from __future__ import annotations

from torch import nn

from launcher.training.model.fp8_blocks import Fp8AttentionBlock, Fp8MLPBlock
from launcher.training.model.fp8_linear import TrainedFp8Linear
from launcher.training.model.fused_lora.decoder_layer import FusedAttentionBlock, FusedMLPBlock
from launcher.training.model.fused_lora.linear import FusedLoraLinear


def describe_path(layers: list[nn.Module]) -> str:
    """Return which fused ops run, as docs/families.md names them: blocks, MLP, attention, matmuls or library (none)."""
    modules = [module for layer in layers for module in layer.modules()]
    if not any(isinstance(module, (FusedLoraLinear, TrainedFp8Linear)) for module in modules):
        return "library"  # never fused, or unfused after a check
    has_mlp = any(isinstance(module, (FusedMLPBlock, Fp8MLPBlock)) for module in modules)
    has_attention = any(isinstance(module, (FusedAttentionBlock, Fp8AttentionBlock)) for module in modules)
    return "blocks" if has_mlp and has_attention else "MLP" if has_mlp else "attention" if has_attention else "matmuls"
