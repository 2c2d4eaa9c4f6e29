"""What the driver tells of a GPU, averaged between steps. The driver itself is asked on a GPU only."""

from __future__ import annotations

import pytest
import torch

from launcher import metrics
from launcher.training.gpu_counters import GpuCounters, GpuSample
from launcher.training.measures import Counters, Done


def done(tokens: int = 1000, seconds: float = 2.0) -> Done:
    return Done(step=1, packs=[0], num_tokens=tokens, seconds=seconds, starved_seconds=0.0, is_skipped=False)


def test_without_a_gpu_there_is_nothing_to_read() -> None:
    counters = GpuCounters(torch.device("cpu"))
    assert counters.start() == "no GPU"
    assert Counters(counters, num_ranks=1).read(done()) == {}
    counters.stop()


def test_the_mean_since_the_last_step_and_then_the_last_one_known() -> None:
    counters = GpuCounters(torch.device("cuda"))
    counters._add(GpuSample(utilization=0.8, watts=300.0, celsius=60.0))
    counters._add(GpuSample(utilization=1.0, watts=500.0, celsius=64.0))
    measure = Counters(counters, num_ranks=4)
    told = measure.read(done())
    assert told == {
        metrics.GPU_UTILIZATION: pytest.approx(0.9),
        metrics.GPU_POWER_WATTS: pytest.approx(400.0),
        metrics.GPU_TEMPERATURE: 64.0,
        metrics.JOULES_PER_TOKEN: pytest.approx(400 * 2 * 4 / 1000),
    }
    assert measure.read(done()) == told, "a step that is shorter than the sampling"
