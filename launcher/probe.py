"""What this machine is: its GPUs by nvidia-smi, the CPU and memory that this process may use, optional packages.

torch is not imported: it is slow to start, and a process that has initialised CUDA holds memory on every GPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import InputError, Problem
from launcher.gpus import match_gpu
from launcher.hardware import Gpu, Hardware
from launcher.units import bytes_to_gib

PACKAGES = ("flash_attn", "flash_attn.cute", "flash_attn_interface", "triton", "bitsandbytes", "deepspeed")

_QUERY = ("index", "uuid", "name", "memory.total", "memory.free", "compute_cap", "mig.mode.current")
_NVIDIA_SMI = ("nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits")
_ASK_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
_TIMEOUT_SECONDS = 30  # without its persistence daemon the driver takes seconds to wake up eight GPUs
_PLAN_BY_NAME = "plan for a GPU of the catalogue instead, such as --gpu rtx4090"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReading:
    """One line of nvidia-smi. None is what the driver does not tell ("[N/A]")."""

    index: int
    uuid: str
    name: str
    memory_mib: int | None
    free_mib: int | None
    compute_capability: tuple[int, int] | None
    is_mig: bool


def probe_hardware() -> Hardware:
    """This machine, as one node. Without a usable nvidia-smi it is a machine without a GPU."""
    readings = select_visible(parse_nvidia_smi(_ask_nvidia_smi()), os.environ)
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
    """The optional packages that could be imported, found without importing them."""
    return tuple(name for name in PACKAGES if _is_there(name))


def _is_there(name: str) -> bool:
    """flash-attn-4 lies in the folder of the older package, with or without it; asking for a part imports the whole."""
    whole, _, part = name.partition(".")
    found = importlib.util.find_spec(whole)
    if found is None or not part:
        return found is not None and found.origin is not None
    return any((Path(folder) / part / "__init__.py").is_file() for folder in found.submodule_search_locations or ())


def _ask_nvidia_smi(command: Sequence[str] = _NVIDIA_SMI) -> str:
    try:
        answer = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.decode("utf-8", "replace")


def probe_driver() -> str | None:
    """The version of NVIDIA's driver; None where there is none."""
    said = _ask_nvidia_smi(_ASK_DRIVER).split()
    return said[0] if said else None


def parse_nvidia_smi(text: str) -> tuple[GpuReading, ...]:
    """The GPUs in nvidia-smi's answer. Lines of another form (warnings, "No devices were found") are not GPUs."""
    rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines())
    return tuple(_make_reading(row) for row in rows if len(row) == len(_QUERY) and _read_whole(row[0]) is not None)


def _make_reading(row: Sequence[str]) -> GpuReading:
    index, uuid, name, total, free, capability, mig = row
    version = re.fullmatch(r"([0-9]{1,3})\.([0-9]{1,3})", capability)
    return GpuReading(
        index=_read_whole(index) or 0,
        uuid=uuid,
        name=name,
        memory_mib=_read_whole(total),
        free_mib=_read_whole(free),
        compute_capability=(int(version[1]), int(version[2])) if version else None,
        is_mig=mig.lower() == "enabled",
    )


def _read_whole(text: str) -> int | None:
    """A whole number in ASCII digits, of a size that machines have: isdigit() takes "²" for one, int() does not."""
    return int(text) if re.fullmatch("[0-9]{1,20}", text) else None


def select_visible(readings: Sequence[GpuReading], environ: Mapping[str, str]) -> tuple[GpuReading, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, read as CUDA reads it: up to the first entry that names none."""
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None or not readings:
        return tuple(readings)
    entries = [entry.strip() for entry in wanted.split(",")]
    if entries[0] in ("", "-1", "NoDevFiles"):
        return ()
    if any(_read_whole(entry) is not None for entry in entries):
        _check_order(readings, wanted, environ)
    visible = tuple(_take_named(readings, entries))
    if len(set(visible)) < max(1, len(visible)):  # nor does CUDA show any where one is named twice
        raise _nothing_selected(readings, wanted)
    return visible


def _take_named(readings: Sequence[GpuReading], entries: Sequence[str]) -> Iterator[GpuReading]:
    for entry in entries:
        named = [reading for reading in readings if _names(entry, reading)]
        if len(named) != 1:  # none, or a beginning that several UUIDs share
            return
        yield named[0]


def _names(entry: str, reading: GpuReading) -> bool:
    """An index, or the beginning of a UUID."""
    if (index := _read_whole(entry)) is not None:
        return index == reading.index
    return entry.startswith("GPU-") and reading.uuid.startswith(entry)


def _check_order(readings: Sequence[GpuReading], wanted: str, environ: Mapping[str, str]) -> None:
    """CUDA counts GPUs fastest first, nvidia-smi by slot: among unlike GPUs an index means two different ones."""
    if _are_alike(readings) or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return
    raise InputError(
        f"CUDA_VISIBLE_DEVICES={wanted} is ambiguous on a machine with different GPUs",
        _list_problems(readings),
        "set CUDA_DEVICE_ORDER=PCI_BUS_ID as well, so that CUDA counts as nvidia-smi does, or name GPUs by UUID",
    )


def _nothing_selected(readings: Sequence[GpuReading], wanted: str) -> InputError:
    hint = "name GPUs by index or UUID, each once, or leave CUDA_VISIBLE_DEVICES empty for a run without a GPU"
    if wanted.startswith("MIG-"):
        hint = f"MIG slices are not supported: name a whole GPU, or {_PLAN_BY_NAME}"
    return InputError(f"CUDA_VISIBLE_DEVICES={wanted} selects no GPU of this machine", _list_problems(readings), hint)


def _list_problems(readings: Sequence[GpuReading]) -> tuple[Problem, ...]:
    return tuple(
        Problem(where=f"GPU {reading.index}", what=f"{reading.name}, {reading.memory_mib} MiB, {reading.uuid}")
        for reading in readings
    )


def _are_alike(readings: Sequence[GpuReading]) -> bool:
    return len({(reading.name, reading.memory_mib) for reading in readings}) <= 1


def make_common_gpu(readings: Sequence[GpuReading]) -> Gpu:
    """The one GPU model that all ranks have; its memory is the driver's own figure."""
    if not _are_alike(readings):
        hint = "choose equal ones: CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=<indices, as above>"
        raise InputError("the GPUs differ, and a plan is for equal ranks", _list_problems(readings), hint)
    first = readings[0]
    known = match_gpu(first.name, first.memory_mib) if first.memory_mib else None
    capability = first.compute_capability or (known.compute_capability if known else None)
    if any(reading.is_mig for reading in readings) or first.memory_mib is None or capability is None:
        raise _unusable(readings)
    if known:
        return known.model_copy(update={"memory_mib": first.memory_mib})
    return _make_unknown_gpu(first.name, first.memory_mib, capability)


def _make_unknown_gpu(name: str, memory_mib: int, compute_capability: tuple[int, int]) -> Gpu:
    """A GPU that the catalogue does not know: no peak is made up for it, and the slowest link is assumed."""
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


def _unusable(readings: Sequence[GpuReading]) -> InputError:
    first = next((reading for reading in readings if reading.is_mig), readings[0])
    if first.is_mig:
        what = "is cut into MIG slices, which are not supported"
    elif first.memory_mib is None:
        what = "does not tell its memory"
    else:
        what = "does not tell its compute capability, and the catalogue does not know it"
    problem = Problem(where=f"GPU {first.index}, {first.name}", what=what)
    return InputError("this machine's GPU cannot be planned for", (problem,), _PLAN_BY_NAME)


def probe_cpu_cores(root: Path = Path("/")) -> int:
    """The cores that this process may use: its affinity, or its control group's quota where that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in _cgroup_folders(root) if (quota := _read_quota(folder)) is not None]
    return max(1, int(min([cores, *quotas])))


def probe_ram_bytes(root: Path = Path("/")) -> int:
    """The memory that can still be had: what the system has available, or the control group's limit if less."""
    limits = [
        limit
        for folder in _cgroup_folders(root)
        for name in ("memory.max", "memory.limit_in_bytes")
        if (limit := _read_whole(_read_text(folder / name))) is not None
    ]
    return min([_available_bytes(root), *limits])


def _available_bytes(root: Path) -> int:
    if found := re.search(r"^MemAvailable:\s+(\d+) kB", _read_text(root / "proc/meminfo"), re.MULTILINE):
        return int(found[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        raise InputError("this system does not tell how much memory it has", hint=_PLAN_BY_NAME) from None


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """This process's control groups with all their parents: version 2 in one tree, version 1 a tree per controller."""
    mount = root / "sys/fs/cgroup"
    for line in ["0::/", "0:cpu:/", "0:memory:/", *_read_text(root / "proc/self/cgroup").splitlines()]:
        controllers, _, path = line.partition(":")[2].partition(":")
        tree = mount / controllers if controllers else mount
        group = tree / path.strip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(tree))


def _read_quota(folder: Path) -> float | None:
    """Cores of CPU time: `200000 100000` in cpu.max, or the two files of version 1. None: no limit here."""
    cells = _read_text(folder / "cpu.max").split() or [
        _read_text(folder / "cpu.cfs_quota_us"),
        _read_text(folder / "cpu.cfs_period_us"),
    ]
    quota, period = map(_read_whole, cells) if len(cells) == 2 else (None, None)
    return quota / period if quota is not None and period else None


def _read_text(path: Path) -> str:
    """What the file says; nothing where there is none, as on another operating system."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
