"""Work beside the training: waited for with signs of life, its errors raised where it is waited for."""

from __future__ import annotations

import time

import pytest

from launcher.training.background import Background


def test_whoever_waits_gives_signs_of_life() -> None:
    beats: list[int] = []
    done: list[int] = []

    def work() -> None:
        time.sleep(1.5)
        done.append(1)

    background = Background()
    background.start(work)
    background.wait(lambda: beats.append(1))
    assert done == [1]
    assert len(beats) >= 2


def test_an_error_is_raised_once() -> None:
    def fail() -> None:
        raise OSError("full")

    background = Background()
    background.start(fail)
    with pytest.raises(OSError, match="full"):
        background.wait()
    background.wait()
