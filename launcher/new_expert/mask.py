"""One row as it is trained: what of it is learnt, and where it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.bases import last_component
from launcher.corpus.audit import SampleSegment
from launcher.corpus.documents import Document
from launcher.corpus.tokenizer import BaseTokenizer
from launcher.new_expert.templating import is_embedded
from launcher.rows import BYTES_PER_TOKEN
from launcher.units import format_percent

_LOOKED_AT = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Mask:
    row: int
    segments: tuple[SampleSegment, ...]
    num_tokens: int
    num_trained: int
    tokenizer: str  # whose tokens are counted
    template: str  # in which it is shown
    notes: tuple[str, ...]  # what is not shown as it is trained, and where it ends


def estimate_tokens(document: Document) -> float:
    return sum(len(segment.text.encode()) for segment in document.segments) / BYTES_PER_TOKEN


def count_answerless(documents: Sequence[Document], max_length: int) -> int:
    """Rows whose first answer begins beyond the sequence: nothing of them is trained. Estimated from their bytes."""
    return sum(_estimate_prompt(document) >= max_length for document in documents)


def _estimate_prompt(document: Document) -> float:
    prompt = document.segments[0]
    return 0.0 if prompt.is_trained else len(prompt.text.encode()) / BYTES_PER_TOKEN


def make_mask(
    documents: Sequence[Document],
    tokenizer: BaseTokenizer,
    *,
    base: str,
    template: str,
    template_note: str,
    max_length: int,
) -> Mask:
    """Of a row of middling length: the first is often an odd one."""
    ordered = sorted(documents[:_LOOKED_AT], key=estimate_tokens)
    document = ordered[len(ordered) // 2]
    encoded = [tokenizer.backend.encode(segment.text, add_special_tokens=False) for segment in document.segments]
    total = sum(len(one.ids) for one in encoded)
    kept = _find_kept(document, total, max_length, is_own=not is_embedded(tokenizer))
    segments, counts, left = [], [], kept
    for segment, one in zip(document.segments, encoded, strict=True):
        count = min(left, len(one.ids))
        if count:
            text = segment.text if count == len(one.ids) else segment.text[: one.offsets[count][0]]
            segments.append(SampleSegment(text=text, is_trained=segment.is_trained))
            counts.append(count if segment.is_trained else 0)
        left -= count
    whose = "" if not is_embedded(tokenizer) else f" of {last_component(base)}, by an estimate"
    share = format_percent(1 - kept / max(1, total))
    cut = f"cut at {max_length:,} tokens{whose}, as in training: {share} of the row is left out"
    return Mask(
        row=document.row,
        segments=tuple(segments),
        num_tokens=kept,
        num_trained=sum(counts),
        tokenizer="the embedded tiny base" if is_embedded(tokenizer) else base,
        template=template,
        notes=tuple(note for note in (template_note, cut if kept < total else "") if note),
    )


def _find_kept(document: Document, total: int, max_length: int, *, is_own: bool) -> int:
    """Another tokenizer makes more tokens of a row than the base's own would: then it is the same share of it."""
    if is_own:
        return min(total, max_length)
    return round(total * min(1.0, max_length / max(1.0, estimate_tokens(document))))
