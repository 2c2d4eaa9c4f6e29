"""Do two models say the same? Their logits on the same tokens, computed in fp32 whatever dtype the weights are in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from launcher.choices import Dtype
from launcher.errors import RunFailedError

# Relative difference of logits that rounding the merged weights explains, summed up over a deep network.
_TOLERANCE: dict[Dtype, float] = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
# Positions with the same most likely token. Rounding may turn near ties.
_SAME_TOKEN: dict[Dtype, float] = {"fp32": 0.99, "fp16": 0.97, "bf16": 0.9}
# Of what an adapter changes, the share that must be found in the merged model. Lost it would be 0, added twice 2.
_CARRIED = (0.8, 1.2)
_NO_CHANGE = 1e-6  # an adapter that changes less has nothing to be carried over


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Of the merged model with base and adapter side by side."""

    num_rows: int
    num_positions: int
    difference: float  # of the logits, relative
    same_token: float  # share of positions with the same most likely token
    adapter_change: float | None  # by which the adapter changes the base's logits, relative; None: there is no adapter
    carried: float | None  # how much of that change the merged model has; 1 is all of it


def compute_logits(model: nn.Module, rows: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Of each row alone, [positions, vocabulary], on the CPU."""
    with torch.inference_mode(), computed_in_fp32(model):
        return [model(input_ids=row[None].to(device), use_cache=False).logits[0].float().cpu() for row in rows]


@contextmanager
def computed_in_fp32(model: nn.Module) -> Iterator[None]:
    """Each module's weights are widened while it runs, which is exact, and costs the memory of one module."""
    narrow: dict[nn.Parameter, Tensor] = {}

    def widen(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point() and parameter not in narrow:
                narrow[parameter] = parameter.data
                parameter.data = parameter.data.float()
        return tuple(_widened(value) for value in inputs)

    def restore(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter in narrow:
                parameter.data = narrow.pop(parameter)

    owners = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    handles = [module.register_forward_pre_hook(widen) for module in owners]
    handles += [module.register_forward_hook(restore) for module in owners]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter, data in narrow.items():  # of a pass that was broken off
            parameter.data = data


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def measure(merged: Sequence[Tensor], expected: Sequence[Tensor], base: Sequence[Tensor] | None) -> Agreement:
    """`expected` is what base and adapter say, `base` what the base says without it."""
    same = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in zip(merged, expected, strict=True))
    num_positions = sum(len(row) for row in expected)
    size = _dot(expected, expected) ** 0.5
    off = _minus(merged, expected)
    change = carried = None
    if base is not None:
        changed = _minus(expected, base)
        change = _dot(changed, changed) ** 0.5 / max(size, 1e-30)
        if change > _NO_CHANGE:
            carried = _dot(_minus(merged, base), changed) / _dot(changed, changed)
    return Agreement(
        num_rows=len(expected),
        num_positions=num_positions,
        difference=_dot(off, off) ** 0.5 / max(size, 1e-30),
        same_token=same / max(1, num_positions),
        adapter_change=change,
        carried=carried,
    )


def check_agreement(agreement: Agreement, dtype: Dtype) -> None:
    """Written so that not-a-number fails."""
    lowest, highest = _CARRIED
    is_near = agreement.difference <= _TOLERANCE[dtype] and agreement.same_token >= _SAME_TOKEN[dtype]
    is_carried = agreement.carried is None or lowest <= agreement.carried <= highest
    if is_near and is_carried:
        return
    raise RunFailedError(
        f"the merged model does not say what base and adapter say: {format_agreement(agreement)}; in {dtype}, rounding "
        f"explains a difference of {_TOLERANCE[dtype]:.0e}",
        hint="nothing was written; --dtype fp32 tells rounding from a merge that went wrong",
    )


def format_agreement(agreement: Agreement) -> str:
    words = (
        f"on {agreement.num_positions:,} tokens of {agreement.num_rows} rows, logits differ by "
        f"{agreement.difference:.1e} (relative), the most likely token is the same on {agreement.same_token:.1%}"
    )
    if agreement.adapter_change is None:
        return words
    if agreement.carried is None:
        return f"{words}; the adapter changes nothing"
    change = f"{agreement.adapter_change:.1e}, of which {agreement.carried:.1%} is there"
    return f"{words}; the adapter changes them by {change}"


def _minus(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
    return [a - b for a, b in zip(left, right, strict=True)]


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    return sum(float((a * b).sum(dtype=torch.float64)) for a, b in zip(left, right, strict=True))
