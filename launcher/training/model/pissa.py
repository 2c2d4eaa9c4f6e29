"""PiSSA: LoRA starts with the largest singular values of the base's weights, and the base keeps the rest.

PEFT computes both. The base in memory is therefore not the published one: a trained adapter is saved as the difference
from its initial weights, a LoRA of twice the rank that loads on the published base.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from launcher.training.model.fused_lora.weights import ADAPTER_NAME

_INITIAL = "_initial_lora"  # attribute of the PEFT model: its adapter before the first step, on the CPU


def share_pissa(model: PeftModel) -> None:
    """Store PiSSA's initial adapter for later. With several ranks, broadcast it and the base's residual from rank 0."""
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    if dist.is_initialized() and dist.get_world_size() > 1:  # decompositions on different devices may differ
        for weight in (weight for layer in layers for weight in _list_weights(layer)):
            weight.data = weight.data.contiguous()
            dist.broadcast(weight.data, src=0)
    trained = ((name, parameter) for name, parameter in model.named_parameters() if ".lora_" in name)
    setattr(model, _INITIAL, {name: parameter.detach().cpu().clone() for name, parameter in trained})


def _list_weights(layer: Any) -> list[nn.Parameter]:
    return [layer.lora_A[ADAPTER_NAME].weight, layer.lora_B[ADAPTER_NAME].weight, layer.get_base_layer().weight]


def get_initial_lora(model: object) -> dict[str, Tensor]:
    """Return the initial adapter of PiSSA by parameter name; empty without PiSSA."""
    initial: dict[str, Tensor] = getattr(model, _INITIAL, {})
    return initial


def fingerprint_initial(model: object) -> str:
    """Return a hash of PiSSA's initial adapter, which a resumed run must have, too; empty without PiSSA."""
    initial = get_initial_lora(model)
    digest = hashlib.sha256()
    for _, tensor in sorted(initial.items()):
        digest.update(tensor.numpy().tobytes())
    return f", PiSSA:{digest.hexdigest()}" if initial else ""


def subtract_initial(weights: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return trained minus initial PiSSA adapter as a LoRA of twice the rank: BA - B'A' = [B, -B'] [A; A']."""
    converted = dict(weights)
    for name, start in initial.items():
        weight, is_a = weights[name], ".lora_A." in name
        start = start.to(weight)
        converted[name] = torch.cat([weight, start], 0) if is_a else torch.cat([weight, -start], 1)
    return converted


def convert_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return new values for adapter_config.json after `subtract_initial`: twice the rank, at an unchanged scale."""
    factor = math.sqrt(2) if config["use_rslora"] else 2
    return {"init_lora_weights": True, "r": 2 * config["r"], "lora_alpha": factor * config["lora_alpha"]}
