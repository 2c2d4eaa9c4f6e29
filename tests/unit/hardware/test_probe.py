"""Probe of the machine, with a fake NVML and fake cgroup files."""

from __future__ import annotations

import importlib
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from launcher.core.errors import InputError
from launcher.hardware.gpu_catalogue import format_limits
from launcher.hardware.model import Hardware
from launcher.hardware.probe import (
    PACKAGES,
    GpuReading,
    NvmlError,
    call_nvml,
    make_common_gpu,
    probe_cpu_cores,
    probe_driver,
    probe_hardware,
    probe_packages,
    probe_ram_bytes,
    read_gpus,
    select_visible,
)
from tests.conftest import ROOT
from tests.fake_nvml import FakeGpu, FakeNvml, install_nvml

DESKTOP = FakeGpu("NVIDIA GeForce RTX 4090", 24564, 23006, 1200, (8, 9), "GPU-3c5dd0d1-5b0f-7b5b-9e60", mig=None)
EIGHT_H100 = [
    FakeGpu("NVIDIA H100 80GB HBM3", 81559, 81000 - index, uuid=f"GPU-{index}{index}aa0000-1111-2222-3333")
    for index in range(8)
]
MIXED = [
    FakeGpu("NVIDIA GeForce RTX 3060", 12288, 12000, capability=(8, 6), uuid="GPU-aaaa1111", mig=None),
    FakeGpu("NVIDIA GeForce RTX 4090", 24564, 24100, capability=(8, 9), uuid="GPU-bbbb2222", mig=None),
    FakeGpu("NVIDIA GeForce RTX 4090", 24564, 24200, capability=(8, 9), uuid="GPU-bbbb3333", mig=None),
]
UNIFIED = FakeGpu("NVIDIA GB10", None, capability=(12, 1), mig=None)
MIG = FakeGpu("NVIDIA A100-SXM4-80GB", 81920, 81000, capability=(8, 0), mig=True)


def read(*gpus: FakeGpu) -> tuple[GpuReading, ...]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return read_gpus(install_nvml(monkeypatch, *gpus))


def test_one_gpu_is_read() -> None:
    (reading,) = read(DESKTOP)
    assert reading == GpuReading(
        index=0,
        uuid="GPU-3c5dd0d1-5b0f-7b5b-9e60",
        name="NVIDIA GeForce RTX 4090",
        memory_mib=24564,
        free_mib=23006,
        compute_capability=(8, 9),
        is_mig=False,
    )


def test_eight_gpus_are_read() -> None:
    readings = read(*EIGHT_H100)
    assert [reading.index for reading in readings] == list(range(8))
    assert make_common_gpu(readings).key == "h100"


def test_unreported_values_are_none() -> None:
    (reading,) = read(UNIFIED)
    assert (reading.memory_mib, reading.free_mib, reading.compute_capability) == (None, None, (12, 1))


def test_known_gpu_has_the_memory_the_driver_reports() -> None:
    gpu = make_common_gpu(read(replace(DESKTOP, total_mib=24217)))
    assert (gpu.key, gpu.memory_mib, gpu.bf16_tflops) == ("rtx4090", 24217, 165.2)


def test_unknown_gpu_has_no_peak() -> None:
    gpu = make_common_gpu(read(FakeGpu("NVIDIA GeForce RTX 2080 Ti", 11264, capability=(7, 5))))
    assert (gpu.key, gpu.title) == ("nvidia-geforce-rtx-2080-ti", "NVIDIA GeForce RTX 2080 Ti")
    assert (gpu.bf16_tflops, gpu.fp16_tflops, gpu.memory_mib, gpu.compute_capability) == (None, None, 11264, (7, 5))
    assert not gpu.has_bf16
    assert not gpu.has_p2p
    assert any("peak unknown" in limit for limit in format_limits(gpu))


def test_catalogue_supplies_compute_capability_missing_from_old_drivers() -> None:
    known = make_common_gpu(read(replace(DESKTOP, capability=None)))
    assert known.compute_capability == (8, 9)


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        ([UNIFIED], "GPU 0, NVIDIA GB10: does not report its memory"),
        ([MIG], "GPU 0, NVIDIA A100-SXM4-80GB: is split into MIG instances"),
        ([replace(MIG, mig=False), MIG], "GPU 1, NVIDIA A100-SXM4-80GB: is split"),
        ([FakeGpu("NVIDIA Mystery", capability=None)], "does not report its compute capability"),
    ],
)
def test_unusable_gpu_is_refused_with_a_hint(gpus: list[FakeGpu], message: str) -> None:
    with pytest.raises(InputError) as caught:
        make_common_gpu(read(*gpus))
    assert message in str(caught.value)
    assert "--gpu rtx4090" in caught.value.hint


def test_different_gpus_are_refused_with_a_hint() -> None:
    with pytest.raises(InputError) as caught:
        make_common_gpu(read(*MIXED))
    message = str(caught.value)
    assert "GPU 0: NVIDIA GeForce RTX 3060, 12288 MiB" in message
    assert "GPU 2: NVIDIA GeForce RTX 4090, 24564 MiB" in message
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=" in caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("", []),
        (" ", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("3", [3]),
        ("2, 0", [2, 0]),
        ("0,1,-1,2", [0, 1]),
        ("0,1,99,2", [0, 1]),
        ("GPU-44aa", [4]),
        ("GPU-44aa,GPU-77aa", [4, 7]),
        ("GPU-44aa,GPU-", [4]),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(visible: str | None, indices: list[int]) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    readings = select_visible(read(*EIGHT_H100), environ)
    assert [reading.index for reading in readings] == indices


@pytest.mark.parametrize("visible", ["9", "0,0", "GPU-", "cuda:0", "MIG-1c5d", "0 1"])
def test_empty_selection_is_refused(visible: str) -> None:
    with pytest.raises(InputError, match="selects no GPU of this machine") as caught:
        select_visible(read(*EIGHT_H100), {"CUDA_VISIBLE_DEVICES": visible})
    assert ("MIG instances are not supported" in caught.value.hint) == visible.startswith("MIG")
    assert "GPU 7: NVIDIA H100 80GB HBM3" in str(caught.value)


def test_equal_gpus_of_a_mixed_machine_can_be_selected() -> None:
    by_index = {"CUDA_VISIBLE_DEVICES": "1,2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    by_uuid = {"CUDA_VISIBLE_DEVICES": "GPU-bbbb2222,GPU-bbbb3333"}
    for environ in (by_index, by_uuid):
        readings = select_visible(read(*MIXED), environ)
        assert [reading.index for reading in readings] == [1, 2]
        assert make_common_gpu(readings).key == "rtx4090"


def test_index_on_a_mixed_machine_requires_pci_order() -> None:
    with pytest.raises(InputError, match="is ambiguous: CUDA and nvidia-smi may number") as caught:
        select_visible(read(*MIXED), {"CUDA_VISIBLE_DEVICES": "1,2"})
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in caught.value.hint


def test_machine_with_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, DESKTOP)
    hardware = probe_hardware()
    assert hardware.gpu is not None
    assert (hardware.gpu.key, hardware.gpus_per_node, hardware.nodes) == ("rtx4090", 1, 1)
    assert hardware.free_vram_mib == 23006
    assert hardware.source == "probe"
    assert hardware.cpu_cores_per_node >= 1
    assert hardware.ram_gib_per_node > 0
    assert Hardware.model_validate_json(hardware.model_dump_json()) == hardware


def test_free_memory_is_the_minimum_of_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, *EIGHT_H100)
    assert (probe_hardware().gpus_per_node, probe_hardware().free_vram_mib) == (8, 80993)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert (probe_hardware().gpus_per_node, probe_hardware().free_vram_mib) == (2, 80999)


def test_memory_is_read_from_drivers_without_version_2(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, DESKTOP, has_memory_v2=False)
    assert probe_hardware().free_vram_mib == 23006


def test_different_gpus_stop_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, *MIXED)
    with pytest.raises(InputError, match="the GPUs differ"):
        probe_hardware()


def test_failing_driver_means_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, failure="Driver Not Loaded")
    hardware = probe_hardware()
    assert (hardware.gpu, hardware.gpus_per_node, hardware.num_ranks) == (None, 0, 1)
    assert hardware.free_vram_mib is None
    assert probe_driver() is None


def test_hanging_driver_means_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_nvml(monkeypatch, hangs=True)
    with pytest.raises(NvmlError, match=r"timed out after 0\.2 s"):
        call_nvml(read_gpus, 0.2)
    fake.hangs = False
    assert call_nvml(read_gpus)


def test_machine_without_nvml_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pynvml raises NVMLError_LibraryNotFound without a driver."""
    import pynvml

    monkeypatch.setattr(pynvml, "CDLL", lambda _name: (_ for _ in ()).throw(OSError()))
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    assert probe_hardware().gpu is None


def test_driver_version(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch)
    assert probe_driver() == "570.133.20"


def test_hidden_gpus_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, *EIGHT_H100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert probe_hardware().gpu is None


def test_packages_are_found_without_importing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "flash_attn" in probe_packages()
    assert set(probe_packages()) <= set(PACKAGES)


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


AVAILABLE = 32000000 * 1024
OWN_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, OWN_CORES),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, OWN_CORES),
        ({"sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1),
        ({"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"sys/fs/cgroup/cpu.max": "99900000 100000\n"}, OWN_CORES),
        ({"sys/fs/cgroup/cpu.max": "broken"}, OWN_CORES),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, OWN_CORES),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/cpu.max": "100000 100000"}, 1),
    ],
)
def test_cores_respect_affinity_and_cgroups(files: dict[str, str], cores: int, tmp_path: Path) -> None:
    assert probe_cpu_cores(_write(tmp_path, files)) == cores


@pytest.mark.parametrize(
    ("files", "ram_bytes"),
    [
        ({}, AVAILABLE),
        ({"sys/fs/cgroup/memory.max": "max\n"}, AVAILABLE),
        ({"sys/fs/cgroup/memory.max": "8589934592\n"}, 8589934592),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, AVAILABLE),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "4294967296\n"}, 4294967296),
        (
            {
                "proc/self/cgroup": "4:memory:/job\n0::/\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1073741824",
            },
            1073741824,
        ),
    ],
)
def test_memory_respects_availability_and_cgroups(
    files: dict[str, str], ram_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=AVAILABLE))
    assert probe_ram_bytes(_write(tmp_path, files)) == ram_bytes


def test_without_affinity_all_cores_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert probe_cpu_cores(tmp_path) == os.cpu_count()


@pytest.mark.parametrize("odd", ["²", "٣", "1" * 5000, "0x1", "+0"])
def test_only_ascii_integers_are_indices(odd: str) -> None:
    with pytest.raises(InputError, match="selects no GPU of this machine"):
        select_visible(read(DESKTOP), {"CUDA_VISIBLE_DEVICES": odd})


def test_flash_attention_4_is_found_with_and_without_the_older_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are in the folder flash_attn, which without the older package has no __init__.py."""
    _write(tmp_path, {"flash_attn/cute/__init__.py": "raise SystemExit('imported')"})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert {"flash_attn", "flash_attn.cute"} & set(probe_packages()) == {"flash_attn.cute"}
    _write(tmp_path, {"flash_attn/__init__.py": "raise SystemExit('imported')"})
    importlib.invalidate_caches()
    assert {"flash_attn", "flash_attn.cute"} <= set(probe_packages())


def test_names_and_constants_of_nvml_exist() -> None:
    """The fake is as the real module, which no test can call without a GPU."""
    import pynvml

    sources = [ROOT / "launcher/hardware/probe.py", ROOT / "launcher/analysis/doctor/gpu_checks.py"]
    names = {name for file in sources for name in re.findall(r"\bnvml\.(\w+)", file.read_text())}
    assert len(names) > 20
    for name in names:
        real, fake = getattr(pynvml, name), getattr(FakeNvml(), name)
        assert callable(real) == callable(fake), name
        assert callable(real) or name == "nvmlMemory_v2" or real == fake, name
