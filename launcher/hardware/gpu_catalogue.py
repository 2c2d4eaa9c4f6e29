"""Catalogue of GPUs: data sheet values, lookup by name, and limitations.

Sources. Peaks are dense, BF16 or FP16 inputs with FP32 accumulation, as NVIDIA states them:
  GeForce 30    "NVIDIA Ampere GA102 GPU Architecture" whitepaper, appendix tables
  GeForce 40    "NVIDIA Ada GPU Architecture" whitepaper, appendix tables
  GeForce 50    "NVIDIA RTX Blackwell GPU Architecture" whitepaper, appendix tables
  workstation   the same GA102 and Ada whitepapers for professional GPUs (full rate with FP32 accumulation)
  datacenter    product data sheets of T4, V100, A10, A10G, L4, L40S, A100, H100, H200, HGX B200, sparsity not counted
GeForce GPUs accumulate in FP32 at half the rate of FP16 accumulation: streaming multiprocessors x 512 x boost clock.
Professional GPUs do at the full rate: x 1024. A test recomputes the peaks of both that way.
Memory is the total that nvidia-smi prints with recent drivers, with ECC on if that is the default.
Links are one GPU's share in one direction: PCIe 3.0, 4.0, 5.0 x16 carry 16, 32, 64 GB/s; NVLink is half its data sheet.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from launcher.core.errors import InputError, Problem
from launcher.core.units import bytes_to_gib, mib_to_bytes
from launcher.hardware.model import Gpu, GpuClass, Interconnect

_MEMORY_TOLERANCE = 0.1  # ECC and the driver take up to 7 % of the memory


# Class and link. The driver has no P2P between GeForce GPUs over PCIe.
_GEFORCE: tuple[GpuClass, Interconnect] = ("consumer", "pcie-host")
_WORKSTATION: tuple[GpuClass, Interconnect] = ("workstation", "pcie-p2p")
_PCIE: tuple[GpuClass, Interconnect] = ("datacenter", "pcie-p2p")
_NVLINK: tuple[GpuClass, Interconnect] = ("datacenter", "nvlink")
# key, title, MiB, TFLOPS, GB/s of memory, compute capability, kind, GB/s of link; then further names, as nvidia-smi's.
_TABLE: tuple[tuple[Any, ...], ...] = (
    ("rtx3060", "GeForce RTX 3060", 12288, 25.5, 360, (8, 6), _GEFORCE, 32),
    ("rtx3080", "GeForce RTX 3080", 10240, 59.5, 760, (8, 6), _GEFORCE, 32),
    ("rtx3090", "GeForce RTX 3090", 24576, 71, 936, (8, 6), _GEFORCE, 32),
    ("rtx3090ti", "GeForce RTX 3090 Ti", 24564, 80, 1008, (8, 6), _GEFORCE, 32),
    ("rtx4060ti16", "GeForce RTX 4060 Ti 16GB", 16380, 44.1, 288, (8, 9), _GEFORCE, 16),
    ("rtx4070", "GeForce RTX 4070", 12282, 58.3, 504, (8, 9), _GEFORCE, 32),
    ("rtx4070tisuper", "GeForce RTX 4070 Ti SUPER", 16376, 88.2, 672, (8, 9), _GEFORCE, 32),
    ("rtx4080", "GeForce RTX 4080", 16376, 97.5, 717, (8, 9), _GEFORCE, 32),
    ("rtx4080super", "GeForce RTX 4080 SUPER", 16376, 104.5, 736, (8, 9), _GEFORCE, 32),
    ("rtx4090", "GeForce RTX 4090", 24564, 165.2, 1008, (8, 9), _GEFORCE, 32),
    ("rtx5070ti", "GeForce RTX 5070 Ti", 16303, 87.9, 896, (12, 0), _GEFORCE, 64),
    ("rtx5080", "GeForce RTX 5080", 16303, 112.6, 960, (12, 0), _GEFORCE, 64),
    ("rtx5090", "GeForce RTX 5090", 32607, 209.5, 1792, (12, 0), _GEFORCE, 64),
    ("a4000", "RTX A4000", 16376, 76.7, 448, (8, 6), _WORKSTATION, 32),
    ("a5000", "RTX A5000", 24564, 111.1, 768, (8, 6), _WORKSTATION, 32),
    ("a6000", "RTX A6000", 49140, 154.8, 768, (8, 6), _WORKSTATION, 32),
    ("rtx6000ada", "RTX 6000 Ada Generation", 49140, 364.2, 960, (8, 9), _WORKSTATION, 32, "6000 Ada"),
    ("t4", "Tesla T4", 15360, 65, 320, (7, 5), _PCIE, 16),
    ("v100", "Tesla V100 SXM2 16GB", 16384, 125, 900, (7, 0), _NVLINK, 150, "V100 SXM2", "V100 SXM 16GB"),
    ("v100-32gb", "Tesla V100 SXM2 32GB", 32768, 125, 900, (7, 0), _NVLINK, 150, "V100 SXM 32GB", "V100 SXM3 32GB"),
    ("v100-pcie", "Tesla V100 PCIe 16GB", 16384, 112, 900, (7, 0), _PCIE, 16),
    ("v100-pcie-32gb", "Tesla V100 PCIe 32GB", 32768, 112, 900, (7, 0), _PCIE, 16),
    ("l4", "L4", 23034, 121, 300, (8, 9), _PCIE, 32),
    ("a10", "A10", 23028, 125, 600, (8, 6), _PCIE, 32),
    ("a10g", "A10G", 23028, 70, 600, (8, 6), _PCIE, 32),
    ("l40s", "L40S", 46068, 362, 864, (8, 9), _PCIE, 32),
    ("a100-40gb", "A100 SXM4 40GB", 40960, 312, 1555, (8, 0), _NVLINK, 300, "A100 SXM 40GB"),
    ("a100", "A100 SXM4 80GB", 81920, 312, 2039, (8, 0), _NVLINK, 300, "A100 SXM 80GB", "A100 SXM4", "A100 SXM"),
    ("a100-pcie-40gb", "A100 PCIe 40GB", 40960, 312, 1555, (8, 0), _PCIE, 32, "A100 40GB PCIe"),
    ("a100-pcie", "A100 PCIe 80GB", 81920, 312, 1935, (8, 0), _PCIE, 32, "A100 80GB PCIe"),
    ("h100", "H100 SXM5 80GB", 81559, 989, 3350, (9, 0), _NVLINK, 450, "H100 80GB HBM3", "H100 SXM5", "H100 SXM"),
    ("h100-pcie", "H100 PCIe", 81559, 756, 2000, (9, 0), _PCIE, 64, "H100 80GB PCIe"),
    ("h200", "H200 SXM", 143771, 989, 4800, (9, 0), _NVLINK, 450, "H200 141GB", "H200 SXM5", "H200 141GB HBM3e"),
    ("b200", "B200 SXM", 183359, 2250, 8000, (10, 0), _NVLINK, 900, "B200 180GB", "B200 192GB"),
)


def _make_gpu(
    key: str,
    title: str,
    memory_mib: int,
    tflops: float,
    bandwidth: float,
    capability: tuple[int, int],
    kind: tuple[GpuClass, Interconnect],
    link: float,
) -> Gpu:
    return Gpu(
        key=key,
        title=title,
        memory_mib=memory_mib,
        bf16_tflops=tflops if capability >= (8, 0) else None,
        fp16_tflops=tflops,
        memory_gb_per_second=bandwidth,
        compute_capability=capability,
        gpu_class=kind[0],
        interconnect=kind[1],
        interconnect_gb_per_second=link,
    )


GPUS: Mapping[str, Gpu] = MappingProxyType({row[0]: _make_gpu(*row[:8]) for row in _TABLE})


def _normalise(name: str) -> str:
    """`NVIDIA GeForce RTX 4090` -> `4090`. Words that distinguish GPUs (Laptop, Ti, SUPER, D, PCIe) stay."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower().replace("(tm)", " ").replace("(r)", " "))
    kept = re.sub(r"\b(nvidia|geforce|tesla|quadro|generation)\b", " ", words).replace(" ", "")
    return re.sub(r"^(nvidia|geforce|rtx)+(?=[a-z]?\d)", "", kept)


def is_same_gpu(name: str, other: str) -> bool:
    """Whether two names mean the same GPU."""
    return _normalise(name) == _normalise(other)


def _gigabytes(memory_mib: int) -> int:
    return round(bytes_to_gib(mib_to_bytes(memory_mib)))


def _spellings(gpu: Gpu, further: tuple[str, ...]) -> set[str]:
    """Return every normalized name of a GPU, with and without its memory."""
    names = {_normalise(name) for name in (gpu.key, gpu.title, *further)}
    gigabytes = _gigabytes(gpu.memory_mib)
    sizes = {gigabytes, gigabytes + 1} if gpu.gpu_class == "datacenter" else {gigabytes}
    return names | {f"{name}{size}gb" for name in names if not name.endswith("gb") for size in sizes}


_SPELLINGS: Mapping[str, Gpu] = MappingProxyType(
    {spelling: GPUS[row[0]] for row in _TABLE for spelling in sorted(_spellings(GPUS[row[0]], row[8:]))}
)


def lookup_gpu(name: str) -> Gpu:
    """Return a GPU by any usual name: `rtx4090`, `RTX 4090`, `4090`, `NVIDIA GeForce RTX 4090`."""
    wanted = _normalise(name)
    if gpu := _SPELLINGS.get(wanted):
        return gpu
    matches = difflib.get_close_matches(wanted, _SPELLINGS, 5, 0.7)
    close = tuple(dict.fromkeys(_SPELLINGS[match].key for match in matches))
    did_you_mean = f"unknown GPU; did you mean {' or '.join(close[:3])}?" if close else "unknown GPU"
    raise InputError(
        "the GPU is not in the catalogue",
        (Problem(where=name or "(empty)", what=did_you_mean),),
        f"known GPUs: {', '.join(GPUS)}; omit --gpu to plan for this machine",
    )


def match_gpu(name: str, memory_mib: int) -> Gpu | None:
    """Return the catalogue entry of an installed GPU, or None if no entry has its name and memory."""
    plain = _normalise(name)
    for spelling in (plain, f"{plain}{_gigabytes(memory_mib)}gb"):
        gpu = _SPELLINGS.get(spelling)
        if gpu and abs(memory_mib - gpu.memory_mib) <= _MEMORY_TOLERANCE * gpu.memory_mib:
            return gpu
    return None


def format_limits(gpu: Gpu, *, is_alone: bool = False) -> tuple[str, ...]:
    """List what a GPU does not support, and the consequences. A single GPU needs no link."""
    major, minor = gpu.compute_capability
    limits = (
        (not gpu.has_bf16, "no BF16: trains in FP16 with loss scaling"),
        (not gpu.has_tf32, "no TF32: FP32 matrix products run at plain FP32 speed"),
        (
            not gpu.has_flash_attention,
            f"no FlashAttention-2 (needs compute capability 8.0, this has {major}.{minor}): attention by SDPA",
        ),
        (
            gpu.compute_capability < (7, 5),
            "no CUDA 13 (needs compute capability 7.5): install a build of torch for CUDA 12",
        ),
        (
            gpu.compute_capability == (8, 9),
            "FlashAttention-4 has no backward on compute capability 8.9: FlashAttention-2 kernels train",
        ),
        (
            not gpu.has_p2p and not is_alone,
            "no P2P between GPUs: NCCL_P2P_DISABLE=1, and traffic goes through host memory",
        ),
        (gpu.fp16_tflops is None, "not in the catalogue, peak unknown: no MFU and no estimate of the time"),
    )
    return tuple(words for applies, words in limits if applies)
