"""Probe of the machine, with captured nvidia-smi output, a fake nvidia-smi on PATH, and fake /proc and cgroup files."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.core.errors import InputError
from launcher.hardware.gpu_catalogue import format_limits
from launcher.hardware.model import Hardware
from launcher.hardware.probe import (
    PACKAGES,
    GpuReading,
    make_common_gpu,
    parse_nvidia_smi,
    probe_cpu_cores,
    probe_driver,
    probe_hardware,
    probe_packages,
    probe_ram_bytes,
    select_visible,
)

DESKTOP = "0, GPU-3c5dd0d1-5b0f-7b5b-9e60-53f0a0b9d1f2, NVIDIA GeForce RTX 4090, 24564, 23006, 8.9, [N/A]\n"
EIGHT_H100 = "".join(
    f"{index}, GPU-{index}{index}aa0000-1111-2222-3333-44445555666{index}, NVIDIA H100 80GB HBM3, 81559, "
    f"{81000 - index}, 9.0, Disabled\n"
    for index in range(8)
)
MIXED = (
    "0, GPU-aaaa1111-0000-0000-0000-000000000001, NVIDIA GeForce RTX 3060, 12288, 12000, 8.6, [N/A]\n"
    "1, GPU-bbbb2222-0000-0000-0000-000000000002, NVIDIA GeForce RTX 4090, 24564, 24100, 8.9, [N/A]\n"
    "2, GPU-bbbb3333-0000-0000-0000-000000000003, NVIDIA GeForce RTX 4090, 24564, 24200, 8.9, [N/A]\n"
)
UNKNOWN = "0, GPU-cccc, NVIDIA GeForce RTX 2080 Ti, 11264, 10800, 7.5, [N/A]\n"
UNIFIED = "0, GPU-dddd, NVIDIA GB10, [N/A], [N/A], 12.1, [N/A]\n"
MIG = "0, GPU-eeee, NVIDIA A100-SXM4-80GB, 81920, 81000, 8.0, Enabled\n"
NO_CAPABILITY = "0, GPU-ffff, {}, 24564, 24000, [N/A], [N/A]\n"


def test_one_gpu_is_parsed() -> None:
    (reading,) = parse_nvidia_smi(DESKTOP)
    assert reading == GpuReading(
        index=0,
        uuid="GPU-3c5dd0d1-5b0f-7b5b-9e60-53f0a0b9d1f2",
        name="NVIDIA GeForce RTX 4090",
        memory_mib=24564,
        free_mib=23006,
        compute_capability=(8, 9),
        is_mig=False,
    )


def test_eight_gpus_are_parsed() -> None:
    readings = parse_nvidia_smi(EIGHT_H100)
    assert [reading.index for reading in readings] == list(range(8))
    assert make_common_gpu(readings).key == "h100"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "No devices were found\n",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver, and so on.\n",
        "Unable to determine the device handle for GPU0000:01:00.0: Unknown Error\n",
        "a, b, c, d, e, f, g\n",
    ],
)
def test_other_output_means_no_gpu(text: str) -> None:
    assert parse_nvidia_smi(text) == ()


@given(st.text())
def test_any_output_is_parsed_without_error(text: str) -> None:
    assert isinstance(parse_nvidia_smi(text), tuple)


def test_other_lines_are_skipped() -> None:
    assert len(parse_nvidia_smi(f"WARNING: infoROM is corrupted\r\n{DESKTOP}\n")) == 1


def test_unreported_values_are_none() -> None:
    (reading,) = parse_nvidia_smi(UNIFIED)
    assert (reading.memory_mib, reading.free_mib, reading.compute_capability) == (None, None, (12, 1))


def test_known_gpu_has_the_memory_the_driver_reports() -> None:
    gpu = make_common_gpu(parse_nvidia_smi(DESKTOP.replace("24564", "24217")))
    assert (gpu.key, gpu.memory_mib, gpu.bf16_tflops) == ("rtx4090", 24217, 165.2)


def test_unknown_gpu_has_no_peak() -> None:
    gpu = make_common_gpu(parse_nvidia_smi(UNKNOWN))
    assert (gpu.key, gpu.title) == ("nvidia-geforce-rtx-2080-ti", "NVIDIA GeForce RTX 2080 Ti")
    assert (gpu.bf16_tflops, gpu.fp16_tflops, gpu.memory_mib, gpu.compute_capability) == (None, None, 11264, (7, 5))
    assert not gpu.has_bf16
    assert not gpu.has_p2p
    assert any("peak unknown" in limit for limit in format_limits(gpu))


def test_catalogue_supplies_compute_capability_missing_from_old_drivers() -> None:
    known = make_common_gpu(parse_nvidia_smi(NO_CAPABILITY.format("NVIDIA GeForce RTX 4090")))
    assert known.compute_capability == (8, 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (UNIFIED, "GPU 0, NVIDIA GB10: does not report its memory"),
        (MIG, "GPU 0, NVIDIA A100-SXM4-80GB: is split into MIG instances"),
        (MIG.replace("Enabled", "Disabled") + MIG.replace("0,", "1,", 1), "GPU 1, NVIDIA A100-SXM4-80GB: is split"),
        (NO_CAPABILITY.format("NVIDIA Mystery"), "does not report its compute capability"),
    ],
)
def test_unusable_gpu_is_refused_with_a_hint(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        make_common_gpu(parse_nvidia_smi(text))
    assert message in str(caught.value)
    assert "--gpu rtx4090" in caught.value.hint


def test_different_gpus_are_refused_with_a_hint() -> None:
    with pytest.raises(InputError) as caught:
        make_common_gpu(parse_nvidia_smi(MIXED))
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
    readings = select_visible(parse_nvidia_smi(EIGHT_H100), environ)
    assert [reading.index for reading in readings] == indices


@pytest.mark.parametrize("visible", ["9", "0,0", "GPU-", "cuda:0", "MIG-1c5d", "0 1"])
def test_empty_selection_is_refused(visible: str) -> None:
    with pytest.raises(InputError, match="selects no GPU of this machine") as caught:
        select_visible(parse_nvidia_smi(EIGHT_H100), {"CUDA_VISIBLE_DEVICES": visible})
    assert ("MIG instances are not supported" in caught.value.hint) == visible.startswith("MIG")
    assert "GPU 7: NVIDIA H100 80GB HBM3" in str(caught.value)


def test_equal_gpus_of_a_mixed_machine_can_be_selected() -> None:
    by_index = {"CUDA_VISIBLE_DEVICES": "1,2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    by_uuid = {"CUDA_VISIBLE_DEVICES": "GPU-bbbb2222,GPU-bbbb3333"}
    for environ in (by_index, by_uuid):
        readings = select_visible(parse_nvidia_smi(MIXED), environ)
        assert [reading.index for reading in readings] == [1, 2]
        assert make_common_gpu(readings).key == "rtx4090"


def test_index_on_a_mixed_machine_requires_pci_order() -> None:
    with pytest.raises(InputError, match="is ambiguous on a machine with different GPUs") as caught:
        select_visible(parse_nvidia_smi(MIXED), {"CUDA_VISIBLE_DEVICES": "1,2"})
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in caught.value.hint


def _install_nvidia_smi(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def _answer(text: str) -> str:
    """Install a fake nvidia-smi that answers only the expected query."""
    fields = "index,uuid,name,memory.total,memory.free,compute_cap,mig.mode.current"
    return f'[ "$*" = "--query-gpu={fields} --format=csv,noheader,nounits" ] || exit 2\ncat <<\'END\'\n{text}END'


def test_machine_with_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install_nvidia_smi(tmp_path, _answer(DESKTOP), monkeypatch)
    hardware = probe_hardware()
    assert hardware.gpu is not None
    assert (hardware.gpu.key, hardware.gpus_per_node, hardware.nodes) == ("rtx4090", 1, 1)
    assert hardware.free_vram_mib == 23006
    assert hardware.source == "probe"
    assert hardware.cpu_cores_per_node >= 1
    assert hardware.ram_gib_per_node > 0
    assert Hardware.model_validate_json(hardware.model_dump_json()) == hardware


def test_free_memory_is_the_minimum_of_visible_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install_nvidia_smi(tmp_path, _answer(EIGHT_H100), monkeypatch)
    assert (probe_hardware().gpus_per_node, probe_hardware().free_vram_mib) == (8, 80993)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert (probe_hardware().gpus_per_node, probe_hardware().free_vram_mib) == (2, 80999)


def test_unreported_free_memory_counts_as_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install_nvidia_smi(tmp_path, _answer(DESKTOP.replace("23006", "[N/A]")), monkeypatch)
    assert probe_hardware().free_vram_mib is None


def test_different_gpus_stop_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install_nvidia_smi(tmp_path, _answer(MIXED), monkeypatch)
    with pytest.raises(InputError, match="the GPUs differ"):
        probe_hardware()


@pytest.mark.parametrize(
    "body",
    ["exit 9", "echo 'No devices were found'; exit 6", "echo broken; exit 0", "kill -9 $$", "printf '\\377\\376'"],
)
def test_failing_nvidia_smi_means_no_gpu(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install_nvidia_smi(tmp_path, body, monkeypatch)
    hardware = probe_hardware()
    assert (hardware.gpu, hardware.gpus_per_node, hardware.num_ranks) == (None, 0, 1)
    assert hardware.free_vram_mib is None


def test_hanging_nvidia_smi_means_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install_nvidia_smi(tmp_path, "exec sleep 60", monkeypatch)
    monkeypatch.setattr("launcher.hardware.probe._TIMEOUT_SECONDS", 0.2)
    assert probe_hardware().gpu is None


def test_missing_nvidia_smi_means_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probe_hardware().gpu is None


def test_driver_version_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi prints it once per GPU."""
    asked = '[ "$*" = "--query-gpu=driver_version --format=csv,noheader" ] || exit 2'
    _install_nvidia_smi(tmp_path, f"{asked}\nprintf '570.86.15\\n570.86.15\\n'", monkeypatch)
    assert probe_driver() == "570.86.15"
    _install_nvidia_smi(tmp_path, "exit 9", monkeypatch)
    assert probe_driver() is None


def test_hidden_gpus_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install_nvidia_smi(tmp_path, _answer(EIGHT_H100), monkeypatch)
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


MEMINFO = "MemTotal:       65000000 kB\nMemFree:         1000000 kB\nMemAvailable:   32000000 kB\n"
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
        ({}, 32000000 * 1024),
        ({"sys/fs/cgroup/memory.max": "max\n"}, 32000000 * 1024),
        ({"sys/fs/cgroup/memory.max": "8589934592\n"}, 8589934592),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 32000000 * 1024),
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
def test_memory_respects_availability_and_cgroups(files: dict[str, str], ram_bytes: int, tmp_path: Path) -> None:
    assert probe_ram_bytes(_write(tmp_path, {"proc/meminfo": MEMINFO, **files})) == ram_bytes


def test_memory_without_proc_comes_from_sysconf(tmp_path: Path) -> None:
    assert probe_ram_bytes(tmp_path) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_unknown_memory_is_refused_with_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sysconf")
    with pytest.raises(InputError, match="cannot read how much memory") as caught:
        probe_ram_bytes(tmp_path)
    assert "--gpu" in caught.value.hint


def test_without_affinity_all_cores_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert probe_cpu_cores(tmp_path) == os.cpu_count()


@pytest.mark.parametrize("odd", ["²", "٣", "1" * 5000, "0x1", "+0"])
def test_only_ascii_integers_are_parsed(odd: str) -> None:
    assert parse_nvidia_smi(DESKTOP.replace("0, GPU", f"{odd}, GPU")) == ()
    (reading,) = parse_nvidia_smi(DESKTOP.replace("24564", odd))
    assert reading.memory_mib is None
    with pytest.raises(InputError, match="selects no GPU of this machine"):
        select_visible(parse_nvidia_smi(DESKTOP), {"CUDA_VISIBLE_DEVICES": odd})


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
