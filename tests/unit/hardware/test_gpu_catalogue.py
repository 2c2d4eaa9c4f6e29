"""Catalogue of GPUs: data sheet values, lookup by name, and limitations."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.core.errors import InputError
from launcher.hardware.gpu_catalogue import GPUS, SOURCES, TABLE, format_limits, lookup_gpu, match_gpu
from launcher.hardware.model import Gpu


@pytest.mark.parametrize("row", TABLE, ids=list(GPUS))
def test_peak_and_bandwidth_follow_from_the_chip(row: dict[str, str]) -> None:
    """Peak: multiprocessors x clock x FLOPs per clock; bandwidth: bus width x data rate."""
    gpu = GPUS[row["key"]]
    assert gpu.memory_gb_per_second == pytest.approx(float(row["bus"]) / 8 * float(row["gbps"]), rel=0.005)
    if row["key"] != "h20":  # its peak is limited, and no clock is published
        peak = float(row["sms"]) * float(row["mhz"]) * float(row["rate"]) / 1e6
        assert gpu.fp16_tflops == pytest.approx(peak, rel=0.015)
    assert row["source"] in SOURCES


@pytest.mark.parametrize("row", TABLE, ids=list(GPUS))
def test_geforce_accumulates_in_fp32_at_half_rate(row: dict[str, str]) -> None:
    """The rate per clock: GeForce half of 1024; Ampere and newer data centre chips more."""
    half = row["kind"] == "consumer" or row["key"] in ("a10g", "l20", "l40")
    large = {"8.0": "2048", "9.0": "4096", "10.0": "8192"}
    assert row["rate"] in ("512" if half else large.get(row["capability"], "1024"), "")


def test_all_series_are_complete() -> None:
    def list_models(series: str) -> set[str]:
        return {key.removeprefix(series).split("-")[0] for key in GPUS if key.startswith(series) and "ada" not in key}

    assert list_models("rtx30") == {
        *("50", "60", "60ti", "70", "70ti", "80", "80ti", "90", "90ti"),
        *("50laptop", "50tilaptop", "60laptop", "70laptop", "70tilaptop", "80laptop", "80tilaptop"),
    }
    assert list_models("rtx40") == {
        *("60", "60ti", "60ti16", "70", "70super", "70ti", "70tisuper", "80", "80super", "90", "90d"),
        *("50laptop", "60laptop", "70laptop", "80laptop", "90laptop"),
    }
    assert list_models("rtx50") == {
        *("50", "60", "60ti", "70", "70ti", "80", "90"),
        *("50laptop", "60laptop", "70laptop", "70tilaptop", "80laptop", "90laptop"),
    }
    assert len(GPUS) >= 60


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
    assert 4 * 1024 <= gpu.memory_mib <= 200 * 1024
    assert 160 <= gpu.memory_gb_per_second <= 8000
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
        ("RTX 4070 Ti", "rtx4070ti"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx4090laptop"),
        ("4090 laptop", "rtx4090laptop"),
        ("RTX 4080 Mobile", "rtx4080laptop"),
        ("rtx4060laptopgpu", "rtx4060laptop"),
        ("RTX-3060 12GB", "rtx3060"),
        ("RTX 3060 8 GB", "rtx3060-8gb"),
        ("RTX 3080 Laptop 16GB", "rtx3080laptop-16gb"),
        ("NVIDIA GeForce RTX 3050 6GB Laptop GPU", "rtx3050laptop-6gb"),
        ("RTX 5060 Ti 8GB", "rtx5060ti-8gb"),
        ("RTX 5060 Ti 16 GB", "rtx5060ti"),
        ("rtx 4060 ti", "rtx4060ti"),
        ("RTX 4090 D", "rtx4090d"),
        ("rtx a6000", "a6000"),
        ("RTX 6000 Ada", "rtx6000ada"),
        ("NVIDIA RTX 4000 SFF Ada Generation", "rtx4000sffada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000"),
        ("RTX PRO 6000", "rtxpro6000"),
        ("pro 6000", "rtxpro6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000server"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtxpro6000maxq"),
        ("H100 NVL", "h100-nvl"),
        ("L40S", "l40s"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("H20", "h20"),
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
    "name", ["", "NVIDIA", "Quadro RTX 6000", "RTX 2080 Ti", "NVIDIA H100 CNX", "MI300X", "RX 7900 XTX", "RTX 4090 Ti"]
)
def test_unknown_gpu_points_to_the_list_and_to_hardware_json(name: str) -> None:
    with pytest.raises(InputError, match="not in the catalogue") as caught:
        lookup_gpu(name)
    for words in ("docs/gpus.md", "hardware.json (docs/CLI.md#your-hardware)", "omit --gpu"):
        assert words in caught.value.hint


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("rtx4091", "rtx4090"),
        ("rtx 4070 ti supr", "rtx4070tisuper"),
        ("RTX 4070 laptp", "rtx4070laptop"),
        ("rtx3060it", "rtx3060ti"),
        ("h1000", "h100"),
        ("rtx4900", "rtx4090"),
        ("H10", "h100"),
        ("A100 60GB", "a100"),
        ("L40X", "l40"),
        ("rtx 6000 adda", "rtx6000ada"),
        ("H100 NVLINK", "h100-nvl"),
    ],
)
def test_nearest_name_is_suggested_first(name: str, meant: str) -> None:
    with pytest.raises(InputError, match=rf"did you mean {meant}( or|\?)") as caught:
        lookup_gpu(name)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["", "MI300X", "RX 7900 XTX", "Arc A770", "TPU v5e", "x" * 300])
def test_nothing_is_suggested_for_other_makes(name: str) -> None:
    with pytest.raises(InputError) as caught:
        lookup_gpu(name)
    assert "did you mean" not in str(caught.value.problems)


@given(st.text(max_size=40))
def test_any_name_gives_a_gpu_or_a_clear_error(name: str) -> None:
    with contextlib.suppress(InputError):
        assert lookup_gpu(name).key in GPUS


@pytest.mark.parametrize(
    ("name", "memory_mib", "key"),
    [
        ("NVIDIA GeForce RTX 4090", 24564, "rtx4090"),
        ("NVIDIA GeForce RTX 4060 Ti", 16380, "rtx4060ti16"),
        ("NVIDIA GeForce RTX 4060 Ti", 8188, "rtx4060ti"),
        ("NVIDIA GeForce RTX 5060 Ti", 8151, "rtx5060ti-8gb"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", 16384, "rtx3080laptop-16gb"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, "rtx4090laptop"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 24564, None),
        ("NVIDIA GeForce RTX 3080", 10240, "rtx3080"),
        ("NVIDIA GeForce RTX 3080", 12288, "rtx3080-12gb"),
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
        assert "no BF16: 16-bit training is in FP16 with loss scaling" in limits
        assert "no FlashAttention-2 (needs compute capability 8.0" in limits
        assert "no TF32" in limits
    assert "CUDA 13" in " | ".join(format_limits(GPUS["v100"]))
    assert "CUDA 13" not in " | ".join(format_limits(GPUS["t4"]))


def test_rtx4090_lacks_p2p() -> None:
    limits = format_limits(GPUS["rtx4090"])
    assert any("NCCL_P2P_DISABLE=1" in limit for limit in limits)
    assert any("FlashAttention 4 cannot train here" in limit for limit in limits)
    assert len(limits) == 2


def test_h100_has_no_limits() -> None:
    assert format_limits(GPUS["h100"]) == ()


def test_unknown_gpu_reports_unknown_peak() -> None:
    unknown = GPUS["rtx4090"].model_copy(update={"bf16_tflops": None, "fp16_tflops": None})
    assert any("peak unknown: no MFU" in limit for limit in format_limits(unknown))


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("8xH100", "--gpu h100 --gpus 8"),
        ("H100:8", "--gpu h100 --gpus 8"),
        ("2 x RTX 4090", "--gpu rtx4090 --gpus 2"),
        ("a100-80gbx4", "--gpu a100 --gpus 4"),
    ],
)
def test_number_of_gpus_in_a_name_is_answered_with_flags(name: str, flags: str) -> None:
    with pytest.raises(InputError, match="the number belongs in --gpus") as caught:
        lookup_gpu(name)
    assert caught.value.hint == f"write {flags}"
