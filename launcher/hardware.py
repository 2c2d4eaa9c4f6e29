"""What a machine is: a GPU, how many of them, and the CPU beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from launcher.errors import InputError, Problem
from launcher.units import format_gib, mib_to_bytes
from launcher.values import Frozen

GpuClass = Literal["consumer", "workstation", "datacenter"]
Interconnect = Literal["nvlink", "pcie-p2p", "pcie-host"]


class Gpu(Frozen):
    """One GPU model. Peaks are dense, with FP32 accumulation, as the maker states them; None where it has none."""

    key: str
    title: str
    memory_mib: int  # the total that nvidia-smi reports
    bf16_tflops: float | None
    fp16_tflops: float | None  # None: the probe found a GPU that the catalogue does not know
    memory_gb_per_second: float  # 0 where the GPU is not known
    compute_capability: tuple[int, int]
    interconnect: Interconnect
    interconnect_gb_per_second: float  # per GPU and direction
    gpu_class: GpuClass

    @property
    def memory_bytes(self) -> int:
        return mib_to_bytes(self.memory_mib)

    @property
    def has_bf16(self) -> bool:
        return self.compute_capability >= (8, 0)

    @property
    def has_kernels(self) -> bool:
        """Our Triton kernels were written for it (training/kernels.py)."""
        return self.compute_capability >= (8, 0)

    @property
    def has_tf32(self) -> bool:
        return self.compute_capability >= (8, 0)

    @property
    def has_own_attention(self) -> bool:
        """Our own attention kernels were written for Hopper's copy engine, and measured there alone."""
        return self.compute_capability[0] == 9

    @property
    def has_flash_attention(self) -> bool:
        """FlashAttention 2, the package's and torch's own, needs Ampere or newer."""
        return self.compute_capability >= (8, 0)

    @property
    def has_flash_attention_3(self) -> bool:
        return self.compute_capability[0] == 9

    @property
    def has_flash_attention_4(self) -> bool:
        """Hopper and Blackwell: its backward pass knows no older ones."""
        return self.compute_capability[0] in (9, 10, 11, 12)

    @property
    def has_p2p(self) -> bool:
        return self.interconnect != "pcie-host"


class GivenValue(Frozen):
    """Something about the hardware that the user's own file says."""

    name: str
    value: str


class Hardware(Frozen):
    """Where a run happens. `gpu` is None on a machine without one: then `gpus_per_node` counts CPU processes."""

    schema_version: Literal[1] = 1
    gpu: Gpu | None
    gpus_per_node: int
    nodes: int
    free_vram_mib: int | None  # the least that any GPU of the machine has free; None: all of it
    cpu_cores_per_node: int
    ram_gib_per_node: float
    source: Literal["catalogue", "probe"]
    is_host_assumed: bool = False  # cores and CPU memory were not given, and nobody looked
    vram_limit_mib: int | None = None  # of a larger GPU, whose memory is stated as so much
    network_gb_per_second: float | None = None  # of a node, in one direction; None: assumed
    price_per_gpu_hour: float | None = None
    given: tuple[GivenValue, ...] = ()  # by the user's own file, launcher/own_hardware.py
    packages: tuple[str, ...] = ()  # optional accelerator packages found: flash_attn, flash_attn_interface, ...

    @property
    def num_ranks(self) -> int:
        return max(1, self.gpus_per_node) * self.nodes

    @property
    def free_vram_bytes(self) -> int:
        if self.gpu is None:
            return 0
        return mib_to_bytes(self.gpu.memory_mib if self.free_vram_mib is None else self.free_vram_mib)

    @property
    def vram_limit_bytes(self) -> int | None:
        """What one process may take of a smaller card that is rehearsed; a desktop has the rest."""
        return None if self.vram_limit_mib is None else mib_to_bytes(self.vram_limit_mib - _DESKTOP_MIB)


# Of a card with a screen: a desktop and a browser hold so much of it.
_DESKTOP_MIB = 512


def format_hardware(hardware: Hardware) -> str:
    if hardware.gpu is None:
        return f"{hardware.cpu_cores_per_node} CPU cores, {hardware.ram_gib_per_node:.0f} GiB (no GPU)"
    limited = "" if hardware.vram_limit_mib is None else "limited to "
    each = f"{hardware.gpus_per_node} x {hardware.gpu.title} ({limited}{format_gib(hardware.gpu.memory_bytes)})"
    return each if hardware.nodes == 1 else f"{hardware.nodes} nodes of {each}, {hardware.num_ranks} ranks"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostShare:
    """The part of a machine's CPU that comes with one GPU."""

    cpu_cores: int
    ram_gib: float


# What a machine from the catalogue is assumed to have beside each GPU, where nobody says otherwise.
ASSUMED_HOST_SHARES: Mapping[GpuClass, HostShare] = MappingProxyType(
    {
        "consumer": HostShare(cpu_cores=8, ram_gib=64),
        "workstation": HostShare(cpu_cores=8, ram_gib=64),
        "datacenter": HostShare(cpu_cores=16, ram_gib=128),
    }
)

MAX_GPUS_PER_NODE = 16
MAX_NODES = 1024
_MAX_CPU_CORES = 4096
_MAX_RAM_GIB = 65536


def make_hardware(
    gpu: Gpu | None,
    *,
    gpus_per_node: int,
    nodes: int,
    cpu_cores_per_node: int | None = None,
    ram_gib_per_node: float | None = None,
    free_vram_mib: int | None = None,
) -> Hardware:
    """Hardware as described, not as found. Cores and memory not given are assumed (ASSUMED_HOST_SHARES)."""
    share = ASSUMED_HOST_SHARES["consumer" if gpu is None else gpu.gpu_class]
    num_shares = max(1, gpus_per_node)
    hardware = Hardware(
        gpu=gpu,
        gpus_per_node=gpus_per_node,
        nodes=nodes,
        free_vram_mib=free_vram_mib,
        cpu_cores_per_node=share.cpu_cores * num_shares if cpu_cores_per_node is None else cpu_cores_per_node,
        ram_gib_per_node=share.ram_gib * num_shares if ram_gib_per_node is None else ram_gib_per_node,
        source="catalogue",
        is_host_assumed=cpu_cores_per_node is None,
    )
    _check_hardware(hardware)
    return hardware


_SMALLEST_LIMIT_MIB = 4096


def limit_vram(hardware: Hardware, limit_mib: int | None) -> Hardware:
    """As if the GPU had no more memory: plans for a smaller card are rehearsed on a larger one."""
    if limit_mib is None:
        return hardware
    gpu = hardware.gpu
    if gpu is None:
        raise InputError("--vram-limit: this machine has no GPU", hint="--gpu NAME plans for a GPU of the catalogue")
    if not _SMALLEST_LIMIT_MIB <= limit_mib <= gpu.memory_mib:
        most = format_gib(gpu.memory_bytes)
        raise InputError(f"--vram-limit: a {gpu.title} has {most}; give a size between 4 GiB and that")
    free = hardware.free_vram_mib
    update = {
        "gpu": gpu.model_copy(update={"memory_mib": limit_mib}),
        "free_vram_mib": None if free is None else min(free, limit_mib),
        "vram_limit_mib": limit_mib,
    }
    return hardware.model_copy(update=update)


def _check_hardware(hardware: Hardware) -> None:
    gpu = hardware.gpu
    ranges: list[tuple[str, float | None, float, float]] = [
        ("GPUs per node", hardware.gpus_per_node, 1 if gpu else 0, MAX_GPUS_PER_NODE if gpu else 0),
        ("nodes", hardware.nodes, 1, MAX_NODES if gpu else 1),
        ("CPU cores per node", hardware.cpu_cores_per_node, 1, _MAX_CPU_CORES),
        ("RAM per node in GiB", hardware.ram_gib_per_node, 1, _MAX_RAM_GIB),
        ("free VRAM in MiB", hardware.free_vram_mib, 1 if gpu else 0, gpu.memory_mib if gpu else 0),
    ]
    problems = tuple(
        Problem(where=name, what=f"must be {_format_range(low, high)}, not {value:g}")
        for name, value, low, high in ranges
        if value is not None and not low <= value <= high
    )
    if problems:
        title = f"no such machine with {gpu.title}" if gpu else "no such machine; without a GPU it runs one process"
        raise InputError(title, problems, "--gpus counts the GPUs of one node; --nodes counts the machines")


def _format_range(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"between {low:g} and {high:g}"
