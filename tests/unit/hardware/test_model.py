"""Hardware described on the command line: defaults and refused values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.core.errors import InputError
from launcher.core.units import MIB
from launcher.hardware.gpu_catalogue import GPUS, lookup_gpu
from launcher.hardware.model import (
    MAX_GPUS_PER_NODE,
    MAX_NODES,
    Gpu,
    Hardware,
    format_hardware,
    limit_vram,
    make_hardware,
)
from launcher.request.flag_types import vram_mib

RTX4090, H100, A5000 = GPUS["rtx4090"], GPUS["h100"], GPUS["a5000"]


@pytest.mark.parametrize(("gpu", "cores", "ram_gib"), [(RTX4090, 32, 256), (A5000, 32, 256), (H100, 64, 512)])
def test_host_defaults_depend_on_gpu_class(gpu: Gpu, cores: int, ram_gib: float) -> None:
    hardware = make_hardware(gpu, gpus_per_node=4, nodes=2)
    assert (hardware.cpu_cores_per_node, hardware.ram_gib_per_node) == (cores, ram_gib)
    assert hardware.num_ranks == 8
    assert hardware.source == "catalogue"
    assert hardware.packages == ()


def test_given_values_replace_defaults() -> None:
    hardware = make_hardware(
        RTX4090, gpus_per_node=1, nodes=1, cpu_cores_per_node=6, ram_gib_per_node=31.5, free_vram_mib=20000
    )
    assert (hardware.cpu_cores_per_node, hardware.ram_gib_per_node) == (6, 31.5)
    assert hardware.free_vram_bytes == 20000 * MIB


def test_all_memory_is_free_by_default() -> None:
    assert make_hardware(RTX4090, gpus_per_node=1, nodes=1).free_vram_bytes == RTX4090.memory_bytes == 24564 * MIB


def test_machine_without_gpu_runs_one_process() -> None:
    hardware = make_hardware(None, gpus_per_node=0, nodes=1)
    assert (hardware.num_ranks, hardware.free_vram_bytes) == (1, 0)
    assert hardware.cpu_cores_per_node == 8
    with pytest.raises(InputError, match="without a GPU, which runs one process"):
        make_hardware(None, gpus_per_node=2, nodes=3)


def test_all_invalid_counts_are_reported_together() -> None:
    with pytest.raises(InputError) as caught:
        make_hardware(RTX4090, gpus_per_node=0, nodes=-1, cpu_cores_per_node=0, ram_gib_per_node=0, free_vram_mib=99999)
    message = str(caught.value)
    assert "GPUs per node: must be between 1 and 16, not 0" in message
    assert "nodes: must be between 1 and 1024, not -1" in message
    assert "CPU cores per node: must be between 1 and 4096, not 0" in message
    assert "RAM per node in GiB: must be between 1 and 65536, not 0" in message
    assert "free VRAM in MiB: must be between 1 and 24564, not 99999" in message
    assert "GeForce RTX 4090" in message
    assert "--gpus counts the GPUs of one node" in caught.value.hint
    assert caught.value.exit_code == 2


@given(
    key=st.sampled_from(sorted(GPUS)), gpus=st.integers(-5, MAX_GPUS_PER_NODE + 5), nodes=st.integers(-5, MAX_NODES + 5)
)
def test_counts_are_accepted_exactly_within_limits(key: str, gpus: int, nodes: int) -> None:
    possible = 1 <= gpus <= MAX_GPUS_PER_NODE and 1 <= nodes <= MAX_NODES
    try:
        hardware = make_hardware(GPUS[key], gpus_per_node=gpus, nodes=nodes)
    except InputError:
        assert not possible
    else:
        assert possible
        assert hardware.num_ranks == gpus * nodes
        assert Hardware.model_validate_json(hardware.model_dump_json()) == hardware


def test_only_hopper_has_flash_attention_3() -> None:
    assert {key for key, gpu in GPUS.items() if gpu.has_flash_attention_3} == {
        *("h20", "h100", "h100-pcie", "h100-nvl", "h800", "h200", "h200-nvl", "gh200"),
    }


def test_vram_limit_reduces_gpu_memory() -> None:
    whole = make_hardware(lookup_gpu("h200"), gpus_per_node=2, nodes=1)
    limited = limit_vram(whole, 24 * 1024)
    assert limited.gpu is not None
    assert limited.gpu.memory_mib == 24 * 1024
    assert (limited.gpu.key, limited.gpus_per_node, limited.vram_limit_mib) == ("h200", 2, 24 * 1024)
    assert "limited to 24.0 GiB" in format_hardware(limited)
    assert limit_vram(whole, None) == whole


@pytest.mark.parametrize(("gpu", "size"), [("rtx4090", "24"), ("l4", "24GiB"), ("t4", "16")])
def test_size_in_the_name_of_a_gpu_is_no_limit(gpu: str, size: str) -> None:
    whole = make_hardware(lookup_gpu(gpu), gpus_per_node=1, nodes=1)
    assert limit_vram(whole, vram_mib(size)) == whole
    assert limit_vram(whole, vram_mib("12")).vram_limit_mib == 12 * 1024


def test_free_memory_is_capped_by_the_limit() -> None:
    busy = make_hardware(lookup_gpu("h200"), gpus_per_node=1, nodes=1, free_vram_mib=20_000)
    assert limit_vram(busy, 24 * 1024).free_vram_mib == 20_000
    assert limit_vram(busy, 16 * 1024).free_vram_mib == 16 * 1024


@pytest.mark.parametrize("limit", [1024, 200_000])
def test_invalid_vram_limits_are_refused(limit: int) -> None:
    with pytest.raises(InputError, match="give a size between 4GiB and 143771MiB, the memory"):
        limit_vram(make_hardware(lookup_gpu("h200"), gpus_per_node=1, nodes=1), limit)
    with pytest.raises(InputError, match="this machine has no GPU"):
        limit_vram(make_hardware(None, gpus_per_node=0, nodes=1), limit)
