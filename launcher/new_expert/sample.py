"""Rows for the smoke profile, which trains a tiny base without a GPU: a part of them, short enough for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.bases import TINY_BASE_NAME
from launcher.corpus.documents import Document, DocumentMaker, make_template
from launcher.corpus.rows import Row
from launcher.corpus.tokenizer import load_tokenizer
from launcher.new_expert.proposal import Proposal
from launcher.new_expert.seeing import spread
from launcher.plan.smoke import SMOKE_LENGTHS

_MOST_ROWS = 1000
_TRIED_ROWS = 4000
_ENOUGH_ROWS = 50
_ENOUGH_SHARE = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    text: str  # of sample/train.jsonl
    num_rows: int
    note: str  # where rows had to be left out


def make_sample_rows(proposal: Proposal) -> Sample:
    """The shortest sequence that holds enough of them decides: the smoke profile takes the same from their lengths."""
    tried = spread(proposal.seen.rows, _TRIED_ROWS)
    lengths = _count_tokens(proposal, tried)
    usable = [row for row in tried if row.number in lengths]
    enough = min(len(usable), max(_ENOUGH_ROWS, int(_ENOUGH_SHARE * len(usable))))
    fitting: list[Row] = []
    for limit in SMOKE_LENGTHS:
        fitting = [row for row in usable if lengths[row.number] <= limit]
        if len(fitting) >= enough:
            break
    chosen = spread(fitting or sorted(usable, key=lambda row: lengths[row.number]), _MOST_ROWS)
    left_out = len(usable) - len(fitting)
    note = f"{left_out:,} of {len(usable):,} rows are too long for the sample of the smoke profile" if left_out else ""
    text = "".join(json.dumps(_pick(row, proposal), ensure_ascii=False, default=str) + "\n" for row in chosen)
    return Sample(text=text, num_rows=len(chosen), note=note)


def _count_tokens(proposal: Proposal, rows: Sequence[Row]) -> dict[int, int]:
    """By the tiny base's own tokenizer, in its template."""
    tokenizer = load_tokenizer(TINY_BASE_NAME, ())
    template = make_template("chatml", tokenizer)
    maker = DocumentMaker(reader=proposal.roles.reader, template=template, trains_all=proposal.loss_on_all)
    texts = {
        row.number: "".join(segment.text for segment in document.segments)
        for row in rows
        if isinstance(document := maker.make(row), Document)
    }
    encoded = tokenizer.backend.encode_batch(list(texts.values()), add_special_tokens=False)
    return {number: len(one.ids) for number, one in zip(texts, encoded, strict=True)}


def _pick(row: Row, proposal: Proposal) -> dict[str, object]:
    """Only the fields that play a role: what else a row holds need not lie in two places."""
    mapping = proposal.roles.mapping
    used = set(mapping.model_dump(exclude_none=True).values()) or set(row.fields)
    return {name: value for name, value in row.fields.items() if name in used}
