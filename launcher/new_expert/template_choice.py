"""Choose the prompt template for a base model, and preview one row in it with its loss mask."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.base_models.catalogue import TINY_BASE_NAME, get_last_component
from launcher.base_models.shapes import ModelShape
from launcher.core.errors import InputError
from launcher.core.units import format_percent
from launcher.corpus.audit import SampleSegment
from launcher.corpus.documents import Document, make_template
from launcher.corpus.row_count import guess_tokens
from launcher.corpus.templates import CHATML, LLAMA3, QWEN3, Template
from launcher.corpus.text_encoder import TextEncoder
from launcher.corpus.tokenizer import BaseTokenizer, load_tokenizer
from launcher.plan.estimate.dataset_size import BYTES_PER_TOKEN

# Templates that write special tokens, and the model families that have these tokens.
_TEMPLATES: dict[str, Template] = {"chatml": CHATML, "qwen3": QWEN3, "llama3": LLAMA3}
_FAMILIES = {"chatml": "Qwen", "qwen3": "Qwen 3", "llama3": "Llama 3"}
_PREVIEW_ROWS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenTemplate:
    """Template for the manifest, and the one used to show rows on this machine."""

    name: str
    reason: str
    preview: Template
    preview_note: str  # how the preview differs from training; empty if it does not
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mask:
    """One row as it is trained: its text in segments, with and without loss."""

    row: int
    segments: tuple[SampleSegment, ...]
    num_tokens: int
    num_trained: int
    tokenizer: str  # name of the base model whose tokens are counted
    template: str
    notes: tuple[str, ...]  # where the preview differs from training, and where the row is truncated


def choose_template(
    base: ModelShape, requested: str | None, tokenizer: BaseTokenizer, own: str | None = None
) -> ChosenTemplate:
    """Choose the template that fits the base model, unless one is requested; `own` is a custom template's source."""
    if own is not None:
        return _choose_own(base, requested, tokenizer, own)
    has_tokenizer = base.name == TINY_BASE_NAME or not is_embedded(tokenizer)
    native, native_reason = _find_native(base, tokenizer if has_tokenizer else None)
    name, reason = (native, native_reason) if requested is None else (requested, "set by --template")
    preview = _make_own_template(name, base, tokenizer) if has_tokenizer else _TEMPLATES.get(name)
    note, missing = "", f"the tokenizer of {get_last_component(base.name)} is not on this machine"
    if preview is None and name == "alpaca":
        preview, note = (
            make_template(name, tokenizer),
            f"shown with the end token of the embedded tiny base, because {missing}",
        )
    elif preview is None:
        preview, note = CHATML, f"shown in chatml, because {missing}, nor is its chat template"
    notes = tuple(_note_family(base, name, native, has_tokenizer))
    return ChosenTemplate(name=name, reason=reason, preview=preview, preview_note=note, notes=notes)


def _choose_own(base: ModelShape, requested: str | None, tokenizer: BaseTokenizer, own: str) -> ChosenTemplate:
    if requested not in (None, "tokenizer"):
        raise InputError(
            f"--template {requested} and --chat-template cannot be used together", hint="remove one of the two flags"
        )
    note = ""
    try:
        preview = make_template("tokenizer", tokenizer, own=own, file="--chat-template")
        if base.name != TINY_BASE_NAME and is_embedded(tokenizer):
            note = f"with special tokens of the tiny base, because the tokenizer of {base.name} is not on this machine"
    except InputError as error:
        if base.name == TINY_BASE_NAME or not is_embedded(tokenizer):
            raise
        preview = CHATML
        why = f"the tokenizer of {base.name} is not on this machine, and the tiny one does not fit ({error.title})"
        note = f"shown in chatml, because {why}"
    reason = "your chat template, set by --chat-template"
    return ChosenTemplate(name="tokenizer", reason=reason, preview=preview, preview_note=note, notes=())


def is_embedded(tokenizer: BaseTokenizer) -> bool:
    """Whether this is the tokenizer of the embedded tiny base, used where the real one is missing."""
    return tokenizer.folder == load_tokenizer(TINY_BASE_NAME, ()).folder


def _find_native(base: ModelShape, tokenizer: BaseTokenizer | None) -> tuple[str, str]:
    """Return the name of the template that suits a base, and why: its own chat template or that of its family."""
    if tokenizer is not None and tokenizer.chat_template_file is not None and base.name != TINY_BASE_NAME:
        return "tokenizer", f"the base's own chat template, in {tokenizer.chat_template_file}"
    if base.model_type.startswith("qwen") or base.name.startswith("launcher/"):
        return "chatml", f"special tokens of {get_last_component(base.name)}"
    if re.search(r"llama-?3", base.name.lower()):
        return "llama3", "special tokens of Llama 3"
    words = re.split(r"[^a-z0-9]+", base.name.lower())
    if tokenizer is None and ({"instruct", "it", "chat"} & set(words) or base.model_type == "smollm3"):
        return "tokenizer", "the base's own chat template"
    return "alpaca", "plain headings: this base has no chat template"


def _make_own_template(name: str, base: ModelShape, tokenizer: BaseTokenizer) -> Template:
    try:
        return make_template(name, tokenizer)
    except InputError as error:  # its hint is about a manifest, which does not exist yet
        raise InputError(
            f"{get_last_component(base.name)}: {error.title}",
            hint="choose another --template: alpaca needs no special tokens, tokenizer uses the base's chat template",
        ) from None


def _note_family(base: ModelShape, name: str, native: str, has_tokenizer: bool) -> list[str]:
    """Return a warning if a template writes special tokens that the base model may not know."""
    is_related = name == native or {name, native} == {"chatml", "qwen3"}
    if name not in _FAMILIES or is_related or has_tokenizer:  # its tokens were checked
        return []
    short = get_last_component(base.name)
    return [f"template {name} uses special tokens of {_FAMILIES[name]}, which {short} may not know: try {native}"]


def count_untrained(documents: Sequence[Document], max_length: int) -> int:
    """Count documents whose prompt alone has at least `max_length` tokens, as estimated from its bytes."""
    prompts = [document.segments[0] for document in documents if not document.segments[0].is_trained]
    return sum(len(prompt.text.encode()) / BYTES_PER_TOKEN >= max_length for prompt in prompts)


def make_mask(
    documents: Sequence[Document], tokenizer: BaseTokenizer, base: str, template: ChosenTemplate, max_length: int
) -> Mask:
    """Preview the row of median length, because the first one is often unusual."""
    ordered = sorted(documents[:_PREVIEW_ROWS], key=guess_tokens)
    document = ordered[len(ordered) // 2]
    sizes = TextEncoder(tokenizer, template.preview).count_tokens(document.segments)
    total = sum(sizes)
    embedded = is_embedded(tokenizer)
    # The embedded tokenizer makes more tokens of a row than the base's own: keep the same share of the row instead.
    share = min(1.0, max_length / max(1.0, guess_tokens(document)))
    num_kept = round(total * share) if embedded else min(total, max_length)
    segments, num_trained, left = [], 0, num_kept
    for segment, size in zip(document.segments, sizes, strict=True):
        count = min(left, size)
        if count:
            text = template.preview.controls.unescape(segment.text)
            shown = text if count == size else text[: round(len(text) * count / size)]
            segments.append(SampleSegment(text=shown, is_trained=segment.is_trained))
            num_trained += count if segment.is_trained else 0
        left -= count
    whose = f" of {get_last_component(base)} (estimated)" if embedded else ""
    dropped = format_percent(1 - num_kept / max(1, total))
    truncated = f"truncated at {max_length:,} tokens{whose}, as in training: {dropped} of the row is dropped"
    return Mask(
        row=document.row,
        segments=tuple(segments),
        num_tokens=num_kept,
        num_trained=num_trained,
        tokenizer="the embedded tiny base" if embedded else base,
        template=template.preview.name if template.preview_note else template.name,
        notes=tuple(note for note in (template.preview_note, truncated if num_kept < total else "") if note),
    )
