"""What training has made, whole and by name, whatever engine keeps it: trained weights in FP32, optimizer states.

One tensor after the other, so that no device holds more than one of them whole. The first rank alone reads and writes
files: other nodes need not see its disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from launcher.training.engine import Engine
from launcher.training.gathering import gather_whole, shard_again
from launcher.training.optim import innermost
from launcher.training.zero import ZeroStates

StateName = tuple[str, str]  # what the optimizer keeps, and of which parameter


def named_trained(engine: Engine) -> list[tuple[str, nn.Parameter]]:
    """By the names that the model's own state_dict has; those that the optimizer knows, not copies made whole."""
    shard_again(engine.model)
    return [(name, p) for name, p in engine.module.model.named_parameters() if p.requires_grad]


def gather_weights(engine: Engine) -> dict[str, Tensor]:
    """Every rank must call it; only the first gets anything."""
    zero = ZeroStates.of(engine)
    gathered: dict[str, Tensor] = {}
    for name, parameter in named_trained(engine):
        whole = gather_whole(parameter) if zero is None else zero.get_weight(parameter)
        if engine.is_main:
            gathered[name] = _to_host(whole)
    return gathered


def gather_optimizer(engine: Engine) -> dict[StateName, Tensor]:
    """Every rank must call it; only the first gets anything."""
    zero = ZeroStates.of(engine)
    inner = innermost(engine.optimizer)
    gathered: dict[StateName, Tensor] = {}
    known = dict(inner.state)
    if zero is not None:
        zero.link()
    for name, parameter in named_trained(engine):
        own = known.get(parameter, {}) if zero is None else {}  # SGD keeps nothing
        states = _plain_states(own) if zero is None else zero.get_states(parameter)
        for key, value in states:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if engine.is_main:
                gathered[key, name] = _to_host(whole)
    return gathered


def _plain_states(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """bitsandbytes counts steps in a plain number, and has tables for what it packed into 8 bits."""
    for key, value in sorted(state.items()):
        yield key, value if isinstance(value, Tensor) else torch.tensor(value)


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def place_weights(engine: Engine, handed: Iterable[tuple[str, Tensor]]) -> None:
    """Every rank must call it, with what the first has read. All that is trained must come."""
    zero = ZeroStates.of(engine)
    parameters = dict(named_trained(engine))
    for name, whole in handed:
        parameter = parameters.pop(name)
        if zero is not None:
            zero.set_weight(parameter, whole)
        else:
            _copy_into(parameter, whole)
    if parameters:
        raise KeyError(next(iter(parameters)))


def place_optimizer(engine: Engine, handed: Iterable[tuple[StateName, Tensor]], kept: Sequence[str]) -> None:
    """As it was after its last step; a fresh one has no states at all. `kept`: what it keeps of every element."""
    zero = ZeroStates.of(engine)
    parameters = dict(named_trained(engine))
    if zero is not None:
        zero.make_states(kept)
        for (key, name), whole in handed:
            zero.set_state(parameters[name], key, whole)
        return
    inner = innermost(engine.optimizer)
    ordered = [parameter for group in inner.param_groups for parameter in group["params"]]
    places = {id(parameter): index for index, parameter in enumerate(ordered)}
    placed: dict[int, dict[str, Tensor | int]] = {}
    for (key, name), whole in handed:
        parameter = parameters[name]
        placed.setdefault(places[id(parameter)], {})[key] = _place_like(whole, parameter)
    inner.load_state_dict({"state": placed, "param_groups": inner.state_dict()["param_groups"]})


def _copy_into(parameter: nn.Parameter, whole: Tensor) -> None:
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            local = parameter.to_local()
            local.copy_(_shard_like(whole, parameter).to_local())
        else:
            parameter.copy_(whole)


def _place_like(value: Tensor, parameter: nn.Parameter) -> Tensor | int:
    """What has the parameter's shape is sharded as it is; what has not belongs to every rank. A count is a number."""
    if value.dim() == 0:
        return value.cpu() if value.is_floating_point() else int(value)  # load_state_dict moves it where it belongs
    if isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return _shard_like(value, parameter)
    return value


def _shard_like(whole: Tensor, parameter: DTensor) -> DTensor:
    """Every rank has all of it: each takes its own part, and nothing travels."""
    moved = whole.to(parameter.to_local().device)
    return distribute_tensor(moved, parameter.device_mesh, parameter.placements, src_data_rank=None)
