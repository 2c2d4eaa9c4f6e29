"""Trained weights from wherever an engine keeps them: whole, as shards (FSDP2), or as partitions (ZeRO-3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from launcher.training.engine import Engine


def gather_trained(engine: Engine) -> dict[str, Tensor]:
    """By the names that the model's own state_dict has. Every rank must call it; only the first gets anything.

    One tensor after the other, so that no rank ever holds more than one whole.
    """
    gathered: dict[str, Tensor] = {}
    for name, parameter in engine.module.model.named_parameters():
        if parameter.requires_grad:
            whole = _gather(parameter)
            if engine.is_main:
                gathered[name] = whole.detach().to("cpu", copy=True).contiguous()
    return gathered


def _gather(parameter: Any) -> Tensor:
    if isinstance(parameter, DTensor):
        return parameter.full_tensor()
    if is_partitioned(parameter):
        import deepspeed

        with torch.no_grad(), deepspeed.zero.GatheredParameters([parameter], modifier_rank=None):
            whole: Tensor = parameter.data.clone()
            return whole
    return parameter


def is_partitioned(parameter: Any) -> bool:
    """By ZeRO-3, which leaves an empty tensor in the parameter's place."""
    return hasattr(parameter, "ds_id")
