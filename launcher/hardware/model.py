"""Description of the hardware: GPU model, number of GPUs and nodes, CPU cores and memory."""

from __future__ import annotations

from typing import Literal

from launcher.core.errors import InputError, Problem
from launcher.core.frozen_model import Frozen
from launcher.core.units import format_gib, mib_to_bytes

GpuClass = Literal["consumer", "workstation", "datacenter"]
Interconnect = Literal["nvlink", "pcie-p2p", "pcie-host"]


class Gpu(Frozen):
    """One GPU model. Peaks are dense with FP32 accumulation, from the data sheet; None if unsupported or unknown."""

    key: str
    title: str
    memory_mib: int  # the total that nvidia-smi reports
    bf16_tflops: float | None
    fp16_tflops: float | None  # None: a GPU that is not in the catalogue
    memory_gb_per_second: float  # 0 for an unknown GPU
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
        """Return whether our Triton kernels support this GPU (training/kernels/availability.py)."""
        return self.compute_capability >= (8, 0)

    @property
    def has_tf32(self) -> bool:
        return self.compute_capability >= (8, 0)

    @property
    def has_own_attention(self) -> bool:
        """Return whether our attention kernels support this GPU; they need TMA and were measured on Hopper only."""
        return self.compute_capability[0] == 9

    @property
    def has_flash_attention(self) -> bool:
        """Return whether FlashAttention 2 (the package's or torch's) supports this GPU: Ampere or newer."""
        return self.compute_capability >= (8, 0)

    @property
    def has_flash_attention_3(self) -> bool:
        return self.compute_capability[0] == 9

    @property
    def has_flash_attention_4(self) -> bool:
        """Return whether FlashAttention 4 supports this GPU: its backward pass needs Hopper or Blackwell."""
        return self.compute_capability[0] in (9, 10, 11, 12)

    @property
    def host_link_gb_per_second(self) -> float:
        """Return the nominal bandwidth to CPU memory per direction in GB/s; for GPUs with NVLink, that of PCIe x16."""
        if self.interconnect != "nvlink":
            return self.interconnect_gb_per_second
        return 64.0 if self.compute_capability >= (9, 0) else 32.0

    @property
    def has_p2p(self) -> bool:
        return self.interconnect != "pcie-host"


class UserValue(Frozen):
    """One value taken from the user's hardware.json."""

    name: str
    value: str


class Hardware(Frozen):
    """The hardware of a run. Without a GPU, `gpu` is None and `gpus_per_node` counts CPU processes."""

    schema_version: Literal[1] = 1
    gpu: Gpu | None
    gpus_per_node: int
    nodes: int
    free_vram_mib: int | None  # of the fullest GPU; None: all memory is free
    cpu_cores_per_node: int
    ram_gib_per_node: float
    source: Literal["catalogue", "probe"]
    is_host_assumed: bool = False  # the number of cores is an assumption
    is_ram_assumed: bool = False
    vram_limit_mib: int | None = None  # --vram-limit: the memory that a larger GPU is limited to
    network_gb_per_second: float | None = None  # per node and direction; None: assumed
    price_per_gpu_hour: float | None = None
    currency: str = ""  # of the price, ISO 4217; empty: not given
    user_values: tuple[UserValue, ...] = ()  # from hardware.json (launcher/hardware/user_overrides.py)
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
        """Return --vram-limit in bytes, minus what a desktop would use on such a GPU; None without a limit."""
        return None if self.vram_limit_mib is None else mib_to_bytes(self.vram_limit_mib - _DESKTOP_MIB)


# Memory that a desktop and a browser use on a GPU with a display.
_DESKTOP_MIB = 512


def format_hardware(hardware: Hardware) -> str:
    """Describe hardware in a few words, such as `2 x H100 80 GiB`."""
    if hardware.gpu is None:
        return f"{hardware.cpu_cores_per_node} CPU cores, {hardware.ram_gib_per_node:.0f} GiB (no GPU)"
    gpus = format_gpus(hardware, hardware.gpu)
    return gpus if hardware.nodes == 1 else f"{gpus}, {hardware.num_ranks} ranks"


def format_gpus(hardware: Hardware, gpu: Gpu) -> str:
    """Return nodes and GPUs as text, such as `2 nodes of 8 x H100 SXM (80.0 GiB)`."""
    limited = "" if hardware.vram_limit_mib is None else "limited to "
    each = f"{hardware.gpus_per_node} x {gpu.title} ({limited}{format_gib(gpu.memory_bytes)})"
    return each if hardware.nodes == 1 else f"{hardware.nodes} nodes of {each}"


# CPU cores and GiB of memory per GPU that are assumed of a machine from the catalogue; of a data centre, and others.
_DATACENTER_SHARE, _DESKTOP_SHARE = (16, 128), (8, 64)

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
    """Return hardware as described by the user. Missing cores and memory are assumed."""
    is_datacenter = gpu is not None and gpu.gpu_class == "datacenter"
    cpu_cores, ram_gib = _DATACENTER_SHARE if is_datacenter else _DESKTOP_SHARE
    num_shares = max(1, gpus_per_node)
    hardware = Hardware(
        gpu=gpu,
        gpus_per_node=gpus_per_node,
        nodes=nodes,
        free_vram_mib=free_vram_mib,
        cpu_cores_per_node=cpu_cores * num_shares if cpu_cores_per_node is None else cpu_cores_per_node,
        ram_gib_per_node=ram_gib * num_shares if ram_gib_per_node is None else ram_gib_per_node,
        source="catalogue",
        is_host_assumed=cpu_cores_per_node is None,
        is_ram_assumed=ram_gib_per_node is None,
    )
    _check_hardware(hardware)
    return hardware


_SMALLEST_LIMIT_MIB = 4096
# Drivers report up to 7 % less than the size in a GPU's name: 23.988 GiB of an RTX 4090, 22.5 GiB of an L4 with 24 GB.
_MAX_NOMINAL_EXCESS = 1.07


def limit_vram(hardware: Hardware, limit_mib: int | None) -> Hardware:
    """Return the hardware with its GPU limited to `limit_mib`, to rehearse a smaller GPU on a larger one.

    The size in the name of the GPU is no limit: all that the driver reports may be used.
    """
    gpu = hardware.gpu
    if limit_mib is not None and gpu is None:
        raise InputError("--vram-limit: this machine has no GPU", hint="--gpu NAME plans for a GPU of the catalogue")
    if limit_mib is None or gpu is None or gpu.memory_mib <= limit_mib <= gpu.memory_mib * _MAX_NOMINAL_EXCESS:
        return hardware
    if not _SMALLEST_LIMIT_MIB <= limit_mib <= gpu.memory_mib:
        raise InputError(
            f"--vram-limit {limit_mib / 1024:g}GiB: give a size between 4GiB and {gpu.memory_mib}MiB, the memory of a "
            f"{gpu.title}",
            hint="a number without a unit is in GiB; without --vram-limit, all free memory is used",
        )
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
        title = f"invalid hardware values for {gpu.title if gpu else 'a machine without a GPU, which runs one process'}"
        raise InputError(title, problems, "--gpus counts the GPUs of one node; --nodes counts the machines")


def _format_range(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"between {low:g} and {high:g}"
