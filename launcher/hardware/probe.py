"""Probe of this machine: GPUs from nvidia-smi, CPU cores and memory available to this process, optional packages.

torch is not imported: it is slow to load, and a process that has initialized CUDA holds memory on every GPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.core.errors import InputError, Problem
from launcher.core.units import bytes_to_gib
from launcher.hardware.gpu_catalogue import match_gpu
from launcher.hardware.model import Gpu, Hardware

PACKAGES = ("flash_attn", "flash_attn.cute", "flash_attn_interface", "triton", "bitsandbytes", "deepspeed")

_QUERY = ("index", "uuid", "name", "memory.total", "memory.free", "compute_cap", "mig.mode.current")
_NVIDIA_SMI = ("nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits")
_DRIVER_QUERY = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
_TIMEOUT_SECONDS = 30  # without its persistence daemon the driver takes seconds to wake up eight GPUs
_PLAN_BY_NAME = "plan for a GPU of the catalogue instead, such as --gpu rtx4090"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReading:
    """One GPU as nvidia-smi lists it. None: the driver does not report the value ("[N/A]")."""

    index: int
    uuid: str
    name: str
    memory_mib: int | None
    free_mib: int | None
    compute_capability: tuple[int, int] | None
    is_mig: bool


def probe_hardware() -> Hardware:
    """Probe this machine as one node; without a usable nvidia-smi it has no GPU."""
    readings = select_visible(parse_nvidia_smi(_run_nvidia_smi()), os.environ)
    free = [reading.free_mib for reading in readings if reading.free_mib is not None]
    return Hardware(
        gpu=make_common_gpu(readings) if readings else None,
        gpus_per_node=len(readings),
        nodes=1,
        free_vram_mib=min(free) if free else None,
        cpu_cores_per_node=probe_cpu_cores(),
        ram_gib_per_node=round(bytes_to_gib(probe_ram_bytes()), 1),
        source="probe",
        packages=probe_packages(),
    )


def probe_packages() -> tuple[str, ...]:
    """Return the installed optional packages without importing them."""
    return tuple(name for name in PACKAGES if _is_installed(name))


def _is_installed(name: str) -> bool:
    """flash-attn-4 is a subpackage of flash_attn, even without the older package; find_spec would import the parent."""
    parent, _, child = name.partition(".")
    spec = importlib.util.find_spec(parent)
    if spec is None or not child:
        return spec is not None and spec.origin is not None
    return any((Path(folder) / child / "__init__.py").is_file() for folder in spec.submodule_search_locations or ())


def _run_nvidia_smi(command: Sequence[str] = _NVIDIA_SMI) -> str:
    try:
        result = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.decode("utf-8", "replace")


def probe_driver() -> str | None:
    """Return the version of the NVIDIA driver, or None."""
    versions = _run_nvidia_smi(_DRIVER_QUERY).split()
    return versions[0] if versions else None


def parse_nvidia_smi(text: str) -> tuple[GpuReading, ...]:
    """Parse the output of nvidia-smi; other lines (warnings, "No devices were found") are ignored."""
    rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines())
    return tuple(_make_reading(row) for row in rows if len(row) == len(_QUERY) and _parse_integer(row[0]) is not None)


def _make_reading(row: Sequence[str]) -> GpuReading:
    index, uuid, name, total, free, capability, mig = row
    version = re.fullmatch(r"([0-9]{1,3})\.([0-9]{1,3})", capability)
    return GpuReading(
        index=_parse_integer(index) or 0,
        uuid=uuid,
        name=name,
        memory_mib=_parse_integer(total),
        free_mib=_parse_integer(free),
        compute_capability=(int(version[1]), int(version[2])) if version else None,
        is_mig=mig.lower() == "enabled",
    )


def _parse_integer(text: str) -> int | None:
    """Parse a non-negative integer in ASCII digits: isdigit() accepts "²", int() does not."""
    return int(text) if re.fullmatch("[0-9]{1,20}", text) else None


def select_visible(readings: Sequence[GpuReading], environ: Mapping[str, str]) -> tuple[GpuReading, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects, as CUDA does: up to the first invalid entry."""
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None or not readings:
        return tuple(readings)
    entries = [entry.strip() for entry in wanted.split(",")]
    if entries[0] in ("", "-1", "NoDevFiles"):
        return ()
    if any(_parse_integer(entry) is not None for entry in entries):
        _check_device_order(readings, wanted, environ)
    visible = tuple(_select_named(readings, entries))
    if len(set(visible)) < max(1, len(visible)):  # CUDA shows no GPU if one is listed twice
        raise _make_empty_selection_error(readings, wanted)
    return visible


def _select_named(readings: Sequence[GpuReading], entries: Sequence[str]) -> Iterator[GpuReading]:
    for entry in entries:
        named = [reading for reading in readings if _selects(entry, reading)]
        if len(named) != 1:  # no GPU, or an ambiguous UUID prefix
            return
        yield named[0]


def _selects(entry: str, reading: GpuReading) -> bool:
    """Whether an entry (an index or a UUID prefix) selects this GPU."""
    if (index := _parse_integer(entry)) is not None:
        return index == reading.index
    return entry.startswith("GPU-") and reading.uuid.startswith(entry)


def _check_device_order(readings: Sequence[GpuReading], wanted: str, environ: Mapping[str, str]) -> None:
    """Refuse ambiguous indices: CUDA orders different GPUs by speed, nvidia-smi by PCI bus."""
    if _are_equal(readings) or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return
    raise InputError(
        f"CUDA_VISIBLE_DEVICES={wanted} is ambiguous on a machine with different GPUs",
        _list_problems(readings),
        "set CUDA_DEVICE_ORDER=PCI_BUS_ID as well, so that CUDA numbers GPUs as nvidia-smi does, or use UUIDs",
    )


def _make_empty_selection_error(readings: Sequence[GpuReading], wanted: str) -> InputError:
    hint = "list GPUs by index or UUID, each once, or set CUDA_VISIBLE_DEVICES to an empty value to run without a GPU"
    if wanted.startswith("MIG-"):
        hint = f"MIG instances are not supported: select a full GPU, or {_PLAN_BY_NAME}"
    return InputError(f"CUDA_VISIBLE_DEVICES={wanted} selects no GPU of this machine", _list_problems(readings), hint)


def _list_problems(readings: Sequence[GpuReading]) -> tuple[Problem, ...]:
    return tuple(
        Problem(where=f"GPU {reading.index}", what=f"{reading.name}, {reading.memory_mib} MiB, {reading.uuid}")
        for reading in readings
    )


def _are_equal(readings: Sequence[GpuReading]) -> bool:
    return len({(reading.name, reading.memory_mib) for reading in readings}) <= 1


def make_common_gpu(readings: Sequence[GpuReading]) -> Gpu:
    """Return the GPU model that all ranks share, with the memory that the driver reports."""
    if not _are_equal(readings):
        hint = "choose equal ones: CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=<indices, as above>"
        raise InputError("the GPUs differ, and a plan is for equal ranks", _list_problems(readings), hint)
    first = readings[0]
    known = match_gpu(first.name, first.memory_mib) if first.memory_mib else None
    capability = first.compute_capability or (known.compute_capability if known else None)
    if any(reading.is_mig for reading in readings) or first.memory_mib is None or capability is None:
        raise _make_unusable_error(readings)
    if known:
        return known.model_copy(update={"memory_mib": first.memory_mib})
    return _make_unknown_gpu(first.name, first.memory_mib, capability)


def _make_unknown_gpu(name: str, memory_mib: int, compute_capability: tuple[int, int]) -> Gpu:
    """Describe a GPU that is not in the catalogue: unknown peak, and the slowest link is assumed."""
    return Gpu(
        key=re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"),
        title=name,
        memory_mib=memory_mib,
        bf16_tflops=None,
        fp16_tflops=None,
        memory_gb_per_second=0.0,
        compute_capability=compute_capability,
        interconnect="pcie-host",
        interconnect_gb_per_second=16.0,
        gpu_class="consumer" if "geforce" in name.lower() else "workstation",
    )


def _make_unusable_error(readings: Sequence[GpuReading]) -> InputError:
    first = next((reading for reading in readings if reading.is_mig), readings[0])
    if first.is_mig:
        what = "is split into MIG instances, which are not supported"
    elif first.memory_mib is None:
        what = "does not report its memory"
    else:
        what = "does not report its compute capability and is not in the catalogue"
    problem = Problem(where=f"GPU {first.index}, {first.name}", what=what)
    return InputError("cannot plan for this machine's GPU", (problem,), _PLAN_BY_NAME)


def probe_cpu_cores(root: Path = Path("/")) -> int:
    """Return the cores available to this process: its CPU affinity, or its cgroup quota if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in _list_cgroup_folders(root) if (quota := _read_quota(folder)) is not None]
    return max(1, int(min([cores, *quotas])))


def probe_ram_bytes(root: Path = Path("/")) -> int:
    """Return the available memory of the system, or the cgroup limit if that is less."""
    limits = [
        limit
        for folder in _list_cgroup_folders(root)
        for name in ("memory.max", "memory.limit_in_bytes")
        if (limit := _parse_integer(_read_text(folder / name))) is not None
    ]
    return min([_read_available_bytes(root), *limits])


def _read_available_bytes(root: Path) -> int:
    if match := re.search(r"^MemAvailable:\s+(\d+) kB", _read_text(root / "proc/meminfo"), re.MULTILINE):
        return int(match[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        raise InputError("cannot read how much memory this system has", hint=_PLAN_BY_NAME) from None


def _list_cgroup_folders(root: Path) -> Iterator[Path]:
    """Yield the cgroups of this process and their parents: one tree in version 2, one per controller in version 1."""
    mount = root / "sys/fs/cgroup"
    for line in ["0::/", "0:cpu:/", "0:memory:/", *_read_text(root / "proc/self/cgroup").splitlines()]:
        controllers, _, path = line.partition(":")[2].partition(":")
        tree = mount / controllers if controllers else mount
        group = tree / path.strip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(tree))


def _read_quota(folder: Path) -> float | None:
    """Return the CPU quota in cores: `200000 100000` in cpu.max, or the two files of version 1. None: no limit."""
    cells = _read_text(folder / "cpu.max").split() or [
        _read_text(folder / "cpu.cfs_quota_us"),
        _read_text(folder / "cpu.cfs_period_us"),
    ]
    quota, period = map(_parse_integer, cells) if len(cells) == 2 else (None, None)
    return quota / period if quota is not None and period else None


def _read_text(path: Path) -> str:
    """Return the text of a file, or an empty string if it cannot be read (for example outside Linux)."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
