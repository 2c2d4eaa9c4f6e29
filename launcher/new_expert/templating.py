"""Which template a base wants, and what stands in for it where its tokenizer is not on this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.bases import TINY_BASE_NAME, last_component
from launcher.corpus.documents import make_template
from launcher.corpus.templates import CHATML, LLAMA3, QWEN3, Template
from launcher.corpus.tokenizer import BaseTokenizer, load_tokenizer
from launcher.errors import InputError
from launcher.shapes import ModelShape

# Templates that write markers, and the families whose tokens these are.
_MARKERS: dict[str, Template] = {"chatml": CHATML, "qwen3": QWEN3, "llama3": LLAMA3}
_MARKED_BY = {"chatml": "Qwen", "qwen3": "Qwen 3", "llama3": "Llama 3"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenTemplate:
    name: str  # for the manifest
    why: str
    shown: Template  # in which rows are shown here
    shown_note: str  # where that is not quite the same
    notes: tuple[str, ...]


def choose_template(base: ModelShape, wanted: str | None, tokenizer: BaseTokenizer) -> ChosenTemplate:
    own, own_why = _find_own(base)
    name, why = (own, own_why) if wanted is None else (wanted, "as given")
    is_here = base.name == TINY_BASE_NAME or not is_embedded(tokenizer)
    shown = _check_template(name, base, tokenizer) if is_here else _MARKERS.get(name)
    if shown is not None:
        shown_note = ""
    elif name == "alpaca":
        shown, shown_note = make_template(name, tokenizer), f"ends as the tiny base does: {_not_here(base)}"
    else:
        shown, shown_note = CHATML, f"shown in chatml: {_not_here(base)}, and with it its chat template"
    return ChosenTemplate(
        name=name, why=why, shown=shown, shown_note=shown_note, notes=tuple(_note_family(base, name, own, is_here))
    )


def is_embedded(tokenizer: BaseTokenizer) -> bool:
    return tokenizer.folder == load_tokenizer(TINY_BASE_NAME, ()).folder


def _not_here(base: ModelShape) -> str:
    return f"the tokenizer of {last_component(base.name)} is not on this machine"


def _find_own(base: ModelShape) -> tuple[str, str]:
    """By the family: those whose tokens are known here, else the tokenizer's own where the name says that it chats."""
    if base.model_type.startswith("qwen") or base.name.startswith("launcher/"):
        return "chatml", f"the markers that {last_component(base.name)} knows"
    if re.search(r"llama-?3", base.name.lower()):
        return "llama3", "the markers that Llama 3 knows"
    words = re.split(r"[^a-z0-9]+", base.name.lower())
    if {"instruct", "it", "chat"} & set(words) or base.model_type == "smollm3":
        return "tokenizer", "the base's own chat template"
    return "alpaca", "headlines: this base has no chat template that is known here"


def _check_template(name: str, base: ModelShape, tokenizer: BaseTokenizer) -> Template:
    """The way out is a flag, as there is no manifest yet."""
    try:
        return make_template(name, tokenizer)
    except InputError as error:
        raise InputError(
            f"{last_component(base.name)}: {error.title}",
            hint="--template names another: alpaca needs no markers, tokenizer takes the base's own chat template",
        ) from None


def _note_family(base: ModelShape, name: str, own: str, is_here: bool) -> list[str]:
    """Markers that a base was not trained with must be learnt from nothing, or are no tokens of it at all."""
    is_kin = name == own or {name, own} == {"chatml", "qwen3"}
    if name not in _MARKED_BY or is_kin or (own == "alpaca" and is_here):
        return []
    short = last_component(base.name)
    return [f"the template {name} writes the markers of {_MARKED_BY[name]}, which {short} may not know: try {own}"]
