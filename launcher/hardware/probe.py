"""Probe of this machine: GPUs by NVML, CPU cores and memory available to this process, optional packages.

torch is not imported: it is slow to load, and a process that has initialized CUDA holds memory on every GPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from launcher.core.errors import InputError, Problem
from launcher.core.units import MIB, bytes_to_gib
from launcher.core.worker import call_with_timeout
from launcher.hardware.gpu_catalogue import match_gpu
from launcher.hardware.model import Gpu, Hardware

PACKAGES = ("flash_attn", "flash_attn.cute", "flash_attn_interface", "triton", "bitsandbytes", "deepspeed")

_TIMEOUT_SECONDS = 30  # without its persistence daemon the driver takes seconds to wake up eight GPUs
_PLAN_BY_NAME = "plan for a GPU of the catalogue instead, such as --gpu rtx4090"

Value = TypeVar("Value")


class NvmlError(Exception):
    """NVML is not installed, reports an error, or does not respond."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReading:
    """One GPU as NVML lists it, in the order of nvidia-smi. None: the driver does not report the value."""

    index: int
    uuid: str
    name: str
    memory_mib: int | None
    free_mib: int | None
    compute_capability: tuple[int, int] | None
    is_mig: bool


def probe_hardware() -> Hardware:
    """Probe this machine as one node; without an NVIDIA driver that responds it has no GPU."""
    devices: tuple[GpuReading, ...] = ()
    with suppress(NvmlError):
        devices = call_nvml(read_gpus)
    readings = select_visible(devices, os.environ)
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
    """Return whether a package is installed, without importing it."""
    # flash-attn-4 is a subpackage of flash_attn, even without the older package; find_spec would import the parent.
    parent, _, child = name.partition(".")
    spec = importlib.util.find_spec(parent)
    if spec is None or not child:
        return spec is not None and spec.origin is not None
    return any((Path(folder) / child / "__init__.py").is_file() for folder in spec.submodule_search_locations or ())


def call_nvml(read: Callable[[Any], Value], seconds: float = _TIMEOUT_SECONDS) -> Value:
    """Return read(pynvml), called with NVML initialized; raise NvmlError without a driver that responds."""
    import pynvml

    def call() -> Value:
        pynvml.nvmlInit()
        try:
            return read(pynvml)
        finally:
            pynvml.nvmlShutdown()

    try:
        return call_with_timeout(call, seconds)
    except (pynvml.NVMLError, TimeoutError) as error:
        raise NvmlError(str(error)) from None


def query_nvml(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of an NVML call, or None if this GPU or driver does not report it."""
    from pynvml import NVMLError

    try:
        return call(*arguments)
    except NVMLError:
        return None


def probe_driver() -> str | None:
    """Return the version of the NVIDIA driver, or None."""
    with suppress(NvmlError):
        return call_nvml(lambda nvml: str(nvml.nvmlSystemGetDriverVersion()))
    return None


def read_gpus(nvml: Any) -> tuple[GpuReading, ...]:
    """Read all GPUs of this machine."""
    return tuple(_read_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))


def _read_gpu(nvml: Any, index: int) -> GpuReading:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = read_memory(nvml, handle)
    mig = query_nvml(nvml.nvmlDeviceGetMigMode, handle)  # current and pending mode
    capability = query_nvml(nvml.nvmlDeviceGetCudaComputeCapability, handle)
    return GpuReading(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        memory_mib=None if memory is None else memory.total // MIB,
        free_mib=None if memory is None else memory.free // MIB,
        compute_capability=None if capability is None else (capability[0], capability[1]),
        is_mig=mig is not None and bool(mig[0]),
    )


def read_memory(nvml: Any, handle: Any) -> Any:
    """Return total, free and used bytes, or None. Version 2 does not count what the driver reserves as used."""
    newer = query_nvml(nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    return query_nvml(nvml.nvmlDeviceGetMemoryInfo, handle) if newer is None else newer


def _parse_integer(text: str) -> int | None:
    """Parse a non-negative integer in ASCII digits: isdigit() accepts "²", int() does not."""
    return int(text) if re.fullmatch("[0-9]{1,20}", text) else None


def select_visible(readings: Sequence[GpuReading], environ: Mapping[str, str]) -> tuple[GpuReading, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects, as CUDA does: up to the first invalid entry."""
    selection = environ.get("CUDA_VISIBLE_DEVICES")
    if selection is None or not readings:
        return tuple(readings)
    entries = [entry.strip() for entry in selection.split(",")]
    if entries[0] in ("", "-1", "NoDevFiles"):
        return ()
    if any(_parse_integer(entry) is not None for entry in entries):
        _check_device_order(readings, selection, environ)
    visible = tuple(_select_named(readings, entries))
    if len(set(visible)) < max(1, len(visible)):  # CUDA shows no GPU if one is listed twice
        raise _make_empty_selection_error(readings, selection)
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


def _check_device_order(readings: Sequence[GpuReading], selection: str, environ: Mapping[str, str]) -> None:
    """Refuse ambiguous indices: CUDA orders different GPUs by speed, nvidia-smi by PCI bus."""
    if _are_equal(readings) or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return
    raise InputError(
        f"CUDA_VISIBLE_DEVICES={selection} is ambiguous: CUDA and nvidia-smi may number different GPUs differently",
        _list_problems(readings),
        "set CUDA_DEVICE_ORDER=PCI_BUS_ID as well, so that CUDA numbers GPUs as nvidia-smi does, or use UUIDs",
    )


def _make_empty_selection_error(readings: Sequence[GpuReading], selection: str) -> InputError:
    hint = "list GPUs by index or UUID, each once, or set CUDA_VISIBLE_DEVICES to an empty value to run without a GPU"
    if selection.startswith("MIG-"):
        hint = f"MIG instances are not supported: select a full GPU, or {_PLAN_BY_NAME}"
    return InputError(
        f"CUDA_VISIBLE_DEVICES={selection} selects no GPU of this machine", _list_problems(readings), hint
    )


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
        hint = "choose identical ones: CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=<indices, as above>"
        raise InputError("the GPUs differ, but a plan requires identical GPUs", _list_problems(readings), hint)
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
    import psutil

    limits = [
        limit
        for folder in _list_cgroup_folders(root)
        for name in ("memory.max", "memory.limit_in_bytes")
        if (limit := _parse_integer(_read_text(folder / name))) is not None
    ]
    return min([int(psutil.virtual_memory().available), *limits])


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
