"""A switch to PEFT's and transformers' own forward methods, with which ours are compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class _ReferenceForward:
    is_active = False


def is_reference_forward() -> bool:
    """Return whether PEFT's and transformers' own forward methods are in use."""
    return _ReferenceForward.is_active


@contextmanager
def use_reference_forward() -> Iterator[None]:
    """Use PEFT's and transformers' own forward methods inside the context, as the reference for ours."""
    was_active, _ReferenceForward.is_active = _ReferenceForward.is_active, True
    try:
        yield
    finally:
        _ReferenceForward.is_active = was_active
