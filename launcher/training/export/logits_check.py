"""Compare the logits of two models on the same tokens, computed in FP32 whatever dtype the weights have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import Tensor, nn

from launcher.core.choices import Dtype
from launcher.core.errors import RunFailedError

# Relative difference of logits explained by rounding the merged weights, accumulated over a deep network.
_TOLERANCE: dict[Dtype, float] = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
# Share of positions with the same argmax token. Rounding may change near ties.
_MIN_SAME_TOKEN: dict[Dtype, float] = {"fp32": 0.99, "fp16": 0.97, "bf16": 0.9}
# Share of the adapter's change that the merged model must have: 0 if it was lost, 2 if it was added twice.
_MERGED_SHARE = (0.8, 1.2)
_MIN_CHANGE = 1e-6  # a smaller change by the adapter cannot be verified


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """How far the logits of the merged model are from those of the base with the adapter."""

    num_rows: int
    num_positions: int
    difference: float  # relative, of the logits
    same_token: float  # share of positions with the same argmax token
    adapter_change: float | None  # relative change of the base's logits by the adapter; None: no adapter
    merged_share: float | None  # share of that change in the merged model; 1 is ideal


def compute_logits(model: nn.Module, rows: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the logits of each row, [positions, vocabulary], on the CPU."""
    with torch.inference_mode(), computing_in_fp32(model):
        return [model(input_ids=row[None].to(device), use_cache=False).logits[0].float().cpu() for row in rows]


@contextmanager
def computing_in_fp32(model: nn.Module) -> Iterator[None]:
    """Upcast each module's weights to fp32 while it runs, so that only one upcast module is in memory at a time."""
    originals: dict[nn.Parameter, Tensor] = {}

    def list_weights(module: nn.Module) -> Iterator[nn.Parameter]:
        return module.parameters(recurse=isinstance(module, TrainableTokensLayer))  # does not call its base layer

    def upcast(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        for parameter in list_weights(module):
            if parameter.is_floating_point() and parameter not in originals:
                originals[parameter] = parameter.data
                parameter.data = parameter.data.float()
        return tuple(_upcast(value) for value in inputs)

    def restore(module: nn.Module, *_: Any) -> None:
        for parameter in list_weights(module):
            if parameter in originals:
                parameter.data = originals.pop(parameter)

    owners = [module for module in model.modules() if next(list_weights(module), None) is not None]
    handles = [module.register_forward_pre_hook(upcast) for module in owners]
    handles += [module.register_forward_hook(restore) for module in owners]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter, data in originals.items():  # after an interrupted forward pass
            parameter.data = data


def _upcast(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def compare_logits(merged: Sequence[Tensor], expected: Sequence[Tensor], base: Sequence[Tensor] | None) -> Agreement:
    """Compare logits of a merged model with `expected`, from base and adapter, and `base`, from the base alone."""
    same = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in zip(merged, expected, strict=True))
    num_positions = sum(len(row) for row in expected)
    size = _dot(expected, expected) ** 0.5
    deviation = _minus(merged, expected)
    change = merged_share = None
    if base is not None:
        delta = _minus(expected, base)
        change = _dot(delta, delta) ** 0.5 / max(size, 1e-30)
        if change > _MIN_CHANGE:
            merged_share = _dot(_minus(merged, base), delta) / _dot(delta, delta)
    return Agreement(
        num_rows=len(expected),
        num_positions=num_positions,
        difference=_dot(deviation, deviation) ** 0.5 / max(size, 1e-30),
        same_token=same / max(1, num_positions),
        adapter_change=change,
        merged_share=merged_share,
    )


def check_agreement(agreement: Agreement, dtype: Dtype) -> None:
    """Raise RunFailedError if the logits differ by more than rounding explains, or contain NaN."""
    lowest, highest = _MERGED_SHARE
    is_close = agreement.difference <= _TOLERANCE[dtype] and agreement.same_token >= _MIN_SAME_TOKEN[dtype]
    is_merged = agreement.merged_share is None or lowest <= agreement.merged_share <= highest
    if is_close and is_merged:
        return
    if is_close and dtype != "fp32" and agreement.merged_share is not None and agreement.merged_share < lowest:
        raise RunFailedError(
            f"rounding the merged weights to {dtype} loses too much of the adapter: {format_agreement(agreement)}",
            hint="nothing was written; export with --dtype fp32, or use the adapter without merging it",
        )
    raise RunFailedError(
        f"the merged model differs from base and adapter: {format_agreement(agreement)}; in {dtype}, rounding "
        f"explains at most {_TOLERANCE[dtype]:.0e}",
        hint="nothing was written; try --dtype fp32: if that fails too, rounding is not the cause",
    )


def format_agreement(agreement: Agreement) -> str:
    """Format the comparison as one line."""
    text = (
        f"on {agreement.num_positions:,} tokens of {agreement.num_rows} rows, logits differ by "
        f"{agreement.difference:.1e} (relative), the argmax token agrees on {agreement.same_token:.1%}"
    )
    if agreement.adapter_change is None:
        return text
    if agreement.merged_share is None:
        return f"{text}; the adapter changes nothing"
    change = f"{agreement.adapter_change:.1e}, {agreement.merged_share:.1%} of it merged"
    return f"{text}; the adapter changes them by {change}"


def _minus(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
    return [a - b for a, b in zip(left, right, strict=True)]


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    return sum(float((a * b).sum(dtype=torch.float64)) for a, b in zip(left, right, strict=True))
