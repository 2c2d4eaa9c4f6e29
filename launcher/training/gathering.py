"""Weights from wherever an engine keeps them: whole, as shards (FSDP2), or as partitions (ZeRO-3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from launcher.training.engine import Engine


def copy_buffers(engine: Engine) -> dict[str, Tensor]:
    """What a whole model keeps besides its parameters; the same on every rank."""
    model = engine.module.model
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor.cpu() for name, tensor in model.state_dict().items() if name not in parameters}


def shard_again(model: nn.Module) -> None:
    """After an evaluation FSDP2 leaves its outermost module whole, until somebody asks for a state_dict: the rank that
    wrote the last checkpoint did, and the others would not join in the gathering of this one."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gather_whole(parameter: Any) -> Tensor:
    """Every rank must call it, and gets it; on its device, perhaps the parameter itself."""
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
