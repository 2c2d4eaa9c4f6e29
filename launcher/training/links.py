"""How fast the ranks really reach each other: one timed sum over all of them, before the model is built."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from launcher.errors import RunFailedError, say
from launcher.plan.model import Plan
from launcher.scaling import reached_gb_per_second
from launcher.training.chronicle import Chronicle
from launcher.units import MIB

_GPU_BYTES = 64 * MIB
_CPU_BYTES = 4 * MIB
_TINY_ELEMENTS = 1
_NUM_WARM_UPS = 2  # the first makes the connections
_NUM_TIMED = 5
_SLOW = 3.0  # times slower than the plan counted on: not what a busy network explains


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    num_ranks: int
    num_bytes: int
    seconds: float  # of summing that much over all ranks
    latency_seconds: float  # of summing one number

    @property
    def gb_per_second(self) -> float:
        """What each rank's link carries, as others measure it ("bus bandwidth"): comparable over numbers of ranks."""
        return 2 * (self.num_ranks - 1) / self.num_ranks * self.num_bytes / self.seconds / 1e9

    def __str__(self) -> str:
        return (
            f"all-reduce of {self.num_bytes // MIB} MiB over {self.num_ranks} ranks in {1e3 * self.seconds:.1f} ms, "
            f"bus {self.gb_per_second:.3g} GB/s; of one number in {1e6 * self.latency_seconds:.0f} µs"
        )


def check_links(plan: Plan, accelerator: Accelerator, chronicle: Chronicle) -> None:
    """Every rank must call it. One that does not come is given up on when the group's patience ends."""
    if accelerator.num_processes == 1:
        return
    links = measure_links(accelerator.device)
    slow = find_slowness(links, reached_gb_per_second(plan.hardware))
    if accelerator.is_main_process:
        say(f"links: {links}")
        if slow:
            say(f"warning: {slow}")
    chronicle.note(observed={"links": f"{links}; {slow}" if slow else str(links)})


def measure_links(device: torch.device) -> Links:
    num_bytes = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES
    tiny = torch.ones(_TINY_ELEMENTS, device=device)
    dist.all_reduce(tiny)
    num_ranks = dist.get_world_size()
    if float(tiny[0]) != num_ranks:
        raise RunFailedError(f"the sum of a one from each of {num_ranks} ranks is {float(tiny[0]):g}")
    return Links(
        num_ranks=num_ranks,
        num_bytes=num_bytes,
        seconds=_time(torch.zeros(num_bytes // 4, device=device)),
        latency_seconds=_time(torch.zeros(_TINY_ELEMENTS, device=device)),
    )


def find_slowness(links: Links, counted_gb_per_second: float) -> str:
    """Nothing where it is fast enough, and on CPU ranks, whose links no plan counts on."""
    if counted_gb_per_second == float("inf") or links.gb_per_second * _SLOW >= counted_gb_per_second:
        return ""
    return (
        f"the ranks reach each other at {links.gb_per_second:.3g} GB/s, and the plan counts on "
        f"{counted_gb_per_second:.3g}: steps will take longer than it says"
    )


def _time(numbers: Tensor) -> float:
    """The middle one of a few."""
    seconds = []
    for _ in range(_NUM_WARM_UPS + _NUM_TIMED):
        began = time.perf_counter()
        dist.all_reduce(numbers)
        if numbers.is_cuda:
            torch.cuda.synchronize(numbers.device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[_NUM_WARM_UPS:])
