"""bitsandbytes' AdamW with 8-bit state, without what an adapter's hundreds of tensors make of it.

It launches an update for each tensor, and waits for the device behind each: on an H200 that was 73 ms a step. Kernels
of one stream run in the order in which they are launched, so that nothing has to be waited for (only paged state would
need it, which is not used here). And tensors are updated together, laid end to end: numbers share a scale in blocks of
256, so those whose size is a multiple of it come out the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import bitsandbytes.optim
import torch
from bitsandbytes.optim import optimizer as their_module
from torch import Tensor, nn

__all__ = ["AdamW8bit", "their_module"]

_BLOCK = 256  # numbers that share a scale
_LARGEST = 1 << 20  # numbers of a tensor that is worth laying beside others
_TOGETHER = 1 << 21  # at most: their weights and gradients are copied, 16 MiB
_STATES = ("state1", "state2", "absmax1", "absmax2")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Due:
    """A parameter whose update was asked for, and where it stands."""

    weight: nn.Parameter
    group: dict[str, Any]
    group_index: int
    index: int


class AdamW8bit(bitsandbytes.optim.AdamW8bit):  # type: ignore[misc]  # bitsandbytes has no types
    _due: list[_Due]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        self._due = []
        with _without_waiting():
            loss = super().step(closure)  # asks for each update
        for together in _lay_together(self._due, self.state):
            if len(together) == 1:
                only = together[0]
                super().update_step(only.group, only.weight, only.group_index, only.index)
            else:
                self._update(together)
        self._due = []
        return loss

    def update_step(self, group: dict[str, Any], p: nn.Parameter, gindex: int, pindex: int) -> None:
        self._due.append(_Due(weight=p, group=group, group_index=gindex, index=pindex))

    def _update(self, together: Sequence[_Due]) -> None:
        """By their own kernel, as if it were one tensor."""
        first = together[0]
        weights: list[Tensor] = [one.weight for one in together]
        states = [self.state[weight] for weight in weights]
        whole = nn.Parameter(torch.cat([weight.flatten() for weight in weights]))
        whole.grad = torch.cat([_gradient(weight).flatten() for weight in weights])
        self.state[whole] = {**states[0], **_join(states)}
        try:
            super().update_step(first.group, whole, first.group_index, first.index)
            for state in states:
                state["step"] = self.state[whole]["step"]
        finally:
            del self.state[whole]
        pieces = whole.detach().split([weight.numel() for weight in weights])
        torch._foreach_copy_(weights, [piece.view_as(one) for piece, one in zip(pieces, weights, strict=True)])


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def _join(states: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """All of a kind end to end. Each state becomes a piece of that: the next time nothing is copied."""
    return {name: _join_named(states, name) for name in _STATES if name in states[0]}


def _join_named(states: Sequence[dict[str, Any]], name: str) -> Tensor:
    found: list[Tensor] = [state[name] for state in states]
    base = found[0]._base
    if base is not None and _are_pieces(found, base):
        return base
    whole = torch.cat([one.flatten() for one in found])
    for state, piece in zip(states, whole.split([one.numel() for one in found]), strict=True):
        state[name] = piece.view_as(state[name])
    return whole


def _are_pieces(found: Sequence[Tensor], whole: Tensor) -> bool:
    """All of it, in order. A checkpoint that was loaded has tensors of its own."""
    place = 0
    for one in found:
        if one._base is not whole or one.storage_offset() != place:
            return False
        place += one.numel()
    return place == whole.numel()


def _lay_together(due: Sequence[_Due], states: Any) -> Iterator[list[_Due]]:
    """Those that are alike, as many as fit; others alone."""
    alike: dict[tuple[object, ...], list[_Due]] = {}
    for one in due:
        weight, state = one.weight, states[one.weight]
        is_quantised = state["state1"].dtype == torch.uint8
        fits = weight.numel() <= _LARGEST and not (is_quantised and weight.numel() % _BLOCK)
        key = (one.group_index, is_quantised, state["step"], weight.dtype, weight.device) if fits else (id(weight),)
        together = alike.setdefault(key, [])
        if together and sum(other.weight.numel() for other in together) + weight.numel() > _TOGETHER:
            yield together
            together = alike[key] = []
        together.append(one)
    yield from alike.values()


@contextmanager
def _without_waiting() -> Iterator[None]:
    theirs = their_module.sync_gpu
    their_module.sync_gpu = _do_not_wait
    try:
        yield
    finally:
        their_module.sync_gpu = theirs


def _do_not_wait(_tensor: Tensor) -> None:
    """Its place in their step."""
