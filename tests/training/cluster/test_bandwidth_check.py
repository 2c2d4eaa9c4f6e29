"""The timed sum over all ranks: its figures, and what is said of a slow network. Two real ranks: tests/distributed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from launcher.core.errors import RunFailedError
from launcher.core.units import MIB
from launcher.hardware.gpu_catalogue import lookup_gpu
from launcher.hardware.model import make_hardware
from launcher.plan.estimate.communication import reached_gb_per_second
from launcher.training.cluster.bandwidth_check import LinkSpeed, format_slow_links, measure_link_speed


@pytest.fixture
def _group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_bus_bandwidth() -> None:
    """A ring of four sends and receives three quarters of it twice."""
    four = LinkSpeed(num_ranks=4, num_bytes=64 * MIB, seconds=0.01, latency_seconds=20e-6)
    assert four.gb_per_second == pytest.approx(1.5 * 64 * MIB / 0.01 / 1e9)
    assert str(four) == "all-reduce of 64 MiB over 4 ranks in 10.0 ms, bus bandwidth 10.1 GB/s; latency 20 µs"


@pytest.mark.parametrize(("gb_per_second", "is_slow"), [(400.0, False), (47.0, False), (46.0, True), (0.1, True)])
def test_slowness_is_several_times_less_than_counted_on(gb_per_second: float, is_slow: bool) -> None:
    hardware = make_hardware(lookup_gpu("h100"), gpus_per_node=8, nodes=2)
    counted = reached_gb_per_second(hardware)
    assert counted == pytest.approx(0.7 * 8 * 25)  # a network card for each GPU
    seconds = 1.875 * 64 * MIB / 1e9 / gb_per_second
    said = format_slow_links(
        LinkSpeed(num_ranks=16, num_bytes=64 * MIB, seconds=seconds, latency_seconds=1e-5), counted
    )
    assert bool(said) == is_slow
    if is_slow:
        assert f"is {gb_per_second:g} GB/s, the plan expects 140" in said


def test_cpu_ranks_are_never_called_slow() -> None:
    slow = LinkSpeed(num_ranks=2, num_bytes=4 * MIB, seconds=60.0, latency_seconds=1.0)
    assert format_slow_links(slow, reached_gb_per_second(make_hardware(None, gpus_per_node=0, nodes=1))) == ""


@pytest.mark.usefixtures("_group")
def test_it_is_measured() -> None:
    measured = measure_link_speed(torch.device("cpu"))
    assert (measured.num_ranks, measured.num_bytes) == (1, 4 * MIB)
    assert 0 < measured.latency_seconds < 60
    assert 0 < measured.seconds < 60


@pytest.mark.usefixtures("_group")
def test_a_sum_that_is_wrong_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(RunFailedError, match="a 1 from each of 2 ranks adds up to 1"):
        measure_link_speed(torch.device("cpu"))
