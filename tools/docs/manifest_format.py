"""docs/EXPERT_FORMAT.md: every key of a manifest, from the types and their field docstrings."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from launcher.manifest.ignored_keys import WITHOUT_EFFECT
from launcher.manifest.json_schema import describe_fields
from launcher.manifest.model import Manifest
from launcher.manifest.strict_model import Open, find_models, is_ignored

# Decided by the plan if absent.
PLANNED = frozenset(
    {
        *(
            f"training.config.{key}"
            for key in (
                "precision",
                "bf16",
                "fp16",
                "use_tf32",
                "attention",
                "flash_attention_2",
                "use_sdpa",
                "optim",
                "bf16_stochastic_round",
                "optimizer_in_bwd",
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
_SHOWN_BOUND = 10_000  # larger bounds only catch typing errors
_TYPE_NAMES: dict[object, str] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    type(None): "null",
}
_HEADER = """# Manifest reference

Generated from the types in `launcher/manifest/` by `python -m tools.docs`; `make check` verifies it. [The training
guide](TRAINING_GUIDE.md) starts with a small manifest. `launcher schema` prints the JSON Schema, which editors use for
completion (`"$schema": "../manifest.schema.json"`). `launcher validate EXPERT` checks a manifest and lists its unused
keys. `--set training.config.learning_rate=1e-4` overrides a value for one run.

- **you**: the value of the manifest is used. The default is that of the trainer of the published manifests, so that old
  files keep their meaning.
- **the plan**: if absent, the plan decides; `launcher plan` shows the decision and its reason. If given, the value is
  used, or refused with a hint; it is never changed silently.

An unknown key is an error with a suggestion. Keys that start with `_` are comments. Schema 1.0 has one `base_model` and
its `adapters` at the top level instead of `base_models`; it is read the same way. Bounds that no training reaches are
not shown.
"""

_IGNORED = """## Keys without effect

Published manifests have these keys, so they are accepted, with any JSON value. `launcher validate` lists
those in a file.

| keys | reason |
|---|---|"""


def render_manifest_format() -> str:
    """Return the page as Markdown."""
    ignored = (f"| {', '.join(f'`{key}`' for key in keys)} | {reason} |" for reason, keys in WITHOUT_EFFECT.items())
    return "\n".join([_HEADER, *_render_sections(Manifest, ""), _IGNORED, *ignored, ""])


def _render_sections(model: type[BaseModel], path: str) -> Iterator[str]:
    """Yield the table of an object's keys, then the tables of its nested objects."""
    yield f"## {f'`{path}`' if path else 'Top level'}\n"
    if issubclass(model, Open):
        yield "Additional keys are allowed.\n"
    texts = describe_fields(model)
    fields = {name: field for name, field in model.model_fields.items() if not is_ignored(field.annotation)}
    rows = (_render_row(_join(path, name), name, field, texts[name]) for name, field in fields.items())
    yield "\n".join(["| key | type | default | decided by | effect |", "|---|---|---|---|---|", *rows, ""])
    for name, field in fields.items():
        for inner in find_models(field.annotation):
            yield from _render_sections(inner, _join(path, name))


def _render_row(path: str, name: str, field: FieldInfo, effect: str) -> str:
    owner = "the plan" if path in PLANNED else "you, required" if field.is_required() else "you"
    cells = (f"`{name}`", _render_type(field), _render_default(field), owner, effect)
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


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
    names = list(dict.fromkeys(_describe_type(annotation)))
    if "null" in names and field.default is None:  # equivalent to absent
        names.remove("null")
    return " or ".join(names)


def _describe_type(annotation: Any, extras: tuple[Any, ...] = ()) -> Iterator[str]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner, *metadata = arguments
        yield from _describe_type(inner, (*_unfold(metadata), *extras))
    elif origin in (Union, types.UnionType):
        for member in arguments:
            yield from _describe_type(member, extras)
    elif origin is Literal:
        yield ", ".join(f"`{value}`" for value in arguments)
    elif origin is tuple:
        yield f"list of {' or '.join(_describe_type(arguments[0]))}"
    elif origin is dict:
        yield f"object: name → {' or '.join(_describe_type(arguments[1]))}"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "object"
    else:
        yield _TYPE_NAMES[annotation] + "".join(_bounds(extras))


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
