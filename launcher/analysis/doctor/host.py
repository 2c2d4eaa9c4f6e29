"""Check the host: CPU cores and load, memory, swap, shared memory and process limits."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.analysis.doctor.findings import Finding, Reporter
from launcher.core.installation import find_page
from launcher.core.units import GIB, MIB, format_gib
from launcher.hardware.probe import probe_cpu_cores, probe_ram_bytes
from launcher.judges.sandbox import describe_boundary

SHM_FOLDER = Path("/dev/shm")
# Docker's default, enough for our batches, but not for the buffers of several NCCL ranks.
_MIN_SHM = 64 * MIB
_MIN_SHM_MULTI_RANK = 1 * GIB
_SHM_FULL = 0.9
_MIN_RAM = 2 * GIB
_MAX_SWAP_USED = 1 * GIB
_CORES_PER_GPU = 2  # one drives it, one prepares batches
_MIN_OPEN_FILES = 1024  # default of Linux; two workers with four prefetched batches use about a hundred
_MIN_FILE_LIMIT = 16 * GIB
_BUSY = 1.5  # runnable processes per core
_report = Reporter("machine")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """Measured state of the host."""

    cores: int  # available to this process
    machine_cores: int
    load: float  # runnable processes on the machine (1 minute average)
    ram_bytes: int  # available
    swap_bytes: int
    swap_used_bytes: int
    shm_bytes: int | None  # None: no /dev/shm
    shm_free_bytes: int
    open_files: int | None  # limits of this process; None: unlimited
    locked_bytes: int | None
    file_bytes: int | None
    address_bytes: int | None
    has_infiniband: bool
    is_wsl: bool


def probe_host(root: Path = Path("/"), shm: Path = SHM_FOLDER) -> HostFacts:
    """Measure the host's CPU cores, load, memory and limits; tests pass another `root` for control groups and /sys."""
    import psutil

    swap = psutil.swap_memory()
    try:
        size, _, free = shutil.disk_usage(shm)
    except OSError:
        size, free = None, 0
    return HostFacts(
        cores=probe_cpu_cores(root),
        machine_cores=os.cpu_count() or 1,
        load=psutil.getloadavg()[0],
        ram_bytes=probe_ram_bytes(root),
        swap_bytes=swap.total,
        swap_used_bytes=swap.used,
        shm_bytes=size,
        shm_free_bytes=free,
        open_files=_get_limit(resource.RLIMIT_NOFILE),
        locked_bytes=_get_limit(resource.RLIMIT_MEMLOCK),
        file_bytes=_get_limit(resource.RLIMIT_FSIZE),
        address_bytes=_get_limit(resource.RLIMIT_AS),
        has_infiniband=any((root / "sys/class/infiniband").glob("*")),
        is_wsl="microsoft" in platform.release().lower() or (root / "usr/lib/wsl").is_dir(),
    )


def _get_limit(number: int) -> int | None:
    limit = resource.getrlimit(number)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def check_host(facts: HostFacts, num_gpus: int) -> Iterator[Finding]:
    """Check the host's CPU cores, load, memory, swap, shared memory and process limits."""
    yield _check_cores(facts, num_gpus)
    yield _check_load(facts)
    yield _check_ram(facts)
    yield _check_swap(facts)
    yield _check_shm(facts, num_gpus)
    yield from _check_limits(facts)


def check_judges() -> Iterator[Finding]:
    """Check whether judges execute answers in a sandbox: without network, writable files or other processes."""
    gaps = describe_boundary()
    if not gaps:
        yield _report.ok("judges", "answers are judged without network, writable files or other processes")
        return
    why = "judges execute code that a model generated"
    remedy = f"evaluate on Linux with user namespaces or seccomp; see {find_page('SECURITY.md')}"
    yield _report.note("judges", gaps, why, remedy)


def _check_cores(facts: HostFacts, num_gpus: int) -> Finding:
    part = "" if facts.cores >= facts.machine_cores else f" of {facts.machine_cores} (affinity or control group)"
    found = f"{facts.cores} cores{part}"
    if num_gpus and facts.cores < _CORES_PER_GPU * num_gpus:
        return _report.problem(
            "CPU cores",
            f"{found} for {num_gpus} GPUs",
            "each GPU needs one core that drives it and one that prepares batches; with fewer it waits",
            f"give the job at least {_CORES_PER_GPU * num_gpus} cores: docker --cpus, Slurm --cpus-per-task, taskset",
        )
    return _report.ok("CPU cores", found)


def _check_load(facts: HostFacts) -> Finding:
    found = f"{facts.load:.1f} runnable processes on {facts.machine_cores} cores"
    if facts.load > _BUSY * facts.machine_cores:
        return _report.note("CPU load", found, "other programs use the CPU: steps are slower and less even", "top")
    return _report.ok("CPU load", found)


def _check_ram(facts: HostFacts) -> Finding:
    found = f"{format_gib(facts.ram_bytes)} available"
    if facts.ram_bytes < _MIN_RAM:
        return _report.problem(
            "CPU memory",
            found,
            "loading a base model and saving a checkpoint need it; the kernel kills a process that exceeds it",
            "stop other programs, or raise the container's memory limit",
        )
    return _report.ok("CPU memory", found)


def _check_swap(facts: HostFacts) -> Finding:
    if not facts.swap_bytes:
        return _report.ok("swap", "none")
    found = f"{format_gib(facts.swap_used_bytes)} of {format_gib(facts.swap_bytes)} in use"
    if facts.swap_used_bytes > _MAX_SWAP_USED and facts.swap_used_bytes > facts.ram_bytes:
        return _report.note(
            "swap",
            found,
            "memory ran short: swapped pages must be read from disk before use",
            "stop programs that use much memory (in top, press M to sort by memory)",
        )
    return _report.ok("swap", found)


def _check_shm(facts: HostFacts, num_gpus: int) -> Finding:
    remedy = (
        "docker run --shm-size=8g (or --ipc=host), or mount -o remount,size=8G /dev/shm; "
        "until then --set training.config.dataloader_num_workers=0"
    )
    why = "DataLoader workers pass batches through it, and NCCL its buffers: they die with a bus error when it is full"
    if facts.shm_bytes is None:
        return _report.problem("shared memory", "there is no /dev/shm", why, remedy)
    found = f"{_format_bytes(facts.shm_free_bytes)} of {_format_bytes(facts.shm_bytes)} free"
    needed = _MIN_SHM_MULTI_RANK if num_gpus > 1 else _MIN_SHM
    if facts.shm_bytes < needed:
        least = f"{_format_bytes(needed)} are needed" + (f" by {num_gpus} ranks" if num_gpus > 1 else "")
        return _report.problem("shared memory", f"{found}; {least}", why, remedy)
    if facts.shm_free_bytes < needed:
        who = "ls -lS /dev/shm shows what fills it: files of processes that were killed may be deleted"
        return _report.problem("shared memory", found, why, who)
    if facts.shm_free_bytes < (1 - _SHM_FULL) * facts.shm_bytes:
        return _report.note("shared memory", found, "it is nearly full", "ls -lS /dev/shm shows what fills it")
    return _report.ok("shared memory", found)


def _format_bytes(num_bytes: int) -> str:
    return f"{num_bytes // 1024} KiB" if num_bytes < MIB else format_gib(num_bytes)


def _check_limits(facts: HostFacts) -> Iterator[Finding]:
    problems = [
        (
            facts.open_files is not None and facts.open_files < _MIN_OPEN_FILES,
            f"{facts.open_files} open files",
            "every batch that a worker passes on is an open file",
            "ulimit -n 65536 (docker run --ulimit nofile=65536:65536)",
        ),
        (
            facts.has_infiniband and facts.locked_bytes is not None,
            f"{format_gib(facts.locked_bytes or 0)} of locked memory",
            "InfiniBand locks its buffers: NCCL fails or falls back to TCP sockets",
            "ulimit -l unlimited (docker run --ulimit memlock=-1)",
        ),
        (
            facts.file_bytes is not None and facts.file_bytes < _MIN_FILE_LIMIT,
            f"files of at most {format_gib(facts.file_bytes or 0)}",
            "a checkpoint or a merged model is larger, and writing it would fail",
            "ulimit -f unlimited",
        ),
        (
            facts.address_bytes is not None,
            f"{format_gib(facts.address_bytes or 0)} of address space",
            "CUDA maps far more than it uses, and fails to start with such a limit",
            "ulimit -v unlimited",
        ),
    ]
    wrong = [
        _report.problem("limits", found, matters, next_step)
        for applies, found, matters, next_step in problems
        if applies
    ]
    files = "any number of" if facts.open_files is None else f"{facts.open_files:,}"
    yield from wrong or [_report.ok("limits", f"{files} open files, no other limit that affects training")]
