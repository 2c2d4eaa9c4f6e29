"""bitsandbytes' AdamW with 8-bit state, which waits for the device behind every tensor that it updates.

An adapter has hundreds of them: on an H200 that was 73 ms a step. Kernels of one stream run in the order in which they
are launched, so that nothing has to be waited for; only paged state would need it, which is not used here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import bitsandbytes.optim
import torch
from bitsandbytes.optim import optimizer as their_module

__all__ = ["AdamW8bit", "their_module"]


class AdamW8bit(bitsandbytes.optim.AdamW8bit):  # type: ignore[misc]  # bitsandbytes has no types
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        with _without_waiting():
            return super().step(closure)


@contextmanager
def _without_waiting() -> Iterator[None]:
    theirs = their_module.sync_gpu
    their_module.sync_gpu = _do_not_wait
    try:
        yield
    finally:
        their_module.sync_gpu = theirs


def _do_not_wait(_tensor: torch.Tensor) -> None:
    """Its place in their step."""
