"""Check whether our Triton kernels can run on a device."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


@cache
def supports_triton(device: torch.device) -> bool:
    """Return whether the device is a GPU of Ampere or newer and Triton is installed (some torch builds lack it)."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
