"""Whether our Triton kernels run on a device."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


@cache
def kernels_run_on(device: torch.device) -> bool:
    """A GPU that they were written for, and Triton beside torch: builds for other systems come without it."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
