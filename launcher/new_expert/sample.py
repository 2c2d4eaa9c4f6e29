"""Rows for the smoke profile, which trains a tiny base without a GPU: a part of them, short enough for it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from launcher.bases import TINY_BASE_NAME
from launcher.corpus.build import is_cut_for_validation
from launcher.corpus.documents import DocumentMaker, make_template
from launcher.corpus.rows import Row
from launcher.corpus.tokenizer import load_tokenizer
from launcher.new_expert.proposal import Proposal, make_documents
from launcher.new_expert.seeing import is_text, spread
from launcher.new_expert.splits import GivenSplit, Name
from launcher.plan.smoke import SMOKE_LENGTHS
from launcher.rows import SAMPLE_TEST, SAMPLE_TRAIN, SAMPLE_VALIDATION

SAMPLE_FILES = (SAMPLE_TRAIN, SAMPLE_VALIDATION, SAMPLE_TEST)
_MOST_ROWS = 1000
_MOST_HELD_OUT = 200
_TRIED_ROWS = 4000
_ENOUGH_ROWS = 50
_ENOUGH_SHARE = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    texts: Mapping[str, str]  # of the files of sample/
    note: str  # where rows had to be left out


@dataclass(frozen=True, slots=True)
class _Measured:
    row: Row
    num_tokens: int  # of the tiny base
    prompt_hash: int


def make_sample(proposal: Proposal, given: Mapping[Name, GivenSplit]) -> Sample:
    """The shortest sequence that holds enough of them decides: the smoke profile takes the same from their lengths."""
    rows = _measure(proposal, spread(proposal.seen.rows, _TRIED_ROWS))
    enough = min(len(rows), max(_ENOUGH_ROWS, int(_ENOUGH_SHARE * len(rows))))
    limit = next(
        (limit for limit in SMOKE_LENGTHS if sum(row.num_tokens <= limit for row in rows) >= enough), SMOKE_LENGTHS[-1]
    )
    parts = _cut_parts(proposal, rows, given)
    for name, split in given.items():
        parts[name] = _measure(proposal, spread(split.rows, _TRIED_ROWS))
    texts = {
        file: _render(proposal, _choose(parts[name], limit, most))
        for name, file, most in (
            ("train", SAMPLE_TRAIN, _MOST_ROWS),
            ("validation", SAMPLE_VALIDATION, _MOST_HELD_OUT),
            ("test", SAMPLE_TEST, _MOST_HELD_OUT),
        )
        if parts.get(name)
    }
    return Sample(texts=texts, note=_note_long(rows, limit))


def _cut_parts(
    proposal: Proposal, rows: list[_Measured], given: Mapping[Name, GivenSplit]
) -> dict[str, list[_Measured]]:
    """By the hash of the prompt, as preparing cuts the validation part: no question is in two of them."""
    if proposal.num_held_out is None:
        return {"train": rows}
    parts: dict[str, list[_Measured]] = {"train": [], "validation": [], "test": []}
    for row in rows:
        is_held_out = is_cut_for_validation(row.prompt_hash)
        is_asked = not is_held_out and is_cut_for_validation(_turn(row.prompt_hash))
        name = "validation" if is_held_out else "test" if is_asked else "train"
        parts["train" if name in given else name].append(row)
    return parts if parts["train"] else {"train": rows}


def _turn(prompt_hash: int) -> int:
    """Its low bits are as good as its high ones."""
    return (prompt_hash << 32 | prompt_hash >> 32) % 2**64


def _measure(proposal: Proposal, rows: Sequence[Row]) -> list[_Measured]:
    """By the tiny base's own tokenizer, in its template."""
    tokenizer = load_tokenizer(TINY_BASE_NAME, ())
    template = make_template("chatml", tokenizer)
    maker = DocumentMaker(reader=proposal.roles.reader, template=template, trains_all=proposal.loss_on_all)
    made, _ = make_documents(maker, rows)
    texts = ["".join(segment.text for segment in document.segments) for _, document in made]
    encoded = tokenizer.backend.encode_batch(texts, add_special_tokens=False)
    return [
        _Measured(row, len(one.ids), document.prompt_hash) for (row, document), one in zip(made, encoded, strict=True)
    ]


def _choose(rows: list[_Measured], limit: int, most: int) -> tuple[Row, ...]:
    """Those that fit; where none does, the shortest."""
    fitting = [one.row for one in rows if one.num_tokens <= limit]
    return spread(fitting or [one.row for one in sorted(rows, key=lambda one: one.num_tokens)[:most]], most)


def _note_long(rows: list[_Measured], limit: int) -> str:
    count = sum(row.num_tokens > limit for row in rows)
    if count == len(rows):
        return f"all rows are longer than the {limit:,} tokens of the smoke profile: in its sample they are cut"
    return f"{count:,} of {len(rows):,} rows are too long for the sample of the smoke profile" if count else ""


def _render(proposal: Proposal, rows: Iterable[Row]) -> str:
    return "".join(_render_row(_pick(row, proposal)) + "\n" for row in rows)


def _render_row(fields: Mapping[str, object]) -> str:
    """Letters as they are; half of one can only be escaped."""
    text = json.dumps(fields, ensure_ascii=False, default=str)
    return text if is_text(text) else json.dumps(fields, default=str)


def _pick(row: Row, proposal: Proposal) -> dict[str, object]:
    """Only the fields that play a role, and all of them: what else a row holds need not lie in two places."""
    used = proposal.roles.mapping.model_dump(exclude_none=True).values()
    return {name: row.fields.get(name) for name in used} if used else dict(row.fields)
