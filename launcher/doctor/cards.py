"""What the NVIDIA driver tells of its GPUs, by nvidia-smi: who holds their memory, how they are linked, how they feel.

Questions that an old driver does not know are asked by themselves: it answers a list with one unknown field by nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.doctor.asking import Answer, ask_program
from launcher.errors import LauncherError
from launcher.hardware import Gpu
from launcher.probe import GpuReading, make_common_gpu, parse_nvidia_smi, select_visible
from launcher.processes import LAUNCHER_PID
from launcher.redaction import BLOT, is_secret_name, redact_text

_SECONDS = 15.0  # without its persistence daemon the driver takes seconds to wake up eight GPUs
_FORMAT = "--format=csv,noheader,nounits"
_MAIN = ("index", "uuid", "name", "memory.total", "memory.free", "compute_cap", "mig.mode.current")
_MORE = (
    "index",
    "pci.bus_id",
    "memory.used",
    "utilization.gpu",
    "temperature.gpu",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "ecc.errors.uncorrected.volatile.total",
)
_SLOWED = ("index", "clocks_throttle_reasons.hw_thermal_slowdown", "clocks_throttle_reasons.hw_power_brake_slowdown")
_SLOWED_NEWER = tuple(name.replace("throttle", "event") for name in _SLOWED)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_CUDA = re.compile(r"CUDA(?: UMD)? Version\s*:\s*([0-9]+\.[0-9]+)")
_LONGEST_NAME = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process that holds memory of a GPU."""

    pid: int | None  # None: the driver does not tell, as in a container
    name: str
    memory_mib: int | None
    is_ours: bool = False  # a training that this launcher has started


@dataclass(frozen=True, kw_only=True, slots=True)
class CardState:
    """One GPU right now. None is what the driver does not tell."""

    index: int
    used_mib: int | None = None
    utilization: int | None = None  # percent
    temperature: int | None = None
    lanes: int | None = None
    most_lanes: int | None = None
    memory_errors: int | None = None  # that could not be corrected, since the driver was loaded
    slowed_by: tuple[str, ...] = ()  # heat, power
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Between each two GPUs: how they are linked (NV18, PIX, PHB, SYS), and whether they reach each other's memory."""

    links: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()  # OK, or why not: CNS, GNS, TNS, NS, DR


@dataclass(frozen=True, kw_only=True, slots=True)
class CardFacts:
    trouble: str = ""  # why nvidia-smi does not answer; empty where it does
    has_device: bool = False  # the kernel has a driver, or a device of one
    driver: str | None = None
    cuda: str | None = None  # the newest that the driver runs
    num_on_machine: int = 0
    readings: tuple[GpuReading, ...] = ()  # that may be used here
    gpu: Gpu | None = None
    unusable: str = ""  # why there is no plan for them
    way_out: str = ""
    states: tuple[CardState, ...] = ()
    topology: Topology = Topology()


def probe_cards(root: Path = Path("/")) -> CardFacts:
    has_device = any((root / name).exists() for name in ("dev/nvidiactl", "dev/dxg", "proc/driver/nvidia/version"))
    main = _query(_MAIN)
    if main.trouble:
        return CardFacts(trouble=main.trouble, has_device=has_device)
    found = parse_nvidia_smi(main.text)
    if not found:
        return CardFacts(trouble=main.text.strip()[:120] or "nvidia-smi lists no GPU", has_device=has_device)
    with ThreadPoolExecutor(max_workers=6) as pool:
        head = pool.submit(ask_program, ("nvidia-smi",), _SECONDS)
        driver = pool.submit(_query, ("driver_version",))
        states = pool.submit(_probe_states)
        links = pool.submit(_ask_topology, len(found), "-m")
        peers = pool.submit(_ask_topology, len(found), "-p2p", "r")
    unusable = way_out = ""
    readings: tuple[GpuReading, ...] = ()
    gpu = None
    try:
        readings = select_visible(found, os.environ)
        gpu = make_common_gpu(readings) if readings else None
    except LauncherError as error:
        unusable = "; ".join((error.title, *map(str, error.problems)))
        way_out = error.hint
        readings = readings or found
    cuda = _CUDA.search(head.result().text)
    visible = {reading.index for reading in readings}
    return CardFacts(
        has_device=has_device,
        driver=next(iter(driver.result().text.split()), None),
        cuda=cuda[1] if cuda else None,
        num_on_machine=len(found),
        readings=readings,
        gpu=gpu,
        unusable=unusable,
        way_out=way_out,
        states=tuple(state for state in states.result() if state.index in visible),
        topology=Topology(
            links=parse_matrix(links.result().text, visible), peers=parse_matrix(peers.result().text, visible)
        ),
    )


def _query(fields: Sequence[str]) -> Answer:
    return ask_program(("nvidia-smi", f"--query-gpu={','.join(fields)}", _FORMAT), _SECONDS)


def _probe_states() -> tuple[CardState, ...]:
    slowed = _query(_SLOWED)
    slowed = _query(_SLOWED_NEWER) if slowed.trouble else slowed
    processes = ask_program(("nvidia-smi", "-q", "-d", "PIDS"), _SECONDS)
    return parse_states(_query(_MORE).text, slowed.text, processes.text)


def parse_states(more: str, slowed: str, processes: str) -> tuple[CardState, ...]:
    reasons = {row[0]: row[1:] for row in _rows(slowed, len(_SLOWED))}
    holders = parse_processes(processes)
    return tuple(_make_state(row, reasons.get(row[0], []), holders) for row in _rows(more, len(_MORE)))


def _make_state(row: Sequence[str], reasons: Sequence[str], holders: dict[str, tuple[Holder, ...]]) -> CardState:
    index, bus, used, utilization, temperature, lanes, most_lanes, errors = row
    active = zip(("heat", "power"), reasons, strict=False)
    return CardState(
        index=int(index),
        used_mib=_whole(used),
        utilization=_whole(utilization),
        temperature=_whole(temperature),
        lanes=_whole(lanes),
        most_lanes=_whole(most_lanes),
        memory_errors=_whole(errors),
        slowed_by=tuple(name for name, told in active if told == "Active"),
        holders=holders.get(_short_bus(bus), ()),
    )


def _rows(text: str, width: int) -> Iterator[list[str]]:
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == width and _whole(cells[0]) is not None:
            yield cells


def _whole(text: str) -> int | None:
    """nvidia-smi writes [N/A], [Not Supported], [Insufficient Permissions], [Unknown Error] where it has no number."""
    return int(text) if re.fullmatch("[0-9]{1,12}", text) else None


def _short_bus(name: str) -> str:
    """00000000:01:00.0 and 0000:01:00.0 are the same slot."""
    domain, _, slot = name.strip().lower().partition(":")
    return f"{domain.lstrip('0')}:{slot}"


def parse_processes(text: str) -> dict[str, tuple[Holder, ...]]:
    """Of `nvidia-smi -q -d PIDS`, by slot: those that compute and those that draw."""
    found: dict[str, list[Holder]] = {}
    slot, pid, name = "", "", ""
    for line in text.splitlines():
        if header := re.fullmatch(r"GPU ([0-9A-Fa-f]+:[0-9A-Fa-f]+:[0-9A-Fa-f.]+)", line.strip()):
            slot = _short_bus(header[1])
            continue
        key, _, value = (part.strip() for part in line.partition(" : "))
        if key == "Process ID":
            pid = value
        elif key == "Name":
            name = value
        elif key == "Used GPU Memory":
            found.setdefault(slot, []).append(_make_holder(pid, name, value))
    return {slot: tuple(holders) for slot, holders in found.items()}


def _make_holder(pid: str, name: str, memory: str) -> Holder:
    number = _whole(pid)
    is_known = name and not name.startswith("[")
    command = _read_command(number) if number is not None else ""
    return Holder(
        pid=number,
        name=command or (name if is_known else "a process that cannot be seen from here"),
        memory_mib=_whole(memory.removesuffix(" MiB")),
        is_ours=number is not None and _is_ours(number),
    )


def _read_command(pid: int) -> str:
    """As it was started, where it is one of this container: a bare "python" tells little."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    text = redact_text(" ".join(_without_secrets(words)))
    return text if len(text) <= _LONGEST_NAME else text[: _LONGEST_NAME - 3] + "..."


def _without_secrets(words: Sequence[str]) -> Iterator[str]:
    """What stands behind an option with a telling name is nobody's business."""
    is_value = False
    for word in filter(None, words):
        name, equals, _ = word.partition("=")
        is_telling = name.startswith("-") and is_secret_name(name.lstrip("-").replace("-", "_"))
        yield BLOT if is_value else f"{name}={BLOT}" if is_telling and equals else word
        is_value = is_telling and not equals


def _is_ours(pid: int) -> bool:
    mark = f"{LAUNCHER_PID}=".encode()
    with suppress(OSError):
        return any(entry.startswith(mark) for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    return False


def _ask_topology(num_gpus: int, *which: str) -> Answer:
    return ask_program(("nvidia-smi", "topo", *which), _SECONDS) if num_gpus > 1 else Answer()


def parse_matrix(text: str, visible: Collection[int]) -> tuple[str, ...]:
    """The cells above the diagonal between GPUs, of either matrix. Columns of NICs and affinities stand behind them."""
    rows = [_ESCAPES.sub("", line).split() for line in text.splitlines()]
    rows = [row for row in rows if len(row) > 1 and re.fullmatch("GPU[0-9]+", row[0]) and not row[1].startswith("GPU")]
    return tuple(
        row[1 + column]
        for number, row in enumerate(rows)
        for column in range(number + 1, len(rows))
        if number in visible and column in visible and 1 + column < len(row)
    )
