"""Catalogue of GPUs: data sheet values (gpus.csv), lookup by name, and limitations.

Peaks are dense, BF16 or FP16 inputs with FP32 accumulation: streaming multiprocessors x boost clock x FLOPs per clock.
GeForce GPUs, A10G, L20 and L40 accumulate in FP32 at half the rate of FP16 accumulation (512 instead of 1024 FLOPs).
Memory bandwidth is bus width x data rate per pin. A test recomputes both. The clock of a laptop GPU is the highest of
its range: it depends on the power that the laptop allows.
Memory is the total that nvidia-smi prints with recent drivers, with ECC on if that is the default.
Links are one GPU's share in one direction: PCIe 3.0, 4.0, 5.0 x16 carry 16, 32, 64 GB/s, x8 half of it; NVLink is half
its data sheet. NVLink bridges between two GPUs are not counted.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib.resources import files
from types import MappingProxyType

from launcher.core.errors import InputError, Problem
from launcher.core.installation import find_page
from launcher.core.units import bytes_to_gib, mib_to_bytes
from launcher.hardware.model import Gpu, GpuClass, Interconnect

SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "geforce30": "whitepaper *NVIDIA Ampere GA102 GPU Architecture*; GeForce RTX 30 series specifications",
        "geforce40": "whitepaper *NVIDIA Ada GPU Architecture*; GeForce RTX 40 series specifications",
        "geforce50": "whitepaper *NVIDIA RTX Blackwell GPU Architecture*; GeForce RTX 50 series specifications",
        "laptop30": "GeForce RTX 30 series laptop specifications",
        "laptop40": "GeForce RTX 40 series laptop specifications",
        "laptop50": "GeForce RTX 50 series laptop specifications",
        "sheet": "the product's data sheet",
    }
)
_EXAMPLES = ("rtx3060", "rtx4070laptop", "rtx4090", "rtx5090", "a6000", "l40s", "a100", "h100", "b200")
_MEMORY_TOLERANCE = 0.1  # ECC and the driver take up to 7 % of the memory
_KINDS: Mapping[str, tuple[GpuClass, Interconnect]] = {
    "consumer": ("consumer", "pcie-host"),  # the driver has no P2P between GeForce GPUs over PCIe
    "workstation": ("workstation", "pcie-p2p"),
    "pcie": ("datacenter", "pcie-p2p"),
    "nvlink": ("datacenter", "nvlink"),
}
# mib, tflops, gb_s; sms, mhz, rate (FLOPs per clock and SM), bus (bits), gbps (per pin); capability; kind (_KINDS);
# link in GB/s; source (SOURCES); further names, as nvidia-smi's.
_FILE = files("launcher.hardware") / "gpus.csv"
TABLE: tuple[Mapping[str, str], ...] = tuple(csv.DictReader(_FILE.read_text(encoding="utf-8").splitlines()))


def _make_gpu(row: Mapping[str, str]) -> Gpu:
    major, _, minor = row["capability"].partition(".")
    capability, tflops = (int(major), int(minor)), float(row["tflops"])
    gpu_class, interconnect = _KINDS[row["kind"]]
    return Gpu(
        key=row["key"],
        title=row["title"],
        memory_mib=int(row["mib"]),
        bf16_tflops=tflops if capability >= (8, 0) else None,
        fp16_tflops=tflops,
        memory_gb_per_second=float(row["gb_s"]),
        compute_capability=capability,
        gpu_class=gpu_class,
        interconnect=interconnect,
        interconnect_gb_per_second=float(row["link"]),
    )


GPUS: Mapping[str, Gpu] = MappingProxyType({row["key"]: _make_gpu(row) for row in TABLE})


def _normalize(name: str) -> str:
    """Normalize a GPU name: `NVIDIA GeForce RTX 4090` becomes `4090`. Words such as Laptop, Ti, SUPER and PCIe stay."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower().replace("(tm)", " ").replace("(r)", " "))
    words = re.sub(r"\b(mobile|notebook)\b", "laptop", words)
    words = re.sub(r"\b(nvidia|geforce|tesla|quadro|generation|gpu|blackwell|workstation|edition)\b", "", words)
    joined = re.sub(r"^(nvidia|geforce|rtx)+(?=(pro|[a-z])?\d)", "", words.replace(" ", ""))
    return re.sub(r"^(.*\d.*)(\d\dgb|\dgb)laptop$", r"\1laptop\2", joined.removesuffix("gpu"))


def is_same_gpu(name: str, other: str) -> bool:
    """Whether two names mean the same GPU."""
    return _normalize(name) == _normalize(other)


def _gigabytes(memory_mib: int) -> int:
    return round(bytes_to_gib(mib_to_bytes(memory_mib)))


def _spellings(gpu: Gpu, further: Sequence[str]) -> set[str]:
    """Return every normalized name of a GPU, with and without its memory."""
    names = {_normalize(name) for name in (gpu.key, gpu.title, *further)}
    gigabytes = _gigabytes(gpu.memory_mib)
    sizes = {gigabytes, gigabytes + 1} if gpu.gpu_class == "datacenter" else {gigabytes}
    return names | {f"{name}{size}gb" for name in names if not name.endswith("gb") for size in sizes}


_SPELLINGS: Mapping[str, Gpu] = MappingProxyType(
    {
        spelling: GPUS[row["key"]]
        for row in TABLE
        for spelling in sorted(_spellings(GPUS[row["key"]], [*filter(None, row["names"].split("|"))]))
    }
)


# `8xH100`, `H100:8` and `8 x H100`, as cloud providers and SkyPilot write several GPUs.
_COUNTED = re.compile(
    r"(?:(?P<before>[1-9]\d?) ?[x*] ?)?(?P<kind>.+?)(?:(?: ?[x*] ?|:)(?P<after>[1-9]\d?))?", re.IGNORECASE
)


def lookup_gpu(name: str) -> Gpu:
    """Return a GPU by any usual name: `rtx4090`, `RTX 4090`, `4090`, `NVIDIA GeForce RTX 4090`."""
    normalized = _normalize(name)
    if gpu := _SPELLINGS.get(normalized):
        return gpu
    if (counted := _COUNTED.fullmatch(name.strip())) is not None:
        counts = counted["before"] or counted["after"]
        if counts and (gpu := _SPELLINGS.get(_normalize(counted["kind"]))):
            raise InputError(
                "--gpu takes one kind of GPU, without a number",
                (Problem(where=name, what="the number belongs in --gpus"),),
                f"write --gpu {gpu.key} --gpus {counts}",
            )
    similar = dict.fromkeys(_SPELLINGS[spelling].key for spelling in get_close_matches(normalized, _SPELLINGS, 3, 0.7))
    what = f"unknown GPU; did you mean {' or '.join(similar)}?" if similar else "unknown GPU"
    raise InputError(
        "the GPU is not in the catalogue",
        (Problem(where=name or "(empty)", what=what),),
        f"{find_page('gpus.md')} lists {len(GPUS)} GPUs, such as {', '.join(_EXAMPLES)}; describe any other one in "
        f"hardware.json ({find_page('CLI.md')}#your-hardware), or omit --gpu to plan for this machine",
    )


def list_product_names(gpu: Gpu) -> tuple[str, ...]:
    """Return the names under which a driver may report a GPU, as the label `nvidia.com/gpu.product` of Kubernetes."""
    further = next((row["names"].split("|") for row in TABLE if row["key"] == gpu.key), [])
    names = dict.fromkeys(filter(None, (gpu.title, *further, gpu.key.upper())))
    brand = "" if gpu.title.startswith("Tesla") else "NVIDIA-"
    return tuple(brand + name.replace(" ", "-") for name in names)


def match_gpu(name: str, memory_mib: int) -> Gpu | None:
    """Return the catalogue entry of an installed GPU, or None if no entry has its name and memory."""
    plain = _normalize(name)
    for spelling in (plain, f"{plain}{_gigabytes(memory_mib)}gb"):
        gpu = _SPELLINGS.get(spelling)
        if gpu and abs(memory_mib - gpu.memory_mib) <= _MEMORY_TOLERANCE * gpu.memory_mib:
            return gpu
    return None


def format_limits(gpu: Gpu, *, is_alone: bool = False) -> tuple[str, ...]:
    """Return what a GPU does not support, and the consequences; `is_alone` leaves out links between GPUs."""
    major, minor = gpu.compute_capability
    limits = (
        (not gpu.has_bf16, "no BF16: 16-bit training is in FP16 with loss scaling"),
        (not gpu.has_tf32, "no TF32: FP32 matrix products run at plain FP32 speed"),
        (
            not gpu.has_flash_attention,
            f"no FlashAttention-2 (needs compute capability 8.0, this has {major}.{minor}): other attention kernels",
        ),
        (
            gpu.compute_capability < (7, 5),
            "no CUDA 13 (needs compute capability 7.5): install a build of torch for CUDA 12",
        ),
        (
            gpu.compute_capability == (8, 9),
            "FlashAttention 4 cannot train here (no backward pass for compute capability 8.9): other kernels are used",
        ),
        (
            not gpu.has_p2p and not is_alone,
            "no P2P between GPUs: NCCL_P2P_DISABLE=1, and traffic goes through host memory",
        ),
        (gpu.fp16_tflops is None, "not in the catalogue, peak unknown: no MFU and no estimate of the time"),
    )
    return tuple(words for applies, words in limits if applies)
