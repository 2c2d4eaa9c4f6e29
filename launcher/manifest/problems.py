"""Problems of a JSON tree: unknown keys and pydantic's validation errors, as messages for users."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from launcher.core.errors import Problem
from launcher.manifest.parse_json import Json, shorten
from launcher.manifest.strict_model import find_models
from launcher.manifest.suggest import find_closest

MAX_REPORTED = 20  # of each kind; a file with more problems is probably no manifest
_MAX_PATH_LENGTH = 100

_TYPE_NAMES: Mapping[str, str] = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "finite_number": "a finite number",
    "none_required": "null",
}
_BOUNDS: Mapping[str, tuple[str, str]] = {  # error -> key of its context, text
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
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
    "lora_rank": "rank",
    "lora_target": "target_modules",
    "lora_target_modules": "target_modules",
    "finetuning_type": "adapter_type",
    "sample_packing": "packing",
    "attn_implementation": "attention",
    "sequence_len": "max_seq_length",
    "block_size": "max_seq_length",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "max_length": "max_seq_length",
    "model_max_length": "max_seq_length",
    "cutoff_len": "max_seq_length",
    "lr_scheduler_type": "lr_scheduler",
    "eval_strategy": "evaluation_strategy",
}


# Values of other trainers, and what to write instead.
_VALUES = {
    "qlora": "QLoRA is lora with base_models.0.quantization int4",
    **dict.fromkeys(("4bit", "4-bit", "nf4", "bnb_4bit", "q4"), "did you mean int4?"),
    **dict.fromkeys(("8bit", "8-bit"), "write int4, since 8 bits are not supported"),
    "bfloat16": "did you mean bf16?",
    "float16": "did you mean fp16?",
}


# Names of columns in other trainers, which are keys of field_mapping here.
_ROLES = {
    **dict.fromkeys(("prompt", "question", "query", "user"), "instruction"),
    **dict.fromkeys(("completion", "answer", "target", "label", "assistant"), "response"),
    **dict.fromkeys(("context", "schema"), "input"),
    **dict.fromkeys(("conversations", "chat"), "messages"),
}


def find_problems(
    tree: dict[str, Json],
    model: type[BaseModel],
    extra_keys: tuple[str, ...] = (),
    without_nulls: dict[str, Json] | None = None,
) -> list[Problem]:
    """Return all problems of a tree.

    `extra_keys` are further suggestions for unknown top-level keys. `without_nulls` is the tree whose values are
    checked: it lacks keys that overrides set to null, which must still be known keys.
    """
    unknown = [error for error in _validate(tree, model) if error["type"] == "extra_forbidden"]
    problems, misspelled = [], set()
    for error in unknown[:MAX_REPORTED]:  # suggestions take time
        problem, meant = _describe_unknown_key(error, tree, model, extra_keys)
        problems.append(problem)
        misspelled.add(meant)
    problems += _count_rest(len(unknown), "unknown keys")
    errors = _validate(tree if without_nulls is None else without_nulls, model)
    wrong_values = _list_wrong_values(errors, tree, misspelled)
    problems += wrong_values[:MAX_REPORTED] + _count_rest(len(wrong_values), "wrong values")
    return [Problem(where=shorten(problem.where, _MAX_PATH_LENGTH), what=problem.what) for problem in problems]


def _validate(tree: dict[str, Json], model: type[BaseModel]) -> list[ErrorDetails]:
    try:
        model.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        return error.errors(include_url=False)
    return []


def _count_rest(count: int, kind: str) -> list[Problem]:
    rest = count - MAX_REPORTED
    return [Problem(where="", what=f"and {rest:,} more {kind}")] if rest > 0 else []


def join_path(path: str, key: str) -> str:
    """Append a key to a dotted path."""
    return f"{path}.{key}" if path else key


def _describe_unknown_key(
    error: ErrorDetails, tree: Json, model: type[BaseModel], extra_keys: tuple[str, ...]
) -> tuple[Problem, str]:
    """Return the problem of an unknown key, and the path of the key in the same object that is probably meant."""
    *above, key = error["loc"]
    key, path = str(key), _get_path(error, tree)
    fields = _find_object(model, above).model_fields
    synonym = SYNONYMS.get(key, key)
    if {"instruction", "response"} <= fields.keys() and key not in fields:
        synonym = _ROLES.get(key, synonym)
    meant = synonym if synonym in fields else find_closest(key, fields)
    suggestion = find_closest(key, (*extra_keys, *fields)) if extra_keys and not above else None
    suggestion = suggestion or meant or _find_in_sections(synonym, model)
    what = f"unknown key; did you mean {suggestion}?" if suggestion else "unknown key"
    return Problem(where=path, what=what), path.removesuffix(key) + (meant or key)


def _find_object(model: type[BaseModel], location: Iterable[int | str]) -> type[BaseModel]:
    """Return the Pydantic model at the `loc` of a validation error, skipping list positions, map keys and unions."""
    for part in location:
        field = model.model_fields.get(str(part))
        model = next(find_models(field.annotation), model) if field is not None else model
    return model


def find_key(name: str, model: type[BaseModel]) -> str | None:
    """Return the dotted path of the key that a name means: its own name, another trainer's name, or a misspelling."""
    paths, meant = _list_key_paths(model), SYNONYMS.get(name, name)
    key = meant if meant in paths else find_closest(meant, paths)
    return None if key is None else paths[key]


def is_switch(path: str, model: type[BaseModel]) -> bool:
    """Whether the value of the key with this dotted path is true or false."""
    *above, key = path.split(".")
    field = _find_object(model, above).model_fields.get(key)
    types = () if field is None else get_args(field.annotation) or (field.annotation,)
    return bool in types and set(types) <= {bool, type(None)}


def _find_in_sections(key: str, model: type[BaseModel]) -> str | None:
    """Return the path of a key that is in the wrong section: `learning_rate` belongs in training.config."""
    path = _list_key_paths(model).get(key)
    return path if path is not None and "." in path else None


def _list_key_paths(model: type[BaseModel], path: str = "") -> dict[str, str]:
    """Return the dotted path of each key in a model and its sections by name; of equal names, the outermost."""
    paths = {name: join_path(path, name) for name in model.model_fields}
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            paths = _list_key_paths(section, paths[name]) | paths
    for name, field in model.model_fields.items():
        if get_origin(field.annotation) is tuple:  # a list, such as base_models
            for entry in find_models(field.annotation):
                paths |= {key: f"{paths[name]}.0.{key}" for key in entry.model_fields if key not in paths}
    return paths


class _Complaint(NamedTuple):
    """What is wrong with a value; `expected` and `actual` if its type or range is wrong."""

    message: str
    expected: str = ""
    actual: str = ""


def _list_wrong_values(errors: Iterable[ErrorDetails], tree: Json, misspelled: set[str]) -> list[Problem]:
    """Return the problems of wrong values, one per key path; a misspelled key is not also reported as missing."""
    by_path: dict[str, list[_Complaint]] = {}
    for error in errors:
        if error["type"] == "extra_forbidden":
            continue  # reported as an unknown key
        path = _get_path(error, tree)
        if error["type"] == "missing" and path in misspelled:
            continue
        if error["type"] == "too_short" and error["input"]:
            continue  # pydantic reports this if entries of the list are invalid; these are reported themselves
        if error["type"] == "value_error":
            for line in str(error["ctx"]["error"]).split("\n"):  # from model validators: "key: what is wrong"
                key, _, what = line.partition(": ")
                by_path.setdefault(join_path(path, key), []).append(_Complaint(what))
        else:
            by_path.setdefault(path, []).append(_make_complaint(error))
    return [Problem(where=path, what=_join_complaints(complaints)) for path, complaints in by_path.items()]


def _get_path(error: ErrorDetails, tree: Json) -> str:
    """Return the dotted path of a pydantic error, without names of union members, which are not in the user's file."""
    path, node = "", tree
    for depth, part in enumerate(error["loc"]):
        is_missing = error["type"] == "missing" and depth == len(error["loc"]) - 1
        if isinstance(part, int):
            path += f"[{part}]"
            node = node[part] if isinstance(node, list) and part < len(node) else None
        elif isinstance(node, dict) and (part in node or is_missing):
            path = join_path(path, part)
            node = node.get(part)
    return path


def _make_complaint(error: ErrorDetails) -> _Complaint:
    kind, context = error["type"], error.get("ctx", {})
    value = shorten(json.dumps(error["input"], default=str, ensure_ascii=False))
    if kind in _TYPE_NAMES:
        expected = _TYPE_NAMES[kind]
    elif kind == "literal_error":
        expected = context["expected"]
    elif kind in _BOUNDS:
        name, text = _BOUNDS[kind]
        bound = context[name]
        expected = f"{text} {bound:g}" if abs(bound) < 1000 else f"{text} {bound:,.0f}"
    elif kind == "missing":
        return _Complaint("missing")
    elif kind == "json_invalid":  # the tree cannot be encoded again
        return _Complaint(f"a string is not valid Unicode: {context['error']}")
    elif kind == "string_pattern_mismatch":
        return _Complaint(f"{value} does not match {context['pattern']}")
    elif kind == "too_short":
        return _Complaint(f"needs at least {context['min_length']} entry")
    elif kind == "string_too_short":
        return _Complaint("must not be empty")
    else:
        return _Complaint(f"{error['msg']} (got {value})")
    guess = _guess_value(str(error["input"]), expected) if kind == "literal_error" else ""
    return _Complaint(f"must be {expected}, not {value}{guess}", expected, value)


def _guess_value(text: str, expected: str) -> str:
    """Return what to write instead of a value that is none of the expected ones, with a semicolon; often nothing."""
    allowed = re.findall("'([^']*)'", expected)
    known = _VALUES.get(text.lower())
    if known is not None and any(word in allowed for word in re.findall(r"\w+", known)):
        return f"; {known}"
    closest = find_closest(text, allowed)
    return f"; did you mean {closest}?" if closest else ""


def _join_complaints(complaints: list[_Complaint]) -> str:
    """Join the errors of the members of a union: "must be A or B, not X"."""
    unique = list(dict.fromkeys(complaints))
    if len(unique) > 1 and all(complaint.expected for complaint in unique):
        return f"must be {' or '.join(complaint.expected for complaint in unique)}, not {unique[0].actual}"
    return "; ".join(complaint.message for complaint in unique)
