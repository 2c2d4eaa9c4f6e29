"""Complete, named weights (FP32) and optimizer states from any engine: DDP, FSDP2 shards or ZeRO partitions.

Tensors are gathered one by one, so that no device holds more than one complete tensor. Only rank 0 reads and writes
files: other nodes need not see its disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from launcher.training.checkpoint.zero_state import ZeroStates, is_partitioned
from launcher.training.engine.engine import Engine
from launcher.training.engine.optimizer import unwrap_optimizer

StateName = tuple[str, str]  # (key of the optimizer state, name of the parameter)


def named_trained(engine: Engine) -> list[tuple[str, nn.Parameter]]:
    """Return the trained parameters, as the optimizer holds them (sharded or not), with their state_dict names."""
    # After an evaluation FSDP2 leaves its root module unsharded until a state_dict is requested. Only rank 0 did that
    # for the last checkpoint, so without this the other ranks would not join the all-gather.
    for module in engine.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return [(name, p) for name, p in engine.module.model.named_parameters() if p.requires_grad]


def iterate_weights(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Yield the complete trained weights one by one. Every rank must iterate over all of them."""
    zero = ZeroStates.of(engine)
    for name, parameter in named_trained(engine):
        yield name, _gather_parameter(parameter) if zero is None else zero.get_weight(parameter)


def iterate_optimizer(engine: Engine) -> Iterator[tuple[StateName, Tensor]]:
    """Yield the complete optimizer states one by one. Every rank must iterate over all of them."""
    zero = ZeroStates.of(engine)
    if zero is None:
        for state, value in _iterate_own_states(engine):
            yield state, value.full_tensor() if isinstance(value, DTensor) else value
        return
    zero.link()
    for name, parameter in named_trained(engine):
        for key, value in zero.get_states(parameter):
            yield (key, name), value


def collect_own(engine: Engine) -> tuple[dict[str, Tensor], dict[StateName, Tensor]]:
    """Return the weights and optimizer states that this rank holds: FSDP2's shards (DTensor), or replicas."""
    weights = {name: parameter.detach() for name, parameter in named_trained(engine)}
    return weights, dict(_iterate_own_states(engine))


def gather_weights(engine: Engine) -> dict[str, Tensor]:
    """Return the trained weights in host memory on rank 0, {} on other ranks. Every rank must call it."""
    return {name: _to_host(full) for name, full in iterate_weights(engine) if engine.is_main}


def gather_optimizer(engine: Engine) -> dict[StateName, Tensor]:
    """Return the optimizer states in host memory on rank 0, {} on other ranks. Every rank must call it."""
    if engine.device.type == "cuda":  # copies to states in CPU memory may still be under way
        torch.cuda.synchronize(engine.device)
    return {name: _to_host(full) for name, full in iterate_optimizer(engine) if engine.is_main}


def _iterate_own_states(engine: Engine) -> Iterator[tuple[StateName, Tensor]]:
    states_by_parameter = dict(unwrap_optimizer(engine.optimizer).state)
    for name, parameter in named_trained(engine):
        for key, value in sorted(states_by_parameter.get(parameter, {}).items()):  # SGD has no state
            yield (key, name), value if isinstance(value, Tensor) else torch.tensor(value)  # bitsandbytes: an int


def load_weights(engine: Engine, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load complete weights, which must cover all trained parameters. Every rank must call it with rank 0's values."""
    zero = ZeroStates.of(engine)
    parameters = dict(named_trained(engine))
    missing = set(parameters)
    for name, full in weights:  # PEFT saves tied modules twice
        missing.discard(name)
        shape = getattr(parameters[name], "ds_shape", parameters[name].shape)  # ZeRO-3 leaves an empty tensor
        if full.shape != shape:  # copy_ would broadcast it
            raise ValueError(f"{name} has the shape {[*full.shape]}, not {[*shape]}")
        if zero is not None:
            zero.set_weight(parameters[name], full)
        else:
            _copy_into(parameters[name], full)
    if missing:
        raise ValueError(f"{min(missing)} is missing")


def load_optimizer(engine: Engine, states: Iterable[tuple[StateName, Tensor]], keys: Sequence[str]) -> None:
    """Load complete optimizer states into a new optimizer. `keys` names the states with one value per weight."""
    zero = ZeroStates.of(engine)
    parameters = dict(named_trained(engine))
    if zero is not None:
        zero.create_states(keys)
        for (key, name), full in states:
            zero.set_state(parameters[name], key, full)
        return
    inner = unwrap_optimizer(engine.optimizer)
    ordered = [parameter for group in inner.param_groups for parameter in group["params"]]
    indices = {id(parameter): index for index, parameter in enumerate(ordered)}
    loaded: dict[int, dict[str, Tensor | int]] = {}
    for (key, name), full in states:
        parameter = parameters[name]
        loaded.setdefault(indices[id(parameter)], {})[key] = _shard_state(full, parameter)
        if isinstance(inner, torch.optim.AdamW) and full.dim() and full.shape != parameter.shape:
            raise ValueError(f"{key} of {name} has the shape {[*full.shape]}, not {[*parameter.shape]}")
    if isinstance(inner, torch.optim.AdamW) and len({frozenset(state) for state in loaded.values()}) > 1:
        raise ValueError("some parameters lack optimizer states that others have")
    inner.load_state_dict({"state": loaded, "param_groups": inner.state_dict()["param_groups"]})


def _gather_parameter(parameter: Any) -> Tensor:
    """Return the complete parameter on its device; it may be the parameter itself. Every rank must call it."""
    if isinstance(parameter, DTensor):
        return parameter.full_tensor()
    if is_partitioned(parameter):
        import deepspeed

        with torch.no_grad(), deepspeed.zero.GatheredParameters([parameter], modifier_rank=None):
            full: Tensor = parameter.data.clone()
            return full
    return parameter


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _copy_into(parameter: nn.Parameter, full: Tensor) -> None:
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            parameter.to_local().copy_(_shard_like(full, parameter).to_local())
        else:
            parameter.copy_(full)


def _shard_state(value: Tensor, parameter: nn.Parameter) -> Tensor | int:
    """Return an optimizer state, sharded like its parameter if the shapes are equal; an integer scalar as int."""
    if value.dim() == 0:
        return value.cpu() if value.is_floating_point() else int(value)  # load_state_dict moves it to its device
    if isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return _shard_like(value, parameter)
    return value


def _shard_like(full: Tensor, parameter: DTensor) -> DTensor:
    """Shard a tensor that every rank holds completely, without communication."""
    moved = full.to(parameter.to_local().device)
    return distribute_tensor(moved, parameter.device_mesh, parameter.placements, src_data_rank=None)
