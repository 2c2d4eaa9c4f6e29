"""Unknown keys of a JSON tree, each with a suggestion of the intended key."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel

from launcher.manifest.parse_json import Json
from launcher.manifest.strict_model import Open
from launcher.manifest.suggest import find_closest, find_typo

# Names in other trainers that are too different for a suggestion by edit distance.
SYNONYMS = {
    "per_device_train_batch_size": "batch_size",
    "lr": "learning_rate",
    "train_batch_size": "batch_size",
    "micro_batch_size": "batch_size",
    "bs": "batch_size",
    "grad_accum": "gradient_accumulation_steps",
    "gradient_accumulation": "gradient_accumulation_steps",
    "epoch": "epochs",
    "adapter": "adapter_type",
    "wd": "weight_decay",
    "warmup": "warmup_ratio",
    "scheduler": "lr_scheduler",
    "optimizer": "optim",
    "max_seq_len": "max_seq_length",
    "seq_len": "max_seq_length",
    "seq_length": "max_seq_length",
    "sequence_length": "max_seq_length",
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


class UnknownKey(NamedTuple):
    """A key that the model does not have."""

    path: str  # of the enclosing object; "" at the top level
    key: str
    suggestion: str | None


def find_unknown_keys(node: Json, annotation: object, path: str = "") -> Iterator[UnknownKey]:
    """Yield the unknown keys of a tree lazily, because suggestions take time."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from find_unknown_keys(node, get_args(annotation)[0], path)
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from find_unknown_keys(node, member, path)
    elif origin is dict and isinstance(node, dict):
        for key, value in node.items():
            yield from find_unknown_keys(value, get_args(annotation)[1], join_path(path, key))
    elif origin is tuple and isinstance(node, list):
        for position, item in enumerate(node):
            yield from find_unknown_keys(item, get_args(annotation)[0], f"{path}[{position}]")
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel) and isinstance(node, dict):
        yield from _find_in_object(node, annotation, path)


def join_path(path: str, key: str) -> str:
    """Append a key to a dotted path."""
    return f"{path}.{key}" if path else key


def _find_in_object(node: dict[str, Json], model: type[BaseModel], path: str) -> Iterator[UnknownKey]:
    fields = model.model_fields
    for key, value in node.items():
        if key in fields:
            yield from find_unknown_keys(value, fields[key].annotation, join_path(path, key))
        elif not issubclass(model, Open):
            synonym = SYNONYMS.get(key)
            yield UnknownKey(path, key, synonym if synonym in fields else find_closest(key, fields))
        elif (typo := find_typo(key, fields)) is not None:
            yield UnknownKey(path, key, typo)
