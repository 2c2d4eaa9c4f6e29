"""Measure the real bandwidth between ranks by a timed all-reduce, before the model is built."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from launcher.core.errors import RunFailedError
from launcher.core.log import get_logger
from launcher.core.units import MIB
from launcher.plan.estimate.communication import reached_gb_per_second
from launcher.plan.model import Plan
from launcher.training.runtime.run_record import RunRecorder

log = get_logger(__name__)

_GPU_BYTES = 64 * MIB
_CPU_BYTES = 4 * MIB
_TINY_ELEMENTS = 1
_NUM_WARM_UPS = 2  # the first one connects
_NUM_TIMED = 5
_SLOW_FACTOR = 3.0  # slower than planned by more than a busy network explains


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSpeed:
    """Measured time of a large all-reduce over all ranks, and of an all-reduce of one number (latency)."""

    num_ranks: int
    num_bytes: int
    seconds: float  # per all-reduce of num_bytes
    latency_seconds: float  # per all-reduce of one number

    @property
    def gb_per_second(self) -> float:
        """The bus bandwidth as defined by nccl-tests, which is comparable between different numbers of ranks."""
        return 2 * (self.num_ranks - 1) / self.num_ranks * self.num_bytes / self.seconds / 1e9

    def __str__(self) -> str:
        return (
            f"all-reduce of {self.num_bytes // MIB} MiB over {self.num_ranks} ranks in {1e3 * self.seconds:.1f} ms, "
            f"bus bandwidth {self.gb_per_second:.3g} GB/s; latency {1e6 * self.latency_seconds:.0f} µs"
        )


def check_bandwidth(plan: Plan, accelerator: Accelerator, recorder: RunRecorder) -> None:
    """Measure, print and record the bandwidth between ranks; warn if it is low. Every rank must call this."""
    if accelerator.num_processes == 1:
        return
    speed = measure_link_speed(accelerator.device)
    warning = format_slow_links(speed, reached_gb_per_second(plan.hardware))
    if accelerator.is_main_process:
        log.info(f"links: {speed}")
        if warning:
            log.warning(warning)
    recorder.update(observed={"links": f"{speed}; {warning}" if warning else str(speed)}, slow_links=warning)


def measure_link_speed(device: torch.device) -> LinkSpeed:
    """Time all-reduces of a large and a small tensor."""
    num_bytes = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES
    tiny = torch.ones(_TINY_ELEMENTS, device=device)
    dist.all_reduce(tiny)
    num_ranks = dist.get_world_size()
    if float(tiny[0]) != num_ranks:
        raise RunFailedError(f"all-reduce is wrong: a 1 from each of {num_ranks} ranks adds up to {float(tiny[0]):g}")
    return LinkSpeed(
        num_ranks=num_ranks,
        num_bytes=num_bytes,
        seconds=_time(torch.zeros(num_bytes // 4, device=device)),
        latency_seconds=_time(torch.zeros(_TINY_ELEMENTS, device=device)),
    )


def format_slow_links(speed: LinkSpeed, planned_gb_per_second: float) -> str:
    """Return a warning if links are much slower than planned, else an empty text; CPU ranks have no planned speed."""
    if planned_gb_per_second == float("inf") or speed.gb_per_second * _SLOW_FACTOR >= planned_gb_per_second:
        return ""
    return (
        f"the bandwidth between ranks is {speed.gb_per_second:.3g} GB/s, the plan expects "
        f"{planned_gb_per_second:.3g}: steps will take longer than estimated"
    )


def _time(tensor: Tensor) -> float:
    """Return the median time of an all-reduce."""
    seconds = []
    for _ in range(_NUM_WARM_UPS + _NUM_TIMED):
        started = time.perf_counter()
        dist.all_reduce(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[_NUM_WARM_UPS:])
