"""Names and sizes of a base model's weights, read from the headers of its safetensors files without loading them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from launcher.base_models.families import Linear
from launcher.core.units import mib_to_bytes

_INDEX = "model.safetensors.index.json"
_MAX_HEADER_MIB = 100  # safetensors' own limit
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})  # others are packed, so their sizes are not those of the layers
_LAYER_TENSOR = re.compile(r"(^|.*?\.)layers\.(\d+)\.(.+)$")  # path of the decoder, number of the layer, path in it
_OTHER_TOWER = re.compile(r"(^|\.)(vision|visual|audio|speech|multi_modal)")
_NORM = re.compile(r"norm|(^|[._])ln(_|$)")
_EMBEDDING = re.compile(r"(?:^|\.)(embed_tokens|embed_in|wte|tok_embeddings|word_embeddings)\.weight$")
_HEAD = re.compile(r"(?:^|\.)(lm_head|embed_out|output|output_projection)\.weight$")

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightIndex:
    """Linear layers of a decoder layer, parameter counts and embedding names, as found in a base model's weights."""

    linears: tuple[Linear, ...]  # of all layers together, in the order of the first
    is_uniform: bool  # all layers have the same
    num_layers: int
    layer_parameters: int  # of all decoder layers
    other_parameters: int  # outside decoder layers, embeddings and head
    frozen_parameters: int  # among them, of a vision tower
    embeddings: tuple[str, str]  # names of the embeddings and of the LM head
    has_experts: bool = False  # in decoder layers


def load_weight_index(folder: Path) -> WeightIndex | None:
    """Return the layers and sizes of the weights in a folder; None if they are incomplete or unreadable."""
    try:
        shapes, is_complete = _load_shapes(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # loading the model reports broken files
    return make_weight_index(shapes) if shapes and is_complete else None


def list_indexed_names(folder: Path) -> tuple[tuple[str, ...], tuple[str, str]]:
    """Return the names of linear layers, embeddings and LM head in an index file, for weights not all downloaded.

    Without sizes, norms are recognized by their names.
    """
    try:
        names = list(_load_weight_map(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        names = []
    paths = (path for _, path in _select_decoder(names).values())
    modules = (path.removesuffix(".weight") for path in paths if path.endswith(".weight") and ".experts." not in path)
    linears = tuple(dict.fromkeys(path.rpartition(".")[2] for path in modules if not _NORM.search(path)))
    return linears, _find_embeddings(names)


def list_missing_files(folder: Path) -> tuple[str, ...]:
    """Return the weight files that a folder's index lists but the folder lacks; empty if it lacks all of them."""
    try:
        files = sorted({str(file) for file in _load_weight_map(folder).values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ()
    missing = tuple(file for file in files if not (folder / file).is_file())
    return missing if len(missing) < len(files) else ()


def _find_embeddings(names: Iterable[str]) -> tuple[str, str]:
    """Return the module names of the embeddings and of the LM head; a tied head has no tensor."""
    own = [name for name in names if not _OTHER_TOWER.search(name) and not _LAYER_TENSOR.match(name)]
    embeddings, head = (
        next((match[1] for name in own if (match := pattern.search(name))), default)
        for pattern, default in ((_EMBEDDING, "embed_tokens"), (_HEAD, "lm_head"))
    )
    return embeddings, head


def _select_decoder(names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Return the tensors of the decoder with the number of their layer and their path in it.

    A base may have other modules with `layers`: a vision tower, or layers for multi-token prediction, which are fewer.
    """
    decoders: dict[str, dict[str, tuple[int, str]]] = {}
    for name in names:
        if not _OTHER_TOWER.search(name) and (match := _LAYER_TENSOR.match(name)):
            decoders.setdefault(match[1], {})[name] = int(match[2]), match[3]
    return max(decoders.values(), key=lambda found: len({number for number, _ in found.values()}), default={})


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
    layers = _select_decoder([*shapes, *indexed])
    by_path = {layers[name][1]: shape for name, shape in shapes.items() if name in layers}
    absent = {name: layers[name][1] for name in indexed if name not in shapes and name in layers}
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
    decoder = _select_decoder(shapes)
    for name, shape in shapes.items():
        if name in decoder:
            number, path = decoder[name]
            layers.setdefault(number, {})[path] = shape
        elif name in towers or not (_EMBEDDING.search(name) or _HEAD.search(name)):
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
        embeddings=_find_embeddings(shapes),
        has_experts=any(".experts." in name for name in decoder),
    )


def _find_linears(tensors: Mapping[str, Shape]) -> dict[str, Linear]:
    """Return the linear layers of a decoder layer by path; experts, routers and norms are not linear modules."""
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
        if len(shape) == 2
        and ".experts." not in path
        and not _NORM.search(path)
        and not (has_experts and path.endswith((".gate", ".router")))
    }
