"""The background writer: waiting sends heartbeats, and raises errors of the write."""

from __future__ import annotations

import time

import pytest

from launcher.training.observers.checkpointer import BackgroundWriter


def test_waiting_sends_heartbeats() -> None:
    beats: list[int] = []
    done: list[int] = []

    def work() -> None:
        time.sleep(1.5)
        done.append(1)

    background = BackgroundWriter()
    background.start(work)
    background.wait(lambda: beats.append(1))
    assert done == [1]
    assert len(beats) >= 2


def test_an_error_is_raised_once() -> None:
    def fail() -> None:
        raise OSError("full")

    background = BackgroundWriter()
    background.start(fail)
    with pytest.raises(OSError, match="full"):
        background.wait()
    background.wait()
