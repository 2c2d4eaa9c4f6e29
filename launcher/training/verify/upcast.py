"""Run a 16-bit model in FP32 by casting the inputs of each op, without an FP32 copy of all weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_HALVES = (torch.bfloat16, torch.float16)


class Upcast(TorchFunctionMode):
    """Mode that passes FP32 instead of 16-bit tensors to torch functions, and turns casts to 16 bits into FP32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":  # an attribute, such as dtype
            value = func(*args)
            return torch.float32 if isinstance(value, torch.dtype) and value in _HALVES else value
        if func is torch.autograd.grad:  # its inputs must stay the parameters of the graph
            return func(*args, **(kwargs or {}))
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            return func(*_upcast(args), **{key: _upcast(value) for key, value in (kwargs or {}).items()})


def _upcast(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALVES else value
    if isinstance(value, torch.dtype):
        return torch.float32 if value in _HALVES else value
    return type(value)(map(_upcast, value)) if type(value) in (tuple, list) else value
