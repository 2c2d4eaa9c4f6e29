"""Query the GPUs with nvidia-smi: memory and the processes that use it, links, temperature, throttling, errors.

Fields that old drivers do not know are queried separately, because one unknown field makes the query fail.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.analysis.doctor.timed_probe import ProbeOutput, run_probe
from launcher.core.errors import LauncherError
from launcher.core.processes import LAUNCHER_PID
from launcher.core.redaction import REDACTED, is_secret_name, redact_text
from launcher.hardware.model import Gpu
from launcher.hardware.probe import GpuReading, make_common_gpu, parse_nvidia_smi, select_visible

_SECONDS = 15.0  # without its persistence daemon the driver needs seconds to initialise eight GPUs
_FORMAT = "--format=csv,noheader,nounits"
_DEVICE_FIELDS = ("index", "uuid", "name", "memory.total", "memory.free", "compute_cap", "mig.mode.current")
_STATE_FIELDS = (
    "index",
    "pci.bus_id",
    "memory.used",
    "utilization.gpu",
    "temperature.gpu",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "ecc.errors.uncorrected.volatile.total",
)
_THROTTLE = ("index", "clocks_throttle_reasons.hw_thermal_slowdown", "clocks_throttle_reasons.hw_power_brake_slowdown")
_THROTTLE_NEWER = tuple(name.replace("throttle", "event") for name in _THROTTLE)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_CUDA = re.compile(r"CUDA(?: UMD)? Version\s*:\s*([0-9]+\.[0-9]+)")
_MAX_NAME = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProcess:
    """A process that uses memory of a GPU."""

    pid: int | None  # None: not reported, as in a container
    name: str
    memory_mib: int | None
    is_ours: bool = False  # a run that this launcher started


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuState:
    """Current state of one GPU. None: not reported by the driver."""

    index: int
    used_mib: int | None = None
    utilization: int | None = None  # percent
    temperature: int | None = None
    lanes: int | None = None
    most_lanes: int | None = None
    memory_errors: int | None = None  # uncorrectable, since the driver was loaded
    slowed_by: tuple[str, ...] = ()  # heat, power
    holders: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Link of each pair of GPUs (NV18, PIX, PHB, SYS), and whether peer-to-peer access works."""

    links: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()  # OK, or why not: CNS, GNS, TNS, NS, DR


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    """All that is known about the GPUs of this machine."""

    error: str = ""  # why nvidia-smi fails; empty if it works
    has_device: bool = False  # the kernel has an NVIDIA driver or device
    driver: str | None = None
    cuda: str | None = None  # newest version that the driver supports
    num_on_machine: int = 0
    readings: tuple[GpuReading, ...] = ()  # visible to this process
    gpu: Gpu | None = None
    unusable: str = ""  # why they cannot be planned for
    hint: str = ""
    states: tuple[GpuState, ...] = ()
    topology: Topology = Topology()


def probe_gpus(root: Path = Path("/")) -> GpuFacts:
    """Query the driver and all visible GPUs."""
    has_device = any((root / name).exists() for name in ("dev/nvidiactl", "dev/dxg", "proc/driver/nvidia/version"))
    main = _query(_DEVICE_FIELDS)
    if main.error:
        return GpuFacts(error=main.error, has_device=has_device)
    devices = parse_nvidia_smi(main.text)
    if not devices:
        return GpuFacts(error=main.text.strip()[:120] or "nvidia-smi lists no GPU", has_device=has_device)
    with ThreadPoolExecutor(max_workers=6) as pool:
        head = pool.submit(run_probe, ("nvidia-smi",), _SECONDS)
        driver = pool.submit(_query, ("driver_version",))
        states = pool.submit(_probe_states)
        links = pool.submit(_query_topology, len(devices), "-m")
        peers = pool.submit(_query_topology, len(devices), "-p2p", "r")
    unusable = hint = ""
    readings: tuple[GpuReading, ...] = ()
    gpu = None
    try:
        readings = select_visible(devices, os.environ)
        gpu = make_common_gpu(readings) if readings else None
    except LauncherError as error:
        unusable = "; ".join((error.title, *map(str, error.problems)))
        hint = error.hint
        readings = readings or devices
    cuda = _CUDA.search(head.result().text)
    visible = {reading.index for reading in readings}
    return GpuFacts(
        has_device=has_device,
        driver=next(iter(driver.result().text.split()), None),
        cuda=cuda[1] if cuda else None,
        num_on_machine=len(devices),
        readings=readings,
        gpu=gpu,
        unusable=unusable,
        hint=hint,
        states=tuple(state for state in states.result() if state.index in visible),
        topology=Topology(
            links=parse_matrix(links.result().text, visible), peers=parse_matrix(peers.result().text, visible)
        ),
    )


def _query(fields: Sequence[str]) -> ProbeOutput:
    return run_probe(("nvidia-smi", f"--query-gpu={','.join(fields)}", _FORMAT), _SECONDS)


def _probe_states() -> tuple[GpuState, ...]:
    slowed = _query(_THROTTLE)
    slowed = _query(_THROTTLE_NEWER) if slowed.error else slowed
    processes = run_probe(("nvidia-smi", "-q", "-d", "PIDS"), _SECONDS)
    return parse_states(_query(_STATE_FIELDS).text, slowed.text, processes.text)


def parse_states(more: str, slowed: str, processes: str) -> tuple[GpuState, ...]:
    """Parse the states of all GPUs from three outputs of nvidia-smi."""
    reasons = {row[0]: row[1:] for row in _parse_rows(slowed, len(_THROTTLE))}
    holders = parse_processes(processes)
    return tuple(_make_state(row, reasons.get(row[0], []), holders) for row in _parse_rows(more, len(_STATE_FIELDS)))


def _make_state(row: Sequence[str], reasons: Sequence[str], holders: dict[str, tuple[GpuProcess, ...]]) -> GpuState:
    index, bus, used, utilization, temperature, lanes, most_lanes, errors = row
    active = zip(("heat", "power"), reasons, strict=False)
    return GpuState(
        index=int(index),
        used_mib=_parse_int(used),
        utilization=_parse_int(utilization),
        temperature=_parse_int(temperature),
        lanes=_parse_int(lanes),
        most_lanes=_parse_int(most_lanes),
        memory_errors=_parse_int(errors),
        slowed_by=tuple(name for name, value in active if value == "Active"),
        holders=holders.get(_normalize_bus_id(bus), ()),
    )


def _parse_rows(text: str, width: int) -> Iterator[list[str]]:
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == width and _parse_int(cells[0]) is not None:
            yield cells


def _parse_int(text: str) -> int | None:
    """Parse a number; nvidia-smi writes [N/A], [Not Supported] and the like if it has none."""
    return int(text) if re.fullmatch("[0-9]{1,12}", text) else None


def _normalize_bus_id(name: str) -> str:
    """Normalise 00000000:01:00.0 and 0000:01:00.0, which are the same slot."""
    domain, _, slot = name.strip().lower().partition(":")
    return f"{domain.lstrip('0')}:{slot}"


def parse_processes(text: str) -> dict[str, tuple[GpuProcess, ...]]:
    """Parse the processes in `nvidia-smi -q -d PIDS`, compute and graphics, by slot."""
    processes: dict[str, list[GpuProcess]] = {}
    slot, pid, name = "", "", ""
    for line in text.splitlines():
        if header := re.fullmatch(r"GPU ([0-9A-Fa-f]+:[0-9A-Fa-f]+:[0-9A-Fa-f.]+)", line.strip()):
            slot = _normalize_bus_id(header[1])
            continue
        key, _, value = (part.strip() for part in line.partition(" : "))
        if key == "Process ID":
            pid = value
        elif key == "Name":
            name = value
        elif key == "Used GPU Memory":
            processes.setdefault(slot, []).append(_make_process(pid, name, value))
    return {slot: tuple(holders) for slot, holders in processes.items()}


def _make_process(pid: str, name: str, memory: str) -> GpuProcess:
    number = _parse_int(pid)
    is_known = name and not name.startswith("[")
    command = _read_command(number) if number is not None else ""
    return GpuProcess(
        pid=number,
        name=command or (name if is_known else "a process outside this container"),
        memory_mib=_parse_int(memory.removesuffix(" MiB")),
        is_ours=number is not None and _is_training(number),
    )


def _read_command(pid: int) -> str:
    """Return the command line of a visible process, which says more than "python"."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    text = redact_text(" ".join(_redact_arguments(words)))
    return text if len(text) <= _MAX_NAME else text[: _MAX_NAME - 3] + "..."


def _redact_arguments(words: Sequence[str]) -> Iterator[str]:
    """Redact the values of options whose names suggest a secret."""
    is_value = False
    for word in filter(None, words):
        name, equals, _ = word.partition("=")
        is_secret = name.startswith("-") and is_secret_name(name.lstrip("-").replace("-", "_"))
        yield REDACTED if is_value else f"{name}={REDACTED}" if is_secret and equals else word
        is_value = is_secret and not equals


def _is_training(pid: int) -> bool:
    mark = f"{LAUNCHER_PID}=".encode()
    with suppress(OSError):
        return any(entry.startswith(mark) for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    return False


def _query_topology(num_gpus: int, *which: str) -> ProbeOutput:
    return run_probe(("nvidia-smi", "topo", *which), _SECONDS) if num_gpus > 1 else ProbeOutput()


def parse_matrix(text: str, visible: Collection[int]) -> tuple[str, ...]:
    """Return the cells above the diagonal between GPUs; columns of NICs and affinities follow them."""
    rows = [_ESCAPES.sub("", line).split() for line in text.splitlines()]
    rows = [row for row in rows if len(row) > 1 and re.fullmatch("GPU[0-9]+", row[0]) and not row[1].startswith("GPU")]
    return tuple(
        row[1 + column]
        for number, row in enumerate(rows)
        for column in range(number + 1, len(rows))
        if number in visible and column in visible and 1 + column < len(row)
    )
