"""How long a step took, and how much of it the device had nothing to do."""

from __future__ import annotations

import time

import pytest
import torch

from launcher.training.clock import StepClock


def test_a_step_and_what_it_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = StepClock(torch.device("cpu"))
    for _ in range(2):  # two micro-batches
        with clock.waiting():
            now[0] += 0.25
        now[0] += 1.0
    lap = clock.lap()
    now[0] += 5.0
    assert lap.seconds() == pytest.approx(2.5)
    assert lap.data_seconds == pytest.approx(0.5)
    assert lap.starved_seconds() == pytest.approx(0.5)
    clock.restart()
    now[0] += 1.0
    second = clock.lap()
    assert second.seconds() == pytest.approx(1.0)
    assert second.data_seconds + second.starved_seconds() == 0.0, "a lap of its own"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_work_that_is_queued_hides_a_wait() -> None:
    """A host that waits while the device still computes starves nobody; one that waits behind it does."""
    clock = StepClock(torch.device("cuda"))
    big = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(200):
        big = torch.nn.functional.normalize(big @ big)
    with clock.waiting():
        time.sleep(0.02)
    busy = clock.lap()
    torch.cuda.synchronize()
    with clock.waiting():
        time.sleep(0.2)
    idle = clock.lap()
    assert busy.data_seconds > 0.015
    assert busy.starved_seconds() < 0.005
    assert idle.starved_seconds() > 0.15
