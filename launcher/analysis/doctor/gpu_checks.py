"""Check the GPUs: presence, driver, free memory, links between them, throttling and hardware errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

from launcher.analysis.doctor.findings import Finding, make_finding
from launcher.analysis.doctor.nvidia_smi import GpuFacts, GpuProcess, GpuState
from launcher.core.units import format_gib, mib_to_bytes

# Up to this share of the memory is explained by a desktop or the driver.
_DESKTOP_SHARE = 0.1
_BUSY_PERCENT = 20
_HOT = 87  # °C: consumer and datacenter GPUs begin to throttle between 83 and 90
_SPILL_OFF = (
    "NVIDIA Control Panel (Windows) > Manage 3D settings > CUDA - Sysmem Fallback Policy > Prefer No Sysmem Fallback"
)
_P2P_ERRORS = {
    "CNS": "the chipset does not support it",
    "GNS": "the GPU does not support it",
    "TNS": "the topology does not support it",
    "NS": "not supported",
    "DR": "disabled by a registry key of the driver",
}
_finding = partial(make_finding, "GPU")


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
        return _finding(
            "GPU",
            "note",
            f"{facts.num_on_machine} GPUs, all hidden by CUDA_VISIBLE_DEVICES",
            "a run here trains the smoke profile on the CPU",
            "unset CUDA_VISIBLE_DEVICES",
        )
    if facts.has_device:
        return _finding(
            "driver",
            "problem",
            f"there is an NVIDIA device, but nvidia-smi does not list it: {facts.error}",
            "no GPU can be used; after a driver update, the versions mismatch until the next reboot",
            "reboot, or sudo rmmod nvidia_uvm nvidia && sudo modprobe nvidia; in a container: docker run --gpus all",
        )
    return _finding(
        "GPU",
        "note",
        f"none ({facts.error})" if facts.error else "none",
        "a run here trains the smoke profile on the CPU; plans for other machines still work",
        "launcher plan EXPERT --gpu rtx4090",
    )


def _check_driver(facts: GpuFacts) -> Finding:
    cuda = f", CUDA up to {facts.cuda}" if facts.cuda else ""
    if facts.driver is None:
        return _finding("driver", "note", f"version unknown{cuda}", "it cannot be compared with torch's CUDA version")
    return _finding("driver", "ok", f"{facts.driver}{cuda}")


def _check_model(facts: GpuFacts) -> Finding:
    if facts.unusable:
        return _finding("GPU", "problem", facts.unusable, "the GPUs of this machine cannot be planned for", facts.hint)
    first = facts.readings[0]
    count = f"{len(facts.readings)} x " if len(facts.readings) > 1 else ""
    memory = "" if first.memory_mib is None else f", {format_gib(mib_to_bytes(first.memory_mib))}"
    hidden = facts.num_on_machine - len(facts.readings)
    some = f"; {hidden} more are hidden by CUDA_VISIBLE_DEVICES" if hidden > 0 else ""
    found = f"{count}{first.name}{memory}{some}"
    if facts.gpu is not None and facts.gpu.fp16_tflops is None:
        return _finding("GPU", "note", f"{found}: not in the catalogue", "no MFU and no time estimate")
    return _finding("GPU", "ok", found)


def _check_memory(state: GpuState, memory_mib: int | None) -> Finding:
    subject = f"memory of GPU {state.index}"
    if state.used_mib is None or not memory_mib:
        return _finding(subject, "note", "not checked: the driver does not report memory use")
    others = [holder for holder in state.holders if not holder.is_ours]
    ours = [holder for holder in state.holders if holder.is_ours]
    found = f"{format_gib(mib_to_bytes(state.used_mib))} of {format_gib(mib_to_bytes(memory_mib))} in use"
    if state.holders:
        found += f" by {'; '.join(map(_format_process, (*others, *ours)))}"
    if state.used_mib <= _DESKTOP_SHARE * memory_mib:
        return _finding(subject, "note" if others else "ok", found, "a plan uses free memory only" if others else "")
    if ours and not others:
        return _finding(subject, "ok", f"{found}: a training run of this launcher")
    if not state.holders:
        found += " by no visible process"
    busy = f", GPU utilization {state.utilization} %" if (state.utilization or 0) > _BUSY_PERCENT else ""
    seen = ",".join(str(holder.pid) for holder in others if holder.pid is not None)
    look = (
        f"ps -fp {seen} shows their owners; the doctor stops no process"
        if seen
        else "look on the host, outside the container"
    )
    return _finding(
        subject, "problem", f"{found}{busy}", "plans use the free memory only, and steps share the GPU", look
    )


def _format_process(holder: GpuProcess) -> str:
    memory = "memory unknown" if holder.memory_mib is None else format_gib(mib_to_bytes(holder.memory_mib))
    number = "" if holder.pid is None else f"process {holder.pid}, "
    return f"{holder.name} ({number}{memory})"


def _check_health(state: GpuState) -> Iterator[Finding]:
    subject = f"GPU {state.index}"
    if state.slowed_by:
        yield _finding(
            subject,
            "problem",
            f"throttled by the hardware, because of {' and '.join(state.slowed_by)}",
            "it runs at a fraction of its speed until that ends",
            "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; then airflow, fans, the power supply",
        )
    elif state.temperature is not None and state.temperature >= _HOT:
        yield _finding(subject, "note", f"{state.temperature} °C", "hot GPUs throttle", "improve its cooling")
    if state.memory_errors:
        yield _finding(
            subject,
            "problem",
            f"{state.memory_errors} uncorrectable memory (ECC) errors",
            "results may be wrong, and the next error may end the run",
            f"nvidia-smi -i {state.index} --gpu-reset, or a reboot; if they recur, the GPU is defective",
        )
    if state.lanes and state.most_lanes and state.lanes < state.most_lanes:
        yield _finding(
            subject,
            "note",
            f"{state.lanes} of {state.most_lanes} PCIe lanes",
            "loading, offloading and links without NVLink have only that share of the bandwidth",
            "use another slot or reseat the GPU; on many boards a second GPU halves the lanes",
        )


def _check_links(facts: GpuFacts) -> Iterator[Finding]:
    if len(facts.readings) < 2:
        yield _finding("links", "ok", "not needed for one GPU")
        return
    links, peers = facts.topology.links, facts.topology.peers
    if not links and not peers:
        yield _finding("links", "note", "not checked: nvidia-smi reports no topology")
        return
    shown = ", ".join(f"{count} x {name}" for name, count in Counter(links).most_common()) or "unknown"
    broken = Counter(name for name in peers if name != "OK")
    expects_peers = facts.gpu is not None and facts.gpu.has_p2p
    if broken:
        why = ", ".join(f"{count} pairs {_P2P_ERRORS.get(name, name)}" for name, count in broken.items())
        found = f"{shown}; no direct access (P2P): {why}"
        if not expects_peers:
            yield _finding("links", "ok", f"{found}; as in the catalogue, which plans use")
            return
        yield _finding(
            "links",
            "problem",
            found,
            "traffic goes through host memory, many times slower than planned; NCCL may even hang",
            "BIOS: IOMMU/ACS off, or a container with --ipc=host; until then export NCCL_P2P_DISABLE=1",
        )
        return
    if (
        facts.gpu is not None
        and facts.gpu.interconnect == "nvlink"
        and not all(name.startswith("NV") for name in links)
    ):
        yield _finding(
            "links",
            "problem",
            f"{shown}: not all pairs have NVLink",
            "the plan assumes NVLink; the slowest pair limits the speed",
            "nvidia-smi nvlink --status; is the fabric manager running? (systemctl status nvidia-fabricmanager)",
        )
        return
    yield _finding("links", "ok", f"{shown}, direct access (P2P) between all pairs" if peers else shown)


def _note_spill() -> Finding:
    return _finding(
        "spill",
        "note",
        "WSL2: the Windows driver may spill GPU memory to host memory instead of reporting out of memory",
        "a step that spills is many times slower, and no OOM fallback is used; the micro-test checks it",
        _SPILL_OFF,
    )
