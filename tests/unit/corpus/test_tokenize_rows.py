"""Tokens and masks are aligned, in row order, truncated and counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.corpus import tokenize_rows as module
from launcher.corpus.conversations import Conversation, Message
from launcher.corpus.documents import Document, make_template
from launcher.corpus.templates import Segment
from launcher.corpus.text_encoder import TextEncoder
from launcher.corpus.tokenize_rows import TokenBatch, tokenize_documents
from launcher.corpus.tokenizer import BaseTokenizer

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
all_segments = st.lists(st.builds(Segment, texts, st.booleans()), min_size=1, max_size=4).map(tuple)


def encoder_of(tokenizer: BaseTokenizer) -> TextEncoder:
    return TextEncoder(tokenizer, make_template("chatml", tokenizer))


def tokens_of(batches: list[TokenBatch]) -> list[tuple[int, list[int], list[int]]]:
    documents = []
    for batch in batches:
        ends = batch.lengths.cumsum().tolist()
        for row, end, length in zip(batch.rows.tolist(), ends, batch.lengths.tolist(), strict=True):
            ids, trained = batch.input_ids[end - length : end], batch.trained[end - length : end]
            documents.append((row, ids.tolist(), trained.tolist()))
    return documents


@given(documents=st.lists(all_segments, max_size=20), limit=st.integers(1, 40))
def test_tokens_and_masks_are_those_of_the_segments(
    tokenizer: BaseTokenizer, documents: list[tuple[Segment, ...]], limit: int
) -> None:
    made = [Document(row, segments, row) for row, segments in enumerate(documents, 1)]
    batches = list(tokenize_documents(made, encoder_of(tokenizer), limit))
    whole = []
    for row, segments in enumerate(documents, 1):
        text = "".join(segment.text for segment in segments)
        flags = [segment.is_trained for segment in segments for _ in segment.text]
        encoding = tokenizer.backend.encode(text, add_special_tokens=False)
        ids = encoding.ids
        mask = [int(any(flags[start:end])) for start, end in encoding.offsets]
        whole.append((row, ids, [0, *mask[1:]] if mask else []))  # nothing predicts the first token
    assert tokens_of(batches) == [(row, ids[:limit], mask[:limit]) for row, ids, mask in whole]
    assert [excess for batch in batches for excess in batch.excess.tolist()] == [
        max(0, len(ids) - limit) for _, ids, _ in whole
    ]
    assert [number for batch in batches for number in batch.prompt_hashes.tolist()] == [row for row, *_ in whole]


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3", "alpaca", "tokenizer"])
def test_what_is_trained_reads_as_the_answer_and_its_end(tokenizer: BaseTokenizer, name: str) -> None:
    template = make_template(name, tokenizer)
    answer = "MATCH (f:Film) RETURN f.title  // ünïcödé 漢字\n"
    conversation = Conversation((Message("user", "Which?", "Film"), Message("assistant", answer)))
    [batch] = tokenize_documents(
        [Document(1, template.render(conversation), 0)], TextEncoder(tokenizer, template), 1000
    )
    trained = batch.input_ids[batch.trained == 1].tolist()
    assert tokenizer.backend.decode(trained, skip_special_tokens=False) == answer + template.end_token
    assert trained[-1] == tokenizer.backend.token_to_id(template.end_token)


def test_newline_after_the_end_token_is_not_trained(tokenizer: BaseTokenizer) -> None:
    conversation = Conversation((Message("user", "?"), Message("assistant", "x")))
    segments = make_template("chatml", tokenizer).render(conversation)
    [batch] = tokenize_documents([Document(1, segments, 0)], encoder_of(tokenizer), 1000)
    assert batch.trained.tolist()[-2:] == [1, 0]
    assert tokenizer.backend.decode([int(batch.input_ids[-1])]) == "\n"


def test_many_documents_keep_their_order(tokenizer: BaseTokenizer) -> None:
    documents = [Document(row, (Segment(f"row {row}", True),), 0) for row in range(1, 3001)]
    batches = list(tokenize_documents(documents, encoder_of(tokenizer), 100))
    assert len(batches) == 3
    assert [row for batch in batches for row in batch.rows.tolist()] == list(range(1, 3001))


def test_a_batch_of_long_rows_has_few(tokenizer: BaseTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH_CHARACTERS", 100)
    documents = [Document(row, (Segment("x" * 60, True),), 0) for row in range(1, 6)]
    assert [len(batch.rows) for batch in tokenize_documents(documents, encoder_of(tokenizer), 100)] == [2, 2, 1]


def test_selecting_keeps_tokens_with_their_documents(tokenizer: BaseTokenizer) -> None:
    documents = [Document(row, (Segment(f"row {row}", True),), row) for row in range(1, 9)]
    [batch] = tokenize_documents(documents, encoder_of(tokenizer), 100)
    odd = batch.select(batch.rows % 2 == 1)
    assert tokens_of([odd]) == [document for document in tokens_of([batch]) if document[0] % 2 == 1]
    assert odd.prompt_hashes.tolist() == [1, 3, 5, 7]


def test_an_error_while_reading_is_not_lost(tokenizer: BaseTokenizer) -> None:
    def broken() -> object:
        yield Document(1, (Segment("x", True),), 0)
        raise OSError("the disk went away")

    with pytest.raises(OSError, match="the disk went away"):
        list(tokenize_documents(broken(), encoder_of(tokenizer), 10))  # type: ignore[arg-type]
