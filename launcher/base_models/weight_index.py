"""Names and sizes of a base model's weights, read from the headers of its safetensors files without loading them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from launcher.base_models.families import Linear
from launcher.core.units import mib_to_bytes

_INDEX = "model.safetensors.index.json"
_MAX_HEADER_MIB = 100  # safetensors' own limit
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})  # others are packed, so their sizes are not those of the layers
_LAYER_TENSOR = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")
_OTHER_TOWER = re.compile(r"(^|\.)(vision|visual|audio|speech|multi_modal)")
_NORM = re.compile(r"norm|(^|[._])ln(_|$)")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|embed_in|embed_out|lm_head|wte)\.weight$")

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightIndex:
    """The linear layers of a decoder layer, and parameter counts."""

    linears: tuple[Linear, ...]  # of all layers together, in the order of the first
    is_uniform: bool  # all layers have the same
    num_layers: int
    layer_parameters: int  # of all decoder layers
    other_parameters: int  # outside decoder layers, embeddings and head
    frozen_parameters: int  # among them, of a vision tower


def load_weight_index(folder: Path) -> WeightIndex | None:
    """Return the layers and sizes of the weights in a folder; None if they are incomplete or unreadable."""
    try:
        shapes, is_complete = _load_shapes(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # loading the model reports broken files
    return make_weight_index(shapes) if shapes and is_complete else None


def list_indexed_names(folder: Path) -> tuple[str, ...]:
    """Return the names of linear layers from a weight index, for weights that are not all downloaded.

    Without sizes, norms are recognized by their names.
    """
    try:
        names = _load_weight_map(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ()
    paths = [match[2] for name in names if not _OTHER_TOWER.search(name) and (match := _LAYER_TENSOR.search(name))]
    modules = (path.removesuffix(".weight") for path in paths if path.endswith(".weight") and ".experts." not in path)
    return tuple(dict.fromkeys(path.rpartition(".")[2] for path in modules if not _NORM.search(path)))


def _load_weight_map(folder: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
    return weight_map


def _load_shapes(folder: Path) -> tuple[dict[str, Shape], bool]:
    """Return the tensor shapes in a folder, and whether the shapes of all decoder layers are known.

    If files are not downloaded, a layer's tensors have the shapes that they have in another layer.
    """
    indexed = _load_weight_map(folder) if (folder / _INDEX).is_file() else {}
    shapes: dict[str, Shape] = {}
    for file in sorted(set(indexed.values())) or ["model.safetensors"]:
        if (folder / file).is_file():
            shapes |= _load_header(folder / file)
    by_path = {match[2]: shape for name, shape in shapes.items() if (match := _LAYER_TENSOR.search(name))}
    absent = {name: match[2] for name in indexed if name not in shapes and (match := _LAYER_TENSOR.search(name))}
    inferred = {name: by_path[path] for name, path in absent.items() if path in by_path}
    return shapes | inferred, inferred.keys() == absent.keys()


def _load_header(file: Path) -> dict[str, Shape]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > mib_to_bytes(_MAX_HEADER_MIB):
            raise ValueError("not a safetensors file")
        header = json.loads(stream.read(length))
    tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    if any(tensor["dtype"] not in _FLOATS for tensor in tensors.values()):
        raise ValueError("the weights are quantized")
    return {name: tuple(tensor["shape"]) for name, tensor in tensors.items()}


def make_weight_index(shapes: Mapping[str, Shape]) -> WeightIndex:
    """Return the linear layers and parameter counts derived from the shapes of tensors by name."""
    layers: dict[int, dict[str, Shape]] = {}
    others: dict[str, int] = {}
    towers = {name for name in shapes if _OTHER_TOWER.search(name)}
    for name, shape in shapes.items():
        match = None if name in towers else _LAYER_TENSOR.search(name)
        if match:
            layers.setdefault(int(match[1]), {})[match[2]] = shape
        elif not _EMBEDDING.search(name) or name in towers:
            others[name] = prod(shape)
    linears = {number: _find_linears(tensors) for number, tensors in sorted(layers.items())}
    united = {path: linear for found in reversed(linears.values()) for path, linear in found.items()}
    first = {path: index for index, path in enumerate(linears.get(0, {}))}
    return WeightIndex(
        linears=tuple(united[path] for path in sorted(united, key=lambda path: (first.get(path, len(first)), path))),
        is_uniform=all(found == linears.get(0) for found in linears.values()),
        num_layers=len(layers),
        layer_parameters=sum(prod(shape) for tensors in layers.values() for shape in tensors.values()),
        other_parameters=sum(others.values()),
        frozen_parameters=sum(others[name] for name in towers),
    )


def _find_linears(tensors: Mapping[str, Shape]) -> dict[str, Linear]:
    """Return the linear layers of a decoder layer by path; experts and routers are not linear modules."""
    paths = {name.removesuffix(".weight"): shape for name, shape in tensors.items() if name.endswith(".weight")}
    has_experts = any(".experts." in path for path in paths)
    return {
        path: Linear(
            name=path.rpartition(".")[2],
            in_features=shape[1],
            out_features=shape[0],
            has_bias=f"{path}.bias" in tensors,
        )
        for path, shape in paths.items()
        if len(shape) == 2 and ".experts." not in path and not (has_experts and path.endswith((".gate", ".router")))
    }
