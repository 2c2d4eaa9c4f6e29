"""GPU counters are averaged between steps."""

from __future__ import annotations

import pytest
import torch

from launcher.core import metrics
from launcher.training.monitoring.meters import NvmlMeter, StepStats
from launcher.training.monitoring.nvml import GpuSample, NvmlSampler, _take_sample
from tests.fake_nvml import MIB, FakeGpu, install_nvml


def done(tokens: int = 1000, seconds: float = 2.0) -> StepStats:
    return StepStats(step=1, packs=[0], num_tokens=tokens, seconds=seconds, starved_seconds=0.0, is_skipped=False)


def test_without_a_gpu_there_are_no_counters() -> None:
    sampler = NvmlSampler(torch.device("cpu"))
    assert sampler.start() == "no GPU"
    assert NvmlMeter(sampler, num_ranks=1).read(done()) == {}
    sampler.stop()


def test_the_mean_since_the_last_read_then_the_last_value() -> None:
    sampler = NvmlSampler(torch.device("cuda"))
    sampler._add(GpuSample(utilization=0.8, watts=300.0, celsius=60.0, used_bytes=3 * 2**30))
    sampler._add(GpuSample(utilization=1.0, watts=500.0, celsius=64.0, used_bytes=2 * 2**30))
    meter = NvmlMeter(sampler, num_ranks=4)
    values = meter.read(done())
    assert values == {
        metrics.GPU_UTILIZATION: pytest.approx(0.9),
        metrics.GPU_POWER_WATTS: pytest.approx(400.0),
        metrics.GPU_TEMPERATURE: 64.0,
        metrics.USED_GIB: 3.0,
        metrics.JOULES_PER_TOKEN: pytest.approx(400 * 2 * 4 / 1000),
    }
    assert meter.read(done()) == values, "a step that is shorter than the sampling"


def test_sample_has_the_memory_of_all_processes_if_the_driver_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install_nvml(monkeypatch, FakeGpu(used_mib=5000), FakeGpu(total_mib=None))
    samples = [_take_sample(nvml, index) for index in range(2)]
    assert [sample.used_bytes for sample in samples] == [5000 * MIB, None]
