"""Unknown keys of a tree, found against the manifest's types, each with the key that was probably meant."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Union, get_args, get_origin

from pydantic import BaseModel

from launcher.manifest.base import CommonNames, Open
from launcher.manifest.reading import Json
from launcher.manifest.spelling import closest, closest_slip, is_swap

_RELEASE_NAME = re.compile(r"^(checkpoint-\d+|final)$")

# What other trainers call it: too far for a slip, and clearly meant.
SYNONYMS = {
    "per_device_train_batch_size": "batch_size",
    "lr": "learning_rate",
    "num_train_epochs": "epochs",
    "lora_r": "rank",
    "r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "max_length": "max_seq_length",
    "model_max_length": "max_seq_length",
    "cutoff_len": "max_seq_length",
    "lr_scheduler_type": "lr_scheduler",
    "eval_strategy": "evaluation_strategy",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class UnknownKey:
    path: str  # of the object that holds it; "" at the top
    key: str
    meant: str | None


def find_unknown_keys(tree: dict[str, Json], model: type[BaseModel]) -> Iterator[UnknownKey]:
    """One by one, so that whoever has seen enough can stop: a suggestion takes time."""
    return _visit(tree, model, "")


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _visit(node: Json, annotation: object, path: str) -> Iterator[UnknownKey]:
    for alternative, common in _alternatives(annotation):
        if isinstance(node, dict) and isinstance(alternative, type) and issubclass(alternative, BaseModel):
            yield from _visit_object(node, alternative, path)
        elif isinstance(node, dict) and get_origin(alternative) is dict:
            yield from _visit_map(node, get_args(alternative)[1], common, path)
        elif isinstance(node, list) and get_origin(alternative) is tuple:
            for position, item in enumerate(node):
                yield from _visit(item, get_args(alternative)[0], f"{path}[{position}]")


def _visit_object(node: dict[str, Json], model: type[BaseModel], path: str) -> Iterator[UnknownKey]:
    fields = model.model_fields
    for key, value in node.items():
        if key in fields:
            field = fields[key]
            annotation = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
            yield from _visit(value, annotation, join(path, key))
            continue
        if not issubclass(model, Open):
            synonym = SYNONYMS.get(key)
            yield UnknownKey(path=path, key=key, meant=synonym if synonym in fields else closest(key, fields))
        elif (slip := closest_slip(key, fields)) is not None:
            yield UnknownKey(path=path, key=key, meant=slip)


def _visit_map(node: dict[str, Json], value_type: object, common: tuple[str, ...], path: str) -> Iterator[UnknownKey]:
    for key, value in node.items():
        swapped = next((name for name in common if is_swap(key, name)), None)
        if swapped is not None and key not in common and not _RELEASE_NAME.match(key):
            yield UnknownKey(path=path, key=key, meant=swapped)
        yield from _visit(value, value_type, join(path, key))


def _alternatives(annotation: object) -> Iterator[tuple[object, tuple[str, ...]]]:
    """The members of a union, without `Annotated`, each with the common names that the annotation carries."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extras = get_args(annotation)
        common = tuple(name for extra in extras if isinstance(extra, CommonNames) for name in extra.names)
        for member, below in _alternatives(inner):
            yield member, common + below
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _alternatives(member)
    else:
        yield annotation, ()
