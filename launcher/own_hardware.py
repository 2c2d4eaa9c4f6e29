"""What the user knows better than the catalogue and the probe: prices, links, cards, memory that is never free.

One JSON file, hardware.json in the user's folder of settings; LAUNCHER_HARDWARE names another, or switches it off. It
changes the Hardware that a plan is made for, and nothing else; the plan says what it took from it.

    {
      "price_per_gpu_hour": 0.5,
      "network_gb_per_second": 12.5,
      "this_machine": {"free_vram_gib": 20, "cpu_cores": 8, "ram_gib": 48},
      "gpus": {
        "rtx4090": {"price_per_gpu_hour": 0.4, "interconnect": "pcie-p2p", "interconnect_gb_per_second": 25},
        "rtx4070laptop": {"title": "NVIDIA GeForce RTX 4070 Laptop GPU", "memory_mib": 8188, "tflops": 30,
                          "memory_gb_per_second": 256, "compute_capability": "8.9"}
      }
    }
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from launcher.errors import InputError, Problem
from launcher.gpus import GPUS, find_gpu, is_same_card
from launcher.hardware import GivenValue, Gpu, GpuClass, Hardware, Interconnect
from launcher.manifest.base import Strict
from launcher.manifest.problems import find_problems
from launcher.manifest.reading import Json
from launcher.units import MIB, bytes_to_gib, mib_to_bytes

HARDWARE_VARIABLE = "LAUNCHER_HARDWARE"
_OFF = ("off", "0", "none", "no")
_MAX_BYTES = MIB
_NEEDED = ("memory_mib", "tflops", "memory_gb_per_second", "compute_capability")  # of a card that nobody knows

Price = Annotated[float, Field(ge=0, le=1e6)]
Bandwidth = Annotated[float, Field(gt=0, le=1e6)]


class OwnGpu(Strict):
    """A card of the catalogue, corrected; or one that it does not have."""

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
    """Only of the machine that is looked at, not of one from the catalogue."""

    free_vram_gib: Annotated[float, Field(gt=0, le=1e5)] | None = None  # at most so much, whatever is free
    cpu_cores: Annotated[int, Field(ge=1, le=4096)] | None = None
    ram_gib: Annotated[float, Field(ge=1, le=65536)] | None = None


class OwnHardware(Strict):
    schema_version: Literal[1] = 1
    price_per_gpu_hour: Price | None = None  # of cards that have none of their own
    network_gb_per_second: Bandwidth | None = None  # of a node, in one direction
    this_machine: ThisMachine = ThisMachine()
    gpus: dict[str, OwnGpu] = Field(default_factory=dict)


def find_hardware_file() -> Path | None:
    """None: switched off."""
    configured = os.environ.get(HARDWARE_VARIABLE, "")
    if configured.lower() in _OFF:
        return None
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "expert-launcher" / "hardware.json"


def load_own_hardware() -> OwnHardware:
    """Nothing where there is no file; a file with a mistake in it stops every plan, with all its mistakes."""
    file = find_hardware_file()
    if file is None or (not os.environ.get(HARDWARE_VARIABLE) and not file.exists()):
        return OwnHardware()
    tree = _read(file)
    problems = find_problems(tree, OwnHardware)
    if not problems:
        own = OwnHardware.model_validate_json(json.dumps(tree))
        problems = list(_find_incomplete(own))
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise _refuse(f"{file}: {count}", tuple(problems))
    return own


def _read(file: Path) -> dict[str, Json]:
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise _refuse(f"{file}: larger than 1 MiB: this is no description of hardware")
        tree = json.loads(file.read_text(encoding="utf-8-sig"), object_pairs_hook=lambda pairs: _once(file, pairs))
    except OSError as error:
        raise _refuse(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise _refuse(f"{file}: not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _refuse(f"{file}, line {error.lineno}, column {error.colno}: broken JSON: {error.msg}") from None
    except RecursionError:
        raise _refuse(f"{file}: nested too deeply") from None
    if not isinstance(tree, dict):
        raise _refuse(f"{file}: holds no object {{...}}")
    return _without_comments(tree)


def _once(file: Path, pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    counts = Counter(key for key, _ in pairs)
    twice = [key for key, count in counts.items() if count > 1 and not key.startswith("_")]
    if twice:
        raise _refuse(f"{file}: the key {twice[0]!r} stands twice in one object")
    return dict(pairs)


def _without_comments(tree: dict[str, Json]) -> dict[str, Json]:
    return {
        key: _without_comments(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if not key.startswith("_")
    }


def _refuse(title: str, problems: tuple[Problem, ...] = ()) -> InputError:
    return InputError(
        title, problems, hint=f"docs/CLI.md has an example; {HARDWARE_VARIABLE}=off plans without the file"
    )


def _find_incomplete(own: OwnHardware) -> Iterator[Problem]:
    """A card that the catalogue does not know must bring what a plan cannot do without."""
    for key, card in own.gpus.items():
        if _find_known(key) is None:
            missing = [name for name in _NEEDED if getattr(card, name) is None]
            if missing:
                what = f"no card of the catalogue, so it needs {', '.join(missing)}"
                yield Problem(where=f"gpus.{key}", what=what)


def _find_known(name: str) -> Gpu | None:
    try:
        return find_gpu(name)
    except InputError:
        return None


def find_named_gpu(own: OwnHardware, name: str) -> Gpu:
    """--gpu NAME: one of the user's, or of the catalogue, with the user's corrections."""
    key = _match(own, name)
    if key is None:
        return find_gpu(name)
    return _correct(_find_known(key) or _make_card(key, own.gpus[key]), own.gpus[key])


def _match(own: OwnHardware, name: str) -> str | None:
    for key, card in own.gpus.items():
        known = _find_known(key)
        titles = [key, *([card.title] if card.title else []), *([known.title, known.key] if known else [])]
        if any(is_same_card(name, title) for title in titles):
            return key
    named = _find_known(name)
    return next((key for key in own.gpus if named is not None and _find_known(key) == named), None)


def _make_card(key: str, card: OwnGpu) -> Gpu:
    assert card.memory_mib is not None, "the file was checked"
    assert card.memory_gb_per_second is not None
    return Gpu(
        key=key,
        title=card.title or key,
        memory_mib=card.memory_mib,
        bf16_tflops=None,
        fp16_tflops=card.tflops,
        memory_gb_per_second=card.memory_gb_per_second,
        compute_capability=(0, 0),
        interconnect="pcie-host",
        interconnect_gb_per_second=16.0,
        gpu_class="consumer",
    )


def _correct(gpu: Gpu, card: OwnGpu) -> Gpu:
    same = ("title", "memory_mib", "memory_gb_per_second", "interconnect", "interconnect_gb_per_second", "gpu_class")
    update: dict[str, object] = {name: value for name in same if (value := getattr(card, name)) is not None}
    if card.compute_capability is not None:
        major, _, minor = card.compute_capability.partition(".")
        update["compute_capability"] = (int(major), int(minor))
    changed = gpu.model_copy(update=update)
    if card.tflops is None:
        return changed
    return changed.model_copy(
        update={"fp16_tflops": card.tflops, "bf16_tflops": card.tflops if changed.has_bf16 else None}
    )


def apply_own_hardware(own: OwnHardware, hardware: Hardware, *, keeps: tuple[str, ...] = ()) -> Hardware:
    """The machine as the user knows it. `keeps` are values that the command line gave: they win over the file."""
    here, update = hardware.source == "probe", dict[str, object]()
    given = [*_describe_card(own, hardware)]
    gpu = hardware.gpu
    if gpu is not None and here:
        key = _match(own, gpu.title)
        if key is not None:
            # What the driver says of its memory stays: the file may be about another size of it.
            gpu = _correct(gpu, own.gpus[key].model_copy(update={"memory_mib": None, "title": None}))
            update["gpu"] = gpu
        if own.this_machine.free_vram_gib is not None:
            update["free_vram_mib"], value = _limit_free(own.this_machine.free_vram_gib, hardware)
            given.append(GivenValue(name="free VRAM", value=value))
    machine = own.this_machine
    if here and machine.cpu_cores is not None and "cpu_cores_per_node" not in keeps:
        update["cpu_cores_per_node"] = machine.cpu_cores
        given.append(GivenValue(name="CPU cores", value=str(machine.cpu_cores)))
    if here and machine.ram_gib is not None and "ram_gib_per_node" not in keeps:
        update["ram_gib_per_node"] = machine.ram_gib
        given.append(GivenValue(name="CPU memory", value=f"{machine.ram_gib:g} GiB"))
    if own.network_gb_per_second is not None and hardware.nodes > 1:
        update["network_gb_per_second"] = own.network_gb_per_second
        given.append(GivenValue(name="network", value=f"{own.network_gb_per_second:g} GB/s a node"))
    price = _find_price(own, gpu)
    if price is not None and "price_per_gpu_hour" not in keeps:
        update["price_per_gpu_hour"] = price
        given.append(GivenValue(name="price", value=f"{price:g} per GPU and hour"))
    return hardware.model_copy(update={**update, "given": tuple(given)}) if given else hardware


def _describe_card(own: OwnHardware, hardware: Hardware) -> Iterator[GivenValue]:
    key = None if hardware.gpu is None else _match(own, hardware.gpu.title)
    if key is None:
        return
    card = own.gpus[key]
    names = {"interconnect": "link", "tflops": "TFLOPS", "memory_gb_per_second": "memory GB/s"}
    names |= {"interconnect_gb_per_second": "link GB/s", "compute_capability": "compute capability"}
    told = [f"{names[name]} {value}" for name in names if (value := getattr(card, name)) is not None]
    if told:
        what = "" if _find_known(key) in GPUS.values() else "not in the catalogue; "
        yield GivenValue(name="GPU", value=f"{key}: {what}{', '.join(told)}")


def _limit_free(limit_gib: float, hardware: Hardware) -> tuple[int, str]:
    """At most so much; what others hold now is not free, whatever the file says."""
    wanted, now = int(limit_gib * 1024), int(bytes_to_gib(hardware.free_vram_bytes) * 1024)
    least = max(1, min(wanted, now))
    return least, f"at most {limit_gib:g} GiB of {bytes_to_gib(mib_to_bytes(now)):.1f} GiB that are free now"


def _find_price(own: OwnHardware, gpu: Gpu | None) -> float | None:
    if gpu is None:
        return None
    key = _match(own, gpu.title)
    price = None if key is None else own.gpus[key].price_per_gpu_hour
    return own.price_per_gpu_hour if price is None else price
