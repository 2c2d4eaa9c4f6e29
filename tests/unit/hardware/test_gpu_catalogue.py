"""Catalogue of GPUs: data sheet values, lookup by name, and limitations."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.core.errors import InputError
from launcher.hardware.gpu_catalogue import GPUS, format_limits, lookup_gpu, match_gpu
from launcher.hardware.model import Gpu

# Streaming multiprocessors and boost clock in GHz, from NVIDIA's architecture whitepapers.
GEFORCE = {
    "rtx3060": (28, 1.777),
    "rtx3080": (68, 1.71),
    "rtx3090": (82, 1.695),
    "rtx3090ti": (84, 1.86),
    "rtx4060ti16": (34, 2.535),
    "rtx4070": (46, 2.475),
    "rtx4070tisuper": (66, 2.61),
    "rtx4080": (76, 2.505),
    "rtx4080super": (80, 2.55),
    "rtx4090": (128, 2.52),
    "rtx5070ti": (70, 2.452),
    "rtx5080": (84, 2.617),
    "rtx5090": (170, 2.407),
}
FULL_RATE = {
    "a4000": (48, 1.56),
    "a5000": (64, 1.695),
    "a6000": (84, 1.80),
    "rtx6000ada": (142, 2.505),
    "l4": (58, 2.04),
    "a10": (72, 1.695),
}


@pytest.mark.parametrize("key", GEFORCE)
def test_geforce_peaks_assume_fp32_accumulation(key: str) -> None:
    processors, clock = GEFORCE[key]
    assert GPUS[key].bf16_tflops == pytest.approx(processors * 512 * clock / 1000, rel=0.005)


@pytest.mark.parametrize("key", FULL_RATE)
def test_professional_peaks_are_at_full_rate(key: str) -> None:
    processors, clock = FULL_RATE[key]
    assert GPUS[key].bf16_tflops == pytest.approx(processors * 1024 * clock / 1000, rel=0.005)


def test_every_geforce_is_recomputed() -> None:
    assert {key for key, gpu in GPUS.items() if gpu.gpu_class == "consumer"} == set(GEFORCE)


@pytest.mark.parametrize(
    ("key", "tflops", "memory_mib"),
    [
        ("rtx4080super", 104.5, 16376),
        ("rtx4090", 165.2, 24564),
        ("rtx5090", 209.5, 32607),
        ("l40s", 362, 46068),
        ("a100", 312, 81920),
        ("h100", 989, 81559),
        ("h200", 989, 143771),
        ("b200", 2250, 183359),
    ],
)
def test_known_peaks_and_memories(key: str, tflops: float, memory_mib: int) -> None:
    assert (GPUS[key].bf16_tflops, GPUS[key].memory_mib) == (tflops, memory_mib)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_every_entry_is_coherent(gpu: Gpu) -> None:
    assert gpu.has_bf16 == (gpu.bf16_tflops is not None)
    assert gpu.fp16_tflops
    assert 8 * 1024 <= gpu.memory_mib <= 200 * 1024
    assert 200 <= gpu.memory_gb_per_second <= 8000
    assert gpu.interconnect_gb_per_second >= (150 if gpu.interconnect == "nvlink" else 16)
    assert gpu.has_p2p == (gpu.gpu_class != "consumer")
    assert Gpu.model_validate_json(gpu.model_dump_json()) == gpu


def test_catalogue_covers_common_memory_sizes() -> None:
    classes = {round(gpu.memory_mib / 1024) for gpu in GPUS.values()}
    assert {12, 16, 24, 32, 40, 48, 80} <= classes
    assert max(classes) > 141


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("RTX 4090", "rtx4090"),
        ("rtx-4090", "rtx4090"),
        ("rtx_4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("RTX 4090 24GB", "rtx4090"),
        ("4080 super", "rtx4080super"),
        ("RTX4080", "rtx4080"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx4070tisuper"),
        ("rtx 4060 ti 16gb", "rtx4060ti16"),
        ("3090 Ti", "rtx3090ti"),
        ("NVIDIA RTX A5000", "a5000"),
        ("rtxa6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("Tesla T4", "t4"),
        ("V100", "v100"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("Tesla V100-PCIE-16GB", "v100-pcie"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L40S", "l40s"),
        ("A100", "a100"),
        ("a100-80gb", "a100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("A100 40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("H100", "h100"),
        ("H100 80GB HBM3", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_gpu_is_found_by_usual_names(name: str, key: str) -> None:
    assert lookup_gpu(name).key == key


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_every_gpu_is_found_by_key_and_title(gpu: Gpu) -> None:
    assert lookup_gpu(gpu.key) == lookup_gpu(gpu.title) == lookup_gpu(f"NVIDIA {gpu.title}") == gpu


@given(key=st.sampled_from(sorted(GPUS)), data=st.data())
def test_case_and_separators_do_not_matter(key: str, data: st.DataObject) -> None:
    spelled = "".join(data.draw(st.sampled_from([letter.lower(), letter.upper()])) for letter in key)
    assert lookup_gpu(spelled.replace("-", data.draw(st.sampled_from(["-", " ", "_", "", " - "])))).key == key


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H100 NVL",
        "NVIDIA GH200 480GB",
        "H20",
        "Quadro RTX 6000",
        "rtx4060ti",
        "MI300X",
    ],
)
def test_gpus_with_similar_names_are_distinguished(name: str) -> None:
    with pytest.raises(InputError) as caught:
        lookup_gpu(name)
    assert "not in the catalogue" in str(caught.value)
    assert "rtx3060" in caught.value.hint
    assert "b200" in caught.value.hint


@pytest.mark.parametrize(("name", "meant"), [("rtx4091", "rtx4090"), ("rtx4060ti", "rtx4060ti16"), ("h1000", "h100")])
def test_unknown_gpu_error_suggests_close_names(name: str, meant: str) -> None:
    with pytest.raises(InputError, match=f"did you mean .*{meant}") as caught:
        lookup_gpu(name)
    assert caught.value.exit_code == 2


@given(st.text(max_size=40))
def test_any_name_gives_a_gpu_or_a_clear_error(name: str) -> None:
    with contextlib.suppress(InputError):
        assert lookup_gpu(name).key in GPUS


@pytest.mark.parametrize(
    ("name", "memory_mib", "key"),
    [
        ("NVIDIA GeForce RTX 4090", 24564, "rtx4090"),
        ("NVIDIA GeForce RTX 4060 Ti", 16380, "rtx4060ti16"),
        ("NVIDIA GeForce RTX 4060 Ti", 8188, None),
        ("NVIDIA GeForce RTX 3080", 10240, "rtx3080"),
        ("NVIDIA GeForce RTX 3080", 12288, None),
        ("NVIDIA RTX A6000", 46068, "a6000"),  # with ECC on
        ("Tesla T4", 15109, "t4"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100"),
        ("NVIDIA GeForce RTX 2080 Ti", 11264, None),
    ],
)
def test_installed_gpu_must_match_in_memory(name: str, memory_mib: int, key: str | None) -> None:
    found = match_gpu(name, memory_mib)
    assert (found.key if found else None) == key


def test_old_gpus_lack_bf16_and_flash_attention() -> None:
    for key in ("t4", "v100"):
        limits = " | ".join(format_limits(GPUS[key]))
        assert "no BF16: trains in FP16 with loss scaling" in limits
        assert "no FlashAttention-2 (needs compute capability 8.0" in limits
        assert "no TF32" in limits
    assert "CUDA 13" in " | ".join(format_limits(GPUS["v100"]))
    assert "CUDA 13" not in " | ".join(format_limits(GPUS["t4"]))


def test_rtx4090_lacks_p2p() -> None:
    limits = format_limits(GPUS["rtx4090"])
    assert any("NCCL_P2P_DISABLE=1" in limit for limit in limits)
    assert any("FlashAttention-4 has no backward on compute capability 8.9" in limit for limit in limits)
    assert len(limits) == 2


def test_h100_has_no_limits() -> None:
    assert format_limits(GPUS["h100"]) == ()


def test_unknown_gpu_reports_unknown_peak() -> None:
    unknown = GPUS["rtx4090"].model_copy(update={"bf16_tflops": None, "fp16_tflops": None})
    assert any("peak unknown: no MFU" in limit for limit in format_limits(unknown))
