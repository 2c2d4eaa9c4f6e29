"""User settings that override the catalogue and the probe: prices, links, GPUs, memory limits.

They are in hardware.json in the user's config folder; LAUNCHER_HARDWARE sets another file, or disables it. They change
only the Hardware that a plan is made for, and the plan lists the values it used.

    {
      "price_per_gpu_hour": 0.5,
      "currency": "EUR",
      "network_gb_per_second": 12.5,
      "this_machine": {"free_vram_gib": 20, "cpu_cores": 8, "ram_gib": 48},
      "gpus": {
        "rtx4090": {"price_per_gpu_hour": 0.4, "interconnect": "pcie-p2p", "interconnect_gb_per_second": 25},
        "rtx2080ti": {"title": "NVIDIA GeForce RTX 2080 Ti", "memory_mib": 11264, "tflops": 53.8,
                      "memory_gb_per_second": 616, "compute_capability": "7.5"}
      }
    }
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from launcher.core.errors import InputError, ManifestError, Problem
from launcher.core.installation import find_page
from launcher.core.run_paths import expand_home, get_home
from launcher.core.units import bytes_to_gib, format_price, mib_to_bytes
from launcher.hardware.gpu_catalogue import GPUS, is_same_gpu, lookup_gpu
from launcher.hardware.model import Gpu, GpuClass, Hardware, Interconnect, UserValue
from launcher.manifest.parse_json import read_json_object
from launcher.manifest.problems import find_problems
from launcher.manifest.strict_model import Strict

HARDWARE_VARIABLE = "LAUNCHER_HARDWARE"
_OFF = ("off", "0", "none", "no")
_NEEDED = (
    "memory_mib",
    "tflops",
    "memory_gb_per_second",
    "compute_capability",
)  # of a GPU that is not in the catalogue

Price = Annotated[float, Field(ge=0, le=1e6)]
Bandwidth = Annotated[float, Field(gt=0, le=1e6)]


class GpuOverrides(Strict):
    """Corrections to a GPU of the catalogue, or the description of another one."""

    title: Annotated[str, Field(min_length=1, max_length=100)] | None = None  # as nvidia-smi calls it
    memory_mib: Annotated[int, Field(ge=1024, le=10**7)] | None = None
    tflops: Annotated[float, Field(gt=0, le=1e5)] | None = None  # BF16 or FP16, dense, with FP32 accumulation
    memory_gb_per_second: Bandwidth | None = None
    compute_capability: Annotated[str, Field(pattern=r"^([3-9]|1[0-9])\.[0-9]$")] | None = None
    interconnect: Interconnect | None = None
    interconnect_gb_per_second: Bandwidth | None = None
    gpu_class: GpuClass | None = None
    price_per_gpu_hour: Price | None = None


class ThisMachine(Strict):
    """Settings for the probed machine; they do not apply to plans for --gpu."""

    free_vram_gib: Annotated[float, Field(gt=0, le=1e5)] | None = None  # upper limit, even if more is free
    cpu_cores: Annotated[int, Field(ge=1, le=4096)] | None = None
    ram_gib: Annotated[float, Field(ge=1, le=65536)] | None = None


class HardwareOverrides(Strict):
    """Contents of hardware.json."""

    schema_version: Literal[1] = 1
    price_per_gpu_hour: Price | None = None  # of GPUs without their own price
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] = ""  # of all prices, such as EUR
    network_gb_per_second: Bandwidth | None = None  # of a node, in one direction
    this_machine: ThisMachine = ThisMachine()
    gpus: dict[str, GpuOverrides] = Field(default_factory=dict)


def find_hardware_file() -> Path | None:
    """Return the path of hardware.json, or None if it is disabled."""
    configured = os.environ.get(HARDWARE_VARIABLE, "")
    if configured.lower() in _OFF:
        return None
    if configured:
        return Path(expand_home(configured))
    return Path(os.environ.get("XDG_CONFIG_HOME") or get_home() / ".config") / "expert-launcher" / "hardware.json"


def load_hardware_overrides() -> HardwareOverrides:
    """Load hardware.json, if there is one; raise one error that lists all its problems."""
    file = find_hardware_file()
    if file is None or (not os.environ.get(HARDWARE_VARIABLE) and not file.exists()):
        return HardwareOverrides()
    try:
        tree = read_json_object(file)
    except ManifestError as error:
        raise _refuse(error.title, error.problems) from None
    problems = find_problems(tree, HardwareOverrides)
    if not problems:
        overrides = HardwareOverrides.model_validate_json(json.dumps(tree))
        problems = list(_find_incomplete(overrides))
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise _refuse(f"{file}: {count}", tuple(problems))
    return overrides


def _refuse(title: str, problems: tuple[Problem, ...] = ()) -> InputError:
    return InputError(
        title, problems, hint=f"{find_page('CLI.md')} has an example; {HARDWARE_VARIABLE}=off plans without the file"
    )


def _find_incomplete(overrides: HardwareOverrides) -> Iterator[Problem]:
    """Yield a problem for each GPU that is not in the catalogue and lacks required values."""
    for key, entry in overrides.gpus.items():
        if _lookup_known(key) is None:
            missing = [name for name in _NEEDED if getattr(entry, name) is None]
            if missing:
                what = f"not in the catalogue, so it needs {', '.join(missing)}"
                yield Problem(where=f"gpus.{key}", what=what)


def _lookup_known(name: str) -> Gpu | None:
    try:
        return lookup_gpu(name)
    except InputError:
        return None


def lookup_named_gpu(overrides: HardwareOverrides, name: str) -> Gpu:
    """Return the GPU of --gpu NAME, from the user's file or the catalogue, with the user's corrections."""
    key = _match(overrides, name)
    if key is None:
        return lookup_gpu(name)
    return _correct(_lookup_known(key) or _make_gpu(key, overrides.gpus[key]), overrides.gpus[key])


def _match(overrides: HardwareOverrides, name: str) -> str | None:
    for key, entry in overrides.gpus.items():
        known = _lookup_known(key)
        titles = [key, *([entry.title] if entry.title else []), *([known.title, known.key] if known else [])]
        if any(is_same_gpu(name, title) for title in titles):
            return key
    named = _lookup_known(name)
    return next((key for key in overrides.gpus if named is not None and _lookup_known(key) == named), None)


def _make_gpu(key: str, entry: GpuOverrides) -> Gpu:
    assert entry.memory_mib is not None, "the file was checked"
    assert entry.memory_gb_per_second is not None
    return Gpu(
        key=key,
        title=entry.title or key,
        memory_mib=entry.memory_mib,
        bf16_tflops=None,
        fp16_tflops=entry.tflops,
        memory_gb_per_second=entry.memory_gb_per_second,
        compute_capability=(0, 0),
        interconnect="pcie-host",
        interconnect_gb_per_second=16.0,
        gpu_class="consumer",
    )


def _correct(gpu: Gpu, entry: GpuOverrides) -> Gpu:
    same = ("title", "memory_mib", "memory_gb_per_second", "interconnect", "interconnect_gb_per_second", "gpu_class")
    update: dict[str, object] = {name: value for name in same if (value := getattr(entry, name)) is not None}
    if entry.compute_capability is not None:
        major, _, minor = entry.compute_capability.partition(".")
        update["compute_capability"] = (int(major), int(minor))
    changed = gpu.model_copy(update=update)
    if entry.tflops is None:
        return changed
    return changed.model_copy(
        update={"fp16_tflops": entry.tflops, "bf16_tflops": entry.tflops if changed.has_bf16 else None}
    )


def apply_hardware_overrides(
    overrides: HardwareOverrides, hardware: Hardware, *, keeps: tuple[str, ...] = ()
) -> Hardware:
    """Return the hardware with the user's values. `keeps` lists values from the command line, which take precedence."""
    here, update = hardware.source == "probe", dict[str, object]()
    given = [*_describe_gpu(overrides, hardware)]
    gpu = hardware.gpu
    if gpu is not None and here:
        key = _match(overrides, gpu.title)
        if key is not None:
            # Keep the memory that the driver reports: the file may describe another memory size.
            gpu = _correct(gpu, overrides.gpus[key].model_copy(update={"memory_mib": None, "title": None}))
            update["gpu"] = gpu
        if overrides.this_machine.free_vram_gib is not None:
            update["free_vram_mib"], value = _limit_free(overrides.this_machine.free_vram_gib, hardware)
            given.append(UserValue(name="free VRAM", value=value))
    machine = overrides.this_machine
    if here and machine.cpu_cores is not None and "cpu_cores_per_node" not in keeps:
        update["cpu_cores_per_node"] = machine.cpu_cores
        given.append(UserValue(name="CPU cores", value=str(machine.cpu_cores)))
    if here and machine.ram_gib is not None and "ram_gib_per_node" not in keeps:
        update["ram_gib_per_node"] = machine.ram_gib
        given.append(UserValue(name="CPU memory", value=f"{machine.ram_gib:g} GiB"))
    if overrides.network_gb_per_second is not None and hardware.nodes > 1:
        update["network_gb_per_second"] = overrides.network_gb_per_second
        given.append(UserValue(name="network", value=f"{overrides.network_gb_per_second:g} GB/s per node"))
    price = _find_price(overrides, gpu)
    if price is not None and not {"price_per_gpu_hour", "price_per_node_hour"} & {*keeps}:
        update |= {"price_per_gpu_hour": price, "currency": overrides.currency}
        given.append(UserValue(name="price", value=format_price(price, overrides.currency, "GPU")))
    return hardware.model_copy(update={**update, "user_values": tuple(given)}) if given else hardware


def _describe_gpu(overrides: HardwareOverrides, hardware: Hardware) -> Iterator[UserValue]:
    key = None if hardware.gpu is None else _match(overrides, hardware.gpu.title)
    if key is None:
        return
    entry = overrides.gpus[key]
    names = {"interconnect": "link", "tflops": "TFLOPS", "memory_gb_per_second": "memory GB/s"}
    names |= {"interconnect_gb_per_second": "link GB/s", "compute_capability": "compute capability"}
    values = [f"{names[name]} {value}" for name in names if (value := getattr(entry, name)) is not None]
    if values:
        what = "" if _lookup_known(key) in GPUS.values() else "not in the catalogue; "
        yield UserValue(name="GPU", value=f"{key}: {what}{', '.join(values)}")


def _limit_free(limit_gib: float, hardware: Hardware) -> tuple[int, str]:
    """Return the lower of the user's limit and the memory that is free now, and its description."""
    limit, now = int(limit_gib * 1024), int(bytes_to_gib(hardware.free_vram_bytes) * 1024)
    usable = max(1, min(limit, now))
    return usable, f"at most {limit_gib:g} GiB of {bytes_to_gib(mib_to_bytes(now)):.1f} GiB free now"


def _find_price(overrides: HardwareOverrides, gpu: Gpu | None) -> float | None:
    if gpu is None:
        return None
    key = _match(overrides, gpu.title)
    price = None if key is None else overrides.gpus[key].price_per_gpu_hour
    return overrides.price_per_gpu_hour if price is None else price
