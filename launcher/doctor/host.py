"""The machine beside its GPUs: cores, memory, swap, shared memory, limits of a process."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.doctor.findings import Finding, Status
from launcher.probe import probe_cpu_cores, probe_ram_bytes
from launcher.units import GIB, MIB, format_gib

SHM_FOLDER = Path("/dev/shm")
# What a container gets where nobody says more. Batches of ours fit; the buffers of several NCCL ranks do not.
_SHM_LEAST = 64 * MIB
_SHM_FOR_RANKS = 1 * GIB
_SHM_FULL = 0.9
_RAM_LEAST = 2 * GIB
_SWAPPED_MUCH = 1 * GIB
_CORES_FOR_GPU = 2  # one drives it, one makes batches
_OPEN_FILES = 1024  # Linux' own default; two workers with four batches ahead hold about a hundred
_LARGEST_FILE = 16 * GIB
_BUSY = 1.5  # processes that want to run, for each core


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of this process; None: no limit."""

    open_files: int | None
    locked_bytes: int | None
    file_bytes: int | None
    address_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    cores: int  # that this process may use
    machine_cores: int
    load: float | None  # processes that want to run, over the whole machine
    ram_bytes: int  # that can still be had
    swap_bytes: int
    swap_used_bytes: int
    shm_bytes: int | None  # None: there is none
    shm_free_bytes: int
    limits: Limits
    has_infiniband: bool
    is_wsl: bool


def probe_host(root: Path = Path("/"), shm: Path = SHM_FOLDER) -> HostFacts:
    """`root` is where /proc and /sys lie: a test gives its own."""
    swap = _read_meminfo(root, "SwapTotal")
    size, free = _probe_shm(shm)
    version = _read(root / "proc/version").lower()
    return HostFacts(
        cores=probe_cpu_cores(root),
        machine_cores=os.cpu_count() or 1,
        load=_read_load(root),
        ram_bytes=probe_ram_bytes(root),
        swap_bytes=swap,
        swap_used_bytes=swap - _read_meminfo(root, "SwapFree"),
        shm_bytes=size,
        shm_free_bytes=free,
        limits=_probe_limits(),
        has_infiniband=any(_list(root / "sys/class/infiniband")),
        is_wsl="microsoft" in version or (root / "usr/lib/wsl").is_dir(),
    )


def _probe_shm(folder: Path) -> tuple[int | None, int]:
    try:
        usage = os.statvfs(folder)
    except OSError:
        return None, 0
    return usage.f_blocks * usage.f_frsize, usage.f_bavail * usage.f_frsize


def _probe_limits() -> Limits:
    def soft(number: int) -> int | None:
        limit = resource.getrlimit(number)[0]
        return None if limit == resource.RLIM_INFINITY else limit

    return Limits(
        open_files=soft(resource.RLIMIT_NOFILE),
        locked_bytes=soft(resource.RLIMIT_MEMLOCK),
        file_bytes=soft(resource.RLIMIT_FSIZE),
        address_bytes=soft(resource.RLIMIT_AS),
    )


def _read_meminfo(root: Path, name: str) -> int:
    found = re.search(rf"^{name}:\s+([0-9]+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _read_load(root: Path) -> float | None:
    with suppress(ValueError, IndexError):
        return float(_read(root / "proc/loadavg").split()[0])
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _list(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from folder.iterdir()


def judge_host(facts: HostFacts, num_gpus: int) -> Iterator[Finding]:
    yield _judge_cores(facts, num_gpus)
    yield _judge_load(facts)
    yield _judge_ram(facts)
    yield _judge_swap(facts)
    yield _judge_shm(facts, num_gpus)
    yield from _judge_limits(facts)


def _tell(subject: str, status: Status, found: str, matters: str = "", next_step: str = "") -> Finding:
    return Finding(family="machine", subject=subject, status=status, found=found, matters=matters, next_step=next_step)


def _judge_cores(facts: HostFacts, num_gpus: int) -> Finding:
    part = "" if facts.cores >= facts.machine_cores else f" of {facts.machine_cores} (affinity or control group)"
    found = f"{facts.cores} cores{part}"
    if num_gpus and facts.cores < _CORES_FOR_GPU * num_gpus:
        return _tell(
            "CPU cores",
            "problem",
            f"{found} for {num_gpus} GPUs",
            "each GPU needs one core that drives it and one that makes batches; with fewer it waits",
            f"give the job at least {_CORES_FOR_GPU * num_gpus} cores: docker --cpus, Slurm --cpus-per-task, taskset",
        )
    return _tell("CPU cores", "ok", found)


def _judge_load(facts: HostFacts) -> Finding:
    if facts.load is None:
        return _tell("CPU load", "ok", "not told by this system")
    found = f"{facts.load:.1f} processes want to run on {facts.machine_cores} cores"
    if facts.load > _BUSY * facts.machine_cores:
        return _tell("CPU load", "note", found, "others compute here: steps will be slower and less even", "top")
    return _tell("CPU load", "ok", found)


def _judge_ram(facts: HostFacts) -> Finding:
    found = f"{format_gib(facts.ram_bytes)} can be had"
    if facts.ram_bytes < _RAM_LEAST:
        return _tell(
            "CPU memory",
            "problem",
            found,
            "loading a base and saving a checkpoint pass through it; the kernel kills whoever asks for more",
            "end what is not needed, or raise the container's memory limit",
        )
    return _tell("CPU memory", "ok", found)


def _judge_swap(facts: HostFacts) -> Finding:
    if not facts.swap_bytes:
        return _tell("swap", "ok", "none")
    found = f"{format_gib(facts.swap_used_bytes)} of {format_gib(facts.swap_bytes)} in use"
    if facts.swap_used_bytes > _SWAPPED_MUCH and facts.swap_used_bytes > facts.ram_bytes:
        return _tell(
            "swap",
            "note",
            found,
            "memory was short here: what lies in swap is read from disk before it can be used",
            "free shows who is large; end what is not needed",
        )
    return _tell("swap", "ok", found)


def _judge_shm(facts: HostFacts, num_gpus: int) -> Finding:
    remedy = (
        "docker run --shm-size=8g (or --ipc=host), or mount -o remount,size=8G /dev/shm; "
        "until then --set training.config.dataloader_num_workers=0"
    )
    why = (
        "loader workers hand batches over through it, and NCCL its buffers: they die with a bus error where it is full"
    )
    if facts.shm_bytes is None:
        return _tell("shared memory", "problem", "there is no /dev/shm", why, remedy)
    found = f"{_format_small(facts.shm_free_bytes)} of {_format_small(facts.shm_bytes)} free"
    needed = _SHM_FOR_RANKS if num_gpus > 1 else _SHM_LEAST
    if facts.shm_bytes < needed:
        least = f"{_format_small(needed)} are needed" + (f" by {num_gpus} ranks" if num_gpus > 1 else "")
        return _tell("shared memory", "problem", f"{found}; {least}", why, remedy)
    if facts.shm_free_bytes < needed:
        who = "ls -lS /dev/shm shows what fills it: files of processes that were killed may be deleted"
        return _tell("shared memory", "problem", found, why, who)
    if facts.shm_free_bytes < (1 - _SHM_FULL) * facts.shm_bytes:
        return _tell("shared memory", "note", found, "it is nearly full", "ls -lS /dev/shm shows what fills it")
    return _tell("shared memory", "ok", found)


def _format_small(num_bytes: int) -> str:
    return f"{num_bytes // 1024} KiB" if num_bytes < MIB else format_gib(num_bytes)


def _judge_limits(facts: HostFacts) -> Iterator[Finding]:
    limits = facts.limits
    problems = [
        (
            limits.open_files is not None and limits.open_files < _OPEN_FILES,
            f"{limits.open_files} open files",
            "every batch that a worker hands over is an open file",
            "ulimit -n 65536 (docker run --ulimit nofile=65536:65536)",
        ),
        (
            facts.has_infiniband and limits.locked_bytes is not None,
            f"{format_gib(limits.locked_bytes or 0)} of locked memory",
            "InfiniBand locks its buffers: NCCL fails or falls back to slow sockets",
            "ulimit -l unlimited (docker run --ulimit memlock=-1)",
        ),
        (
            limits.file_bytes is not None and limits.file_bytes < _LARGEST_FILE,
            f"files of at most {format_gib(limits.file_bytes or 0)}",
            "a checkpoint or a merged model is larger, and its writing would end the run",
            "ulimit -f unlimited",
        ),
        (
            limits.address_bytes is not None,
            f"{format_gib(limits.address_bytes or 0)} of address space",
            "CUDA maps far more than it uses, and fails to start under such a limit",
            "ulimit -v unlimited",
        ),
    ]
    wrong = [
        _tell("limits", "problem", found, matters, next_step)
        for applies, found, matters, next_step in problems
        if applies
    ]
    files = "any number of" if limits.open_files is None else f"{limits.open_files:,}"
    yield from wrong or [_tell("limits", "ok", f"{files} open files, no limit that would end a training")]
