"""Choosing the prompts that are held out for validation."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.corpus.documents import Document
from launcher.corpus.heldout import load_held_out_rows
from launcher.corpus.rows import Row
from launcher.corpus.validation_cut import ValidationCut, choose_validation_cut, read_validation_cut
from tests.unit.corpus.inputs import documents_of, make_rows, make_spec, prepare_quietly, write_expert, write_jsonl

LOW = st.integers(0, 2**59)  # held out by the hash
HIGH = st.integers(2**61, 2**64 - 1)


@given(
    st.lists(st.tuples(st.one_of(LOW, HIGH), st.integers(1, 30)), max_size=30, unique_by=lambda pair: pair[0]),
    st.randoms(),
)
def test_repeated_prompts_take_at_most_a_fifth_of_the_rows(groups, random) -> None:  # type: ignore[no-untyped-def]
    hashes = [prompt for prompt, count in groups for _ in range(count)]
    cut = choose_validation_cut(hashes)
    held_out = Counter(prompt for prompt in hashes if cut.holds_out(prompt))
    assert sum(held_out.values()) <= 0.2 * len(hashes) or set(held_out.values()) == {1}
    assert all(not cut.holds_out(prompt) for prompt in hashes if prompt >= 2**61)
    assert cut.select(np.array(hashes, dtype=np.uint64)).tolist() == [cut.holds_out(prompt) for prompt in hashes]
    random.shuffle(hashes)
    assert choose_validation_cut(hashes) == cut, "the order of the rows does not matter"


def test_only_the_most_frequent_prompts_are_trained_instead() -> None:
    many, few, once = 1, 2, 3
    hashes = [many] * 40 + [few] * 10 + [once] + list(range(2**62, 2**62 + 49))
    assert choose_validation_cut(hashes).trained == {many}
    assert choose_validation_cut([few] * 10 + [once] + list(range(2**62, 2**62 + 89))) == ValidationCut()
    assert choose_validation_cut([once, 4, 5]) == ValidationCut(), "rows with different prompts"
    assert choose_validation_cut([]) == ValidationCut()


@pytest.mark.long
@pytest.mark.parametrize("loss_on", ["completion", "all"])
def test_a_prompt_of_many_rows_is_trained(expert: Path, base: Path, loss_on: str) -> None:
    spec = make_spec(write_expert(expert.parent, evaluation_strategy="epoch"), base)
    builder, _ = spec.open_rows(spec.train[0])

    def is_low(row: dict[str, str]) -> bool:
        prompt_hash = builder.hash_prompt(Row(number=1, fields=dict(row)))
        assert prompt_hash is not None
        return ValidationCut().holds_out(prompt_hash)

    frequent = next(row for row in make_rows(1000, first=5000) if is_low(row))
    rows = make_rows(200) + [{**frequent, "cypher": f"RETURN {number}"} for number in range(100)]
    write_jsonl(expert.parent / "train.jsonl", rows)
    spec = make_spec(write_expert(expert.parent, evaluation_strategy="epoch", loss_on=loss_on), base)
    audit = prepare_quietly(spec).store.audit
    assert audit.splits["train"].num_documents + audit.splits["validation"].num_documents == 300
    assert 8 <= audit.splits["validation"].num_documents <= 35
    assert "validation: a prompt of many rows stays in the training split" in audit.notes[0]
    assert len(documents_of(prepare_quietly(spec).store, "validation")) == audit.splits["validation"].num_documents
    held_out = load_held_out_rows(spec, None, "validation")
    assert held_out.num_rows == audit.splits["validation"].num_documents
    assert not any(row.answer.startswith("RETURN") for row in held_out.rows)


@pytest.mark.long
def test_the_hash_of_a_prompt_needs_no_rendering(expert: Path, base: Path) -> None:
    texts = ["<|im_start|>user\nHi <|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n", "no marker"]
    write_jsonl(expert.parent / "texts.jsonl", [{"text": text} for text in texts])
    for dataset in ({}, {"path": "texts.jsonl", "field_mapping": {"text": "text"}}):
        for loss_on in ("completion", "all"):
            spec = make_spec(write_expert(expert.parent, dataset, loss_on=loss_on), base)
            builder, rows = spec.open_rows(spec.train[0])
            for row in rows:
                assert isinstance(row, Row)
                document = builder.make(row)
                assert builder.hash_prompt(row) == (document.prompt_hash if isinstance(document, Document) else None)
    assert read_validation_cut(spec) == ValidationCut()
