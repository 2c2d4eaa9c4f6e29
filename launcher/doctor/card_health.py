"""GPUs judged: is there one, is its memory free, do several reach each other, is something slowing them down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from launcher.doctor.cards import CardFacts, CardState, Holder
from launcher.doctor.findings import Finding, Status
from launcher.units import format_gib, mib_to_bytes

# Below this share of a card a desktop or the driver itself explains what is in use.
_DESKTOP_SHARE = 0.1
_BUSY_PERCENT = 20
_HOT = 87  # degrees: consumer and datacenter cards begin to slow down between 83 and 90
_SPILL_OFF = (
    "NVIDIA Control Panel (Windows) > Manage 3D settings > CUDA - Sysmem Fallback Policy > Prefer No Sysmem Fallback"
)
_PEER_TROUBLES = {
    "CNS": "the chipset does not support it",
    "GNS": "the GPU does not support it",
    "TNS": "the topology does not support it",
    "NS": "not supported",
    "DR": "disabled by a registry key of the driver",
}


def judge_cards(facts: CardFacts, *, is_wsl: bool) -> Iterator[Finding]:
    if not facts.readings:
        yield _judge_absence(facts)
        return
    yield _judge_driver(facts)
    yield _judge_model(facts)
    sizes = {reading.index: reading.memory_mib for reading in facts.readings}
    for state in facts.states:
        yield _judge_memory(state, sizes.get(state.index))
        yield from _judge_health(state)
    yield from _judge_links(facts)
    if is_wsl:
        yield _judge_spill()


def _tell(subject: str, status: Status, found: str, matters: str = "", next_step: str = "") -> Finding:
    return Finding(family="GPU", subject=subject, status=status, found=found, matters=matters, next_step=next_step)


def _judge_absence(facts: CardFacts) -> Finding:
    if facts.num_on_machine:
        return _tell(
            "GPU",
            "note",
            f"{facts.num_on_machine} GPUs, all hidden by CUDA_VISIBLE_DEVICES",
            "a run here trains the smoke profile on the CPU",
            "unset CUDA_VISIBLE_DEVICES",
        )
    if facts.has_device:
        return _tell(
            "driver",
            "problem",
            f"there is an NVIDIA device, but nvidia-smi does not list it: {facts.trouble}",
            "no GPU can be planned for; after an update of the driver this is a mismatch until the next boot",
            "reboot, or sudo rmmod nvidia_uvm nvidia && sudo modprobe nvidia; in a container: docker run --gpus all",
        )
    return _tell(
        "GPU",
        "note",
        f"none ({facts.trouble})" if facts.trouble else "none",
        "a run here trains the smoke profile on the CPU; plans for other machines can be made all the same",
        "launcher plan EXPERT --gpu rtx4090",
    )


def _judge_driver(facts: CardFacts) -> Finding:
    cuda = f", CUDA up to {facts.cuda}" if facts.cuda else ""
    if facts.driver is None:
        return _tell("driver", "note", f"its version is not told{cuda}", "it cannot be compared with torch's CUDA")
    return _tell("driver", "ok", f"{facts.driver}{cuda}")


def _judge_model(facts: CardFacts) -> Finding:
    if facts.unusable:
        return _tell(
            "GPU", "problem", facts.unusable, "no plan can be made for the GPUs of this machine", facts.way_out
        )
    first = facts.readings[0]
    count = f"{len(facts.readings)} x " if len(facts.readings) > 1 else ""
    memory = "" if first.memory_mib is None else f", {format_gib(mib_to_bytes(first.memory_mib))}"
    hidden = facts.num_on_machine - len(facts.readings)
    some = f"; {hidden} more are hidden by CUDA_VISIBLE_DEVICES" if hidden > 0 else ""
    found = f"{count}{first.name}{memory}{some}"
    if facts.gpu is not None and facts.gpu.fp16_tflops is None:
        return _tell("GPU", "note", f"{found}: not in the catalogue", "no MFU and no estimate of the time")
    return _tell("GPU", "ok", found)


def _judge_memory(state: CardState, memory_mib: int | None) -> Finding:
    subject = f"memory of GPU {state.index}"
    if state.used_mib is None or not memory_mib:
        return _tell(subject, "note", "could not look: the driver does not tell what is in use")
    others = [holder for holder in state.holders if not holder.is_ours]
    ours = [holder for holder in state.holders if holder.is_ours]
    found = f"{format_gib(mib_to_bytes(state.used_mib))} of {format_gib(mib_to_bytes(memory_mib))} in use"
    if state.holders:
        found += f" by {'; '.join(map(_name_holder, (*others, *ours)))}"
    if state.used_mib <= _DESKTOP_SHARE * memory_mib:
        return _tell(subject, "note" if others else "ok", found, "a plan counts only on what is free" if others else "")
    if ours and not others:
        return _tell(subject, "ok", f"{found}: a training of this launcher")
    if not state.holders:
        found += ", and no process that can be seen from here holds it"
    busy = f", and keeps the GPU {state.utilization} % busy" if (state.utilization or 0) > _BUSY_PERCENT else ""
    seen = ",".join(str(holder.pid) for holder in others if holder.pid is not None)
    look = (
        f"ps -fp {seen} shows whose they are; doctor ends none" if seen else "look on the host, outside the container"
    )
    return _tell(subject, "problem", f"{found}{busy}", "plans shrink to what is free, and steps share the GPU", look)


def _name_holder(holder: Holder) -> str:
    memory = "memory not told" if holder.memory_mib is None else format_gib(mib_to_bytes(holder.memory_mib))
    number = "" if holder.pid is None else f"process {holder.pid}, "
    return f"{holder.name} ({number}{memory})"


def _judge_health(state: CardState) -> Iterator[Finding]:
    subject = f"GPU {state.index}"
    if state.slowed_by:
        yield _tell(
            subject,
            "problem",
            f"slowed down by the hardware right now, because of {' and '.join(state.slowed_by)}",
            "it computes at a fraction of its speed until that ends",
            "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; then airflow, fans, the power supply",
        )
    elif state.temperature is not None and state.temperature >= _HOT:
        yield _tell(subject, "note", f"{state.temperature} °C", "hot GPUs slow themselves down", "look at its cooling")
    if state.memory_errors:
        yield _tell(
            subject,
            "problem",
            f"{state.memory_errors} errors of its memory that could not be corrected",
            "results may be wrong, and the next one may end the run",
            f"nvidia-smi -i {state.index} --gpu-reset, or a reboot; if they come again the card is broken",
        )
    if state.lanes and state.most_lanes and state.lanes < state.most_lanes:
        yield _tell(
            subject,
            "note",
            f"{state.lanes} of {state.most_lanes} PCIe lanes",
            "loading, offloading and links without NVLink have only that share of the bandwidth",
            "another slot, or the card seated anew; on many boards a second card halves the lanes",
        )


def _judge_links(facts: CardFacts) -> Iterator[Finding]:
    if len(facts.readings) < 2:
        yield _tell("links", "ok", "one GPU needs none")
        return
    links, peers = facts.topology.links, facts.topology.peers
    if not links and not peers:
        yield _tell("links", "note", "could not look: nvidia-smi tells no topology")
        return
    shown = ", ".join(f"{count} x {name}" for name, count in Counter(links).most_common()) or "not told"
    broken = Counter(name for name in peers if name != "OK")
    expects_peers = facts.gpu is not None and facts.gpu.has_p2p
    if broken:
        why = ", ".join(f"{count} pairs {_PEER_TROUBLES.get(name, name)}" for name, count in broken.items())
        found = f"{shown}; no direct access (P2P): {why}"
        if not expects_peers:
            yield _tell("links", "ok", f"{found}; as the catalogue has it, and plans count on it")
            return
        yield _tell(
            "links",
            "problem",
            found,
            "traffic goes through host memory, many times slower than the plan counts on; NCCL may even hang",
            "BIOS: IOMMU/ACS off, or a container with --ipc=host; until then export NCCL_P2P_DISABLE=1",
        )
        return
    if (
        facts.gpu is not None
        and facts.gpu.interconnect == "nvlink"
        and not all(name.startswith("NV") for name in links)
    ):
        yield _tell(
            "links",
            "problem",
            f"{shown}: not all pairs have NVLink",
            "the plan counts on NVLink; the slowest pair sets the pace",
            "nvidia-smi nvlink --status; is the fabric manager running? (systemctl status nvidia-fabricmanager)",
        )
        return
    yield _tell("links", "ok", f"{shown}, direct access (P2P) between all pairs" if peers else shown)


def _judge_spill() -> Finding:
    return _tell(
        "spill",
        "note",
        "WSL2: Windows' driver may move GPU memory into the host's instead of saying that it is full",
        "a step that spills is many times slower, and no rung of the ladder is taken; the micro-test tries it out",
        _SPILL_OFF,
    )
