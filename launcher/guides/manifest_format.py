"""docs/EXPERT_FORMAT.md: every key of a manifest, from its types and the texts below them."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from launcher.manifest.base import OneOf, Open
from launcher.manifest.described import describe_fields, find_models
from launcher.manifest.model import Manifest
from launcher.manifest.unused import NOT_USED

# Absent, these are decided by the plan, which says why.
PLANNED = frozenset(
    {
        *(
            f"training.config.{key}"
            for key in (
                "bf16",
                "fp16",
                "use_tf32",
                "attention",
                "flash_attention_2",
                "use_sdpa",
                "optim",
                "gradient_checkpointing",
                "torch_compile",
                "torch_compile_backend",
                "torch_compile_mode",
                "dataloader_num_workers",
                "dataloader_prefetch_factor",
                "dataloader_pin_memory",
                "dataloader_persistent_workers",
                "strategy",
                "offload",
                "eval_batch_size",
                "evaluation_strategy",
                "save_strategy",
                "load_best_model_at_end",
            )
        ),
        "evaluation.task_rows",
    }
)
_GENERATION = "training.decoding"  # not used by training, but by all who ask the expert
_SHOWN_BOUND = 10_000  # larger ones only keep slips of the keyboard out
_WORDS: dict[object, str] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    type(None): "null",
}
_HEAD = """# The manifest, key by key

Made from the types in `launcher/manifest/` by `python -m launcher.guides`; `make check` holds it. [The training
guide](TRAINING_GUIDE.md) begins with a small manifest; `launcher schema` prints the same as JSON Schema, which editors
complete from (`"$schema": "../manifest.schema.json"`); `launcher validate EXPERT` checks one and lists the keys in it
that are not used. Any value is overridden for one run by `--set training.config.learning_rate=1e-4`.

- **you**: the manifest's word counts. Where the key is absent, its default is what the trainer of the published
  manifests did, so that old files mean what they meant.
- **the plan**: absent means *decide for me*; `launcher plan` shows what was decided and why. Given, it is obeyed, or
  refused with the way out; never repaired.
- **nobody**: known, because published manifests have it, and not used by training, with the reason.

A key that nobody knows is an error with a suggestion. Keys that begin with `_` are comments. Schema 1.0 has one
`base_model` and its `adapters` at the top in place of `base_models`; it is read as the same. Bounds that no training
reaches are left out.
"""

_UNREAD = """## Objects that training does not read

Checked all the same: a misspelt key in them is told.

| object | keys |
|---|---|"""


def render_manifest_format() -> str:
    return "\n".join([_HEAD, *_render_sections(Manifest, ""), _UNREAD, *_render_unread(Manifest, ""), ""])


def _render_sections(model: type[BaseModel], path: str) -> Iterator[str]:
    """The keys of an object, then the objects inside it that training reads."""
    yield f"## {f'`{path}`' if path else 'The top'}\n"
    if issubclass(model, Open):
        yield "Further keys are welcome.\n"
    texts = describe_fields(model)
    rows = (_render_row(path, name, field, texts.get(name)) for name, field in model.model_fields.items())
    yield "\n".join(["| key | type | default | who decides | effect |", "|---|---|---|---|---|", *rows, ""])
    for name, field in model.model_fields.items():
        here = _join(path, name)
        if here not in NOT_USED or here == _GENERATION:
            for inner in find_models(field.annotation):
                yield from _render_sections(inner, here)


def _render_unread(model: type[BaseModel], path: str, is_unread: bool = False) -> Iterator[str]:
    """A line for each object inside one that is listed in NOT_USED."""
    if is_unread:
        keys = (f"`{name}` {_render_type(field)}" for name, field in model.model_fields.items())
        yield f"| `{path}` | {' · '.join(keys)}{' · any other' if issubclass(model, Open) else ''} |"
    for name, field in model.model_fields.items():
        here = _join(path, name)
        for inner in find_models(field.annotation):
            if here != _GENERATION:
                yield from _render_unread(inner, here, is_unread or here in NOT_USED)


def _render_row(path: str, name: str, field: FieldInfo, text: str | None) -> str:
    here = _join(path, name)
    effect = text or NOT_USED.get(here) or _inherited(here)
    cells = (f"`{name}`", _render_type(field), _render_default(field), _render_owner(here, field, effect), effect)
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _inherited(path: str) -> str:
    """Of a section that is told as a whole."""
    above = path
    while "." in above:
        above = above.rpartition(".")[0]
        if above in NOT_USED:
            return NOT_USED[above]
    return ""


def _render_owner(path: str, field: FieldInfo, text: str) -> str:
    if text.startswith("Not used"):
        return "nobody"
    if path.startswith(_GENERATION):
        return "you"
    if path in NOT_USED or _inherited(path):
        return "nobody"
    if path in PLANNED:
        return "the plan"
    return "you, required" if field.is_required() else "you"


def _render_default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    default = field.default
    if default is None or default == () or isinstance(default, BaseModel):
        return "absent"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def _render_type(field: FieldInfo) -> str:
    annotation = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    words = list(dict.fromkeys(_words(annotation)))
    if {"text", "number", "true or false", "null"} <= set(words):
        return "text, number, true, false or null"
    if "null" in words and field.default is None:  # the same as absent
        words.remove("null")
    return " or ".join(words)


def _words(annotation: Any, extras: tuple[Any, ...] = ()) -> Iterator[str]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner, *found = arguments
        yield from _words(inner, (*_unfold(found), *extras))
    elif origin in (Union, types.UnionType):
        for member in arguments:
            yield from _words(member, extras)
    elif origin is Literal:
        choice = next((extra for extra in extras if isinstance(extra, OneOf)), None)
        yield ", ".join(f"`{value}`" for value in (choice.supported if choice else arguments))
    elif origin is tuple:
        yield f"list of {' or '.join(_words(arguments[0]))}"
    elif origin is dict:
        values = set(_words(arguments[1]))
        yield f"object: name → {'object' if values == {'object'} else 'a value'}"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "object"
    else:
        yield _WORDS[annotation] + "".join(_bounds(extras))


def _unfold(extras: list[Any]) -> Iterator[Any]:
    for extra in extras:
        yield from extra.metadata if isinstance(extra, FieldInfo) else (extra,)


def _bounds(extras: tuple[Any, ...]) -> Iterator[str]:
    for extra in extras:
        match extra:
            case Ge(ge=bound):
                yield f" ≥ {bound}"
            case Gt(gt=bound):
                yield f" > {bound}"
            case Le(le=bound) if isinstance(bound, int | float) and bound <= _SHOWN_BOUND:
                yield f", ≤ {bound:g}"
            case Lt(lt=bound) if isinstance(bound, int | float) and bound <= _SHOWN_BOUND:
                yield f", < {bound:g}"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
