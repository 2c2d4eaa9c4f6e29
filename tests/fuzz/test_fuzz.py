"""A short, seeded run of `make fuzz`, and the damage that was found by hand."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.fuzz.__main__ import TARGETS, fuzz

SECONDS = 1.0


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", TARGETS)
def test_a_short_fuzzing_finds_nothing(name: str) -> None:
    number, found = fuzz(name, SECONDS, "test")
    assert number
    assert not found, "\n".join(found)
