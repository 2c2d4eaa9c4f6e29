"""Check the GPUs: presence, driver, free memory, links between them, throttling and hardware errors."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from launcher.analysis.doctor.findings import Finding, Reporter
from launcher.core.errors import LauncherError
from launcher.core.processes import LAUNCHER_PID
from launcher.core.redaction import REDACTED, is_secret_name, redact_text
from launcher.core.units import MIB, format_gib, mib_to_bytes
from launcher.hardware.model import Gpu
from launcher.hardware.probe import (
    GpuReading,
    NvmlError,
    call_nvml,
    make_common_gpu,
    query_nvml,
    read_gpus,
    read_memory,
    select_visible,
)

_SECONDS = 15.0  # without its persistence daemon the driver needs seconds to initialize eight GPUs
_MAX_NAME = 60
# Up to this share of the memory is explained by a desktop or the driver.
_DESKTOP_SHARE = 0.1
_BUSY_PERCENT = 20
_HOT = 87  # °C: consumer and datacenter GPUs begin to throttle between 83 and 90
_SPILL_OFF = (
    "NVIDIA Control Panel (Windows) > Manage 3D settings > CUDA - Sysmem Fallback Policy > Prefer No Sysmem Fallback"
)
_P2P_READ, _P2P_NVLINK = 0, 2  # the first constant of pynvml is a tuple by mistake
# By NVML's codes: status of P2P reads, and the closest common ancestor of two GPUs.
_P2P_ERRORS = {
    1: "the chipset does not support it",
    2: "the GPU does not support it",
    3: "the topology does not support it",
    4: "disabled by a registry key of the driver",
    5: "not supported",
}
_ANCESTORS = {0: "one board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_report = Reporter("GPU")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProcess:
    """A process that uses memory of a GPU."""

    pid: int
    name: str
    memory_mib: int | None
    is_ours: bool = False  # a run that this launcher started
    is_graphics: bool = False  # draws, whether or not it computes


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
class GpuFacts:
    """What NVML and the kernel report about the driver and the GPUs of this machine."""

    error: str = ""  # why NVML fails; empty if it works
    has_device: bool = False  # the kernel has an NVIDIA driver or device
    driver: str | None = None
    cuda: str | None = None  # newest version that the driver supports
    num_on_machine: int = 0
    readings: tuple[GpuReading, ...] = ()  # visible to this process
    gpu: Gpu | None = None
    unusable: str = ""  # why they cannot be planned for
    hint: str = ""
    states: tuple[GpuState, ...] = ()
    links: tuple[str, ...] = ()  # of each pair: NVLink, PIX, PHB, SYS
    peer_errors: tuple[str, ...] = ()  # why peer-to-peer access of a pair does not work; empty: it does


def probe_gpus(root: Path = Path("/")) -> GpuFacts:
    """Query the driver and all visible GPUs by NVML."""
    has_device = any((root / name).exists() for name in ("dev/nvidiactl", "dev/dxg", "proc/driver/nvidia/version"))
    try:
        return call_nvml(lambda nvml: _read_facts(nvml, has_device), _SECONDS)
    except NvmlError as error:
        return GpuFacts(error=str(error), has_device=has_device)


def _read_facts(nvml: Any, has_device: bool) -> GpuFacts:
    devices = read_gpus(nvml)
    readings: tuple[GpuReading, ...] = ()
    gpu, unusable, hint = None, "", ""
    try:
        readings = select_visible(devices, os.environ)
        gpu = make_common_gpu(readings) if readings else None
    except LauncherError as error:
        unusable, hint = "; ".join((error.title, *map(str, error.problems))), error.hint
        readings = readings or devices
    handles = [(reading.index, nvml.nvmlDeviceGetHandleByIndex(reading.index)) for reading in readings]
    pairs = [*combinations([handle for _, handle in sorted(handles)], 2)]
    cuda = query_nvml(nvml.nvmlSystemGetCudaDriverVersion_v2)
    return GpuFacts(
        error="" if devices else "the driver lists no GPU",
        has_device=has_device,
        driver=query_nvml(nvml.nvmlSystemGetDriverVersion),
        cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        num_on_machine=len(devices),
        readings=readings,
        gpu=gpu,
        unusable=unusable,
        hint=hint,
        states=tuple(_read_state(nvml, index, handle) for index, handle in handles),
        links=tuple(link for pair in pairs if (link := _read_link(nvml, *pair)) is not None),
        peer_errors=tuple(why for pair in pairs if (why := _read_peer_error(nvml, *pair)) is not None),
    )


def _read_state(nvml: Any, index: int, handle: Any) -> GpuState:
    memory = read_memory(nvml, handle)
    usage = query_nvml(nvml.nvmlDeviceGetUtilizationRates, handle)
    reasons = query_nvml(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
    slowdowns = (
        ("heat", nvml.nvmlClocksEventReasonHwThermalSlowdown),
        ("power", nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown),
    )
    errors = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    return GpuState(
        index=index,
        used_mib=None if memory is None else memory.used // MIB,
        utilization=None if usage is None else usage.gpu,
        temperature=query_nvml(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        lanes=query_nvml(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        most_lanes=query_nvml(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        memory_errors=query_nvml(nvml.nvmlDeviceGetTotalEccErrors, handle, *errors),
        slowed_by=tuple(name for name, bit in slowdowns if reasons & bit),
        holders=tuple(_list_processes(nvml, handle)),
    )


def _list_processes(nvml: Any, handle: Any) -> Iterator[GpuProcess]:
    """Yield the processes of a GPU, compute and graphics, with their command line where it is visible."""
    import psutil

    queries = (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses)
    computing, drawing = ({one.pid: one.usedGpuMemory for one in query_nvml(query, handle) or ()} for query in queries)
    for pid, num_bytes in {**computing, **drawing}.items():
        words, is_ours = [], False
        with suppress(psutil.Error):
            words = psutil.Process(pid).cmdline()
            is_ours = LAUNCHER_PID in psutil.Process(pid).environ()
        name = redact_text(" ".join(_redact_arguments(words)))
        name = name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 3] + "..."
        yield GpuProcess(
            pid=pid,
            name=name or query_nvml(nvml.nvmlSystemGetProcessName, pid) or "a process outside this container",
            memory_mib=None if num_bytes is None else num_bytes // MIB,
            is_ours=is_ours,
            is_graphics=pid in drawing,
        )


def _redact_arguments(words: Sequence[str]) -> Iterator[str]:
    """Redact the values of options whose names suggest a secret."""
    is_value = False
    for word in filter(None, words):
        name, equals, _ = word.partition("=")
        is_secret = name.startswith("-") and is_secret_name(name.lstrip("-").replace("-", "_"))
        yield REDACTED if is_value else f"{name}={REDACTED}" if is_secret and equals else word
        is_value = is_secret and not equals


def _read_link(nvml: Any, one: Any, other: Any) -> str | None:
    if query_nvml(nvml.nvmlDeviceGetP2PStatus, one, other, _P2P_NVLINK) == nvml.NVML_P2P_STATUS_OK:
        return "NVLink"
    ancestor = query_nvml(nvml.nvmlDeviceGetTopologyCommonAncestor, one, other)
    return None if ancestor is None else _ANCESTORS.get(ancestor, f"level {ancestor}")


def _read_peer_error(nvml: Any, one: Any, other: Any) -> str | None:
    status = query_nvml(nvml.nvmlDeviceGetP2PStatus, one, other, _P2P_READ)
    if status is None:
        return None
    return "" if status == nvml.NVML_P2P_STATUS_OK else _P2P_ERRORS.get(status, "unknown")


def check_gpus(facts: GpuFacts, *, is_wsl: bool) -> Iterator[Finding]:
    """Check all GPUs that this process may use."""
    if not facts.readings:
        yield _check_missing_gpu(facts)
        return
    yield _check_driver(facts)
    yield _check_model(facts)
    sizes = {reading.index: reading.memory_mib for reading in facts.readings}
    for state in facts.states:
        yield _check_memory(state, sizes.get(state.index))
        yield from _check_health(state)
    yield from _check_links(facts)
    if is_wsl:
        yield _note_spill()


def _check_missing_gpu(facts: GpuFacts) -> Finding:
    if facts.num_on_machine:
        return _report.note(
            "GPU",
            f"{facts.num_on_machine} GPUs, all hidden by CUDA_VISIBLE_DEVICES",
            "a run here trains the smoke profile on the CPU",
            "unset CUDA_VISIBLE_DEVICES",
        )
    if facts.has_device:
        return _report.problem(
            "driver",
            f"there is an NVIDIA device, but the driver does not respond: {facts.error}",
            "no GPU can be used; after a driver update, the versions mismatch until the next reboot",
            "reboot, or sudo rmmod nvidia_uvm nvidia && sudo modprobe nvidia; in a container: docker run --gpus all",
        )
    return _report.note(
        "GPU",
        f"none ({facts.error})" if facts.error else "none",
        "a run here trains the smoke profile on the CPU; plans for other machines still work",
        "launcher plan EXPERT --gpu rtx4090",
    )


def _check_driver(facts: GpuFacts) -> Finding:
    cuda = f", CUDA up to {facts.cuda}" if facts.cuda else ""
    if facts.driver is None:
        return _report.note("driver", f"version unknown{cuda}", "it cannot be compared with torch's CUDA version")
    return _report.ok("driver", f"{facts.driver}{cuda}")


def _check_model(facts: GpuFacts) -> Finding:
    if facts.unusable:
        return _report.problem("GPU", facts.unusable, "no plan can be made for the GPUs of this machine", facts.hint)
    first = facts.readings[0]
    count = f"{len(facts.readings)} x " if len(facts.readings) > 1 else ""
    memory = "" if first.memory_mib is None else f", {format_gib(mib_to_bytes(first.memory_mib))}"
    hidden = facts.num_on_machine - len(facts.readings)
    some = f"; {hidden} more are hidden by CUDA_VISIBLE_DEVICES" if hidden > 0 else ""
    found = f"{count}{first.name}{memory}{some}"
    if facts.gpu is not None and facts.gpu.fp16_tflops is None:
        return _report.note("GPU", f"{found}: not in the catalogue", "no MFU and no time estimate")
    return _report.ok("GPU", found)


def _check_memory(state: GpuState, memory_mib: int | None) -> Finding:
    subject = f"memory of GPU {state.index}"
    if state.used_mib is None or not memory_mib:
        return _report.note(subject, "not checked: the driver does not report memory use")
    others = [holder for holder in state.holders if not holder.is_ours]
    ours = [holder for holder in state.holders if holder.is_ours]
    found = f"{format_gib(mib_to_bytes(state.used_mib))} of {format_gib(mib_to_bytes(memory_mib))} in use"
    if state.holders:
        found += f" by {'; '.join(map(format_process, (*others, *ours)))}"
    if state.used_mib <= _DESKTOP_SHARE * memory_mib:
        return _report(subject, "note" if others else "ok", found, "a plan uses free memory only" if others else "")
    if ours and not others:
        return _report.ok(subject, f"{found}: a training run of this launcher")
    if not state.holders:
        found += " by no visible process"
    busy = f", GPU utilization {state.utilization} %" if (state.utilization or 0) > _BUSY_PERCENT else ""
    seen = ",".join(str(holder.pid) for holder in others)
    look = (
        f"ps -fp {seen} shows their owners; launcher doctor --free asks them to end"
        if seen
        else "look on the host, outside the container"
    )
    return _report.problem(subject, f"{found}{busy}", "plans use the free memory only, and steps share the GPU", look)


def format_process(holder: GpuProcess) -> str:
    """Return a GPU process as text: its command, PID and GPU memory."""
    memory = "memory unknown" if holder.memory_mib is None else format_gib(mib_to_bytes(holder.memory_mib))
    return f"{holder.name} (process {holder.pid}, {memory})"


def _check_health(state: GpuState) -> Iterator[Finding]:
    subject = f"GPU {state.index}"
    if state.slowed_by:
        yield _report.problem(
            subject,
            f"throttled by the hardware, because of {' and '.join(state.slowed_by)}",
            "it runs at a fraction of its speed until that ends",
            "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER shows the cause; check airflow, fans and power supply",
        )
    elif state.temperature is not None and state.temperature >= _HOT:
        yield _report.note(subject, f"{state.temperature} °C", "hot GPUs throttle", "improve its cooling")
    if state.memory_errors:
        yield _report.problem(
            subject,
            f"{state.memory_errors} uncorrectable memory (ECC) errors",
            "results may be wrong, and the next error may end the run",
            f"nvidia-smi -i {state.index} --gpu-reset, or a reboot; if they recur, the GPU is defective",
        )
    if state.lanes and state.most_lanes and state.lanes < state.most_lanes:
        yield _report.note(
            subject,
            f"{state.lanes} of {state.most_lanes} PCIe lanes",
            "loading, offloading and links without NVLink have only that share of the bandwidth",
            "use another slot or reseat the GPU; on many boards a second GPU halves the lanes",
        )


def _check_links(facts: GpuFacts) -> Iterator[Finding]:
    if len(facts.readings) < 2:
        yield _report.ok("links", "not needed for one GPU")
        return
    links = facts.links
    if not links and not facts.peer_errors:
        yield _report.note("links", "not checked: the driver reports no topology")
        return
    shown = ", ".join(f"{count} x {name}" for name, count in Counter(links).most_common()) or "unknown"
    broken = Counter(filter(None, facts.peer_errors))
    expects_peers = facts.gpu is not None and facts.gpu.has_p2p
    if broken:
        why = ", ".join(f"{count} pairs, {reason}" for reason, count in broken.items())
        found = f"{shown}; no direct access (P2P): {why}"
        if not expects_peers:
            yield _report.ok("links", f"{found}; plans already account for this")
            return
        yield _report.problem(
            "links",
            found,
            "traffic goes through host memory, many times slower than planned; NCCL may even hang",
            "BIOS: IOMMU/ACS off, or a container with --ipc=host; until then export NCCL_P2P_DISABLE=1",
        )
        return
    if facts.gpu is not None and facts.gpu.interconnect == "nvlink" and set(links) - {"NVLink"}:
        yield _report.problem(
            "links",
            f"{shown}: not all pairs have NVLink",
            "the plan assumes NVLink; the slowest pair limits the speed",
            "nvidia-smi nvlink --status; is the fabric manager running? (systemctl status nvidia-fabricmanager)",
        )
        return
    yield _report.ok("links", f"{shown}, direct access (P2P) between all pairs" if facts.peer_errors else shown)


def _note_spill() -> Finding:
    return _report.note(
        "spill",
        "WSL2: the Windows driver may spill GPU memory to host memory instead of reporting out of memory",
        "a step that spills is many times slower, and no OOM fallback is used; the micro-test checks it",
        _SPILL_OFF,
    )
