"""Step time, and the device's idle time within it."""

from __future__ import annotations

import time

import pytest
import torch

from launcher.training.monitoring.step_timer import StepTimer


def test_step_time_and_data_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = StepTimer(torch.device("cpu"))
    for _ in range(2):  # two micro-batches
        with clock.waiting_for_data():
            now[0] += 0.25
        now[0] += 1.0
    timing = clock.finish_step()
    now[0] += 5.0
    assert timing.seconds() == pytest.approx(2.5)
    assert timing.data_seconds == pytest.approx(0.5)
    assert timing.starved_seconds() == pytest.approx(0.5)
    clock.restart()
    now[0] += 1.0
    second = clock.finish_step()
    assert second.seconds() == pytest.approx(1.0)
    assert second.data_seconds + second.starved_seconds() == 0.0, "each step starts at zero"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_queued_work_hides_a_wait() -> None:
    """The device is idle only if the host waits longer than the device computes."""
    clock = StepTimer(torch.device("cuda"))
    big = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(200):
        big = torch.nn.functional.normalize(big @ big)
    with clock.waiting_for_data():
        time.sleep(0.02)
    busy = clock.finish_step()
    torch.cuda.synchronize()
    with clock.waiting_for_data():
        time.sleep(0.2)
    idle = clock.finish_step()
    assert busy.data_seconds > 0.015
    assert busy.starved_seconds() < 0.005
    assert idle.starved_seconds() > 0.15
