"""Exact output and loss masks of the templates."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from launcher.corpus.conversations import Conversation, Message
from launcher.corpus.templates import (
    CHATML,
    LLAMA3,
    QWEN3,
    AlpacaTemplate,
    Segment,
    Template,
    TurnTemplate,
    merge_segments,
)

ONE_TURN = Conversation(
    (Message("system", "Be brief."), Message("user", "How many?", "Film(title)"), Message("assistant", "42"))
)
TWO_TURNS = Conversation(
    (
        Message("user", "One?"),
        Message("assistant", "1"),
        Message("user", "Two?"),
        Message("assistant", "2"),
    )
)


def marked(template: Template, conversation: Conversation) -> str:
    """The text, with trained parts in ⟦ ⟧."""
    return "".join(f"⟦{part.text}⟧" if part.is_trained else part.text for part in template.render(conversation))


def test_chatml() -> None:
    assert marked(CHATML, ONE_TURN) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHow many?\n\nFilm(title)<|im_end|>\n"
        "<|im_start|>assistant\n⟦42<|im_end|>⟧\n"
    )


def test_chatml_trains_every_answer_of_a_conversation() -> None:
    assert marked(CHATML, TWO_TURNS) == (
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n⟦1<|im_end|>⟧\n"
        "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n⟦2<|im_end|>⟧\n"
    )


def test_qwen3_is_given_its_empty_thoughts() -> None:
    assert marked(QWEN3, ONE_TURN).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n⟦42<|im_end|>⟧\n")


def test_qwen3_learns_thoughts_that_are_in_the_answer() -> None:
    thinking = Conversation((Message("user", "?"), Message("assistant", "<think>\nhm\n</think>\n\n42")))
    assert marked(QWEN3, thinking).endswith("<|im_start|>assistant\n⟦<think>\nhm\n</think>\n\n42<|im_end|>⟧\n")


def test_llama3() -> None:
    assert marked(LLAMA3, ONE_TURN) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHow many?\n\nFilm(title)<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦42<|eot_id|>⟧"
    )


def test_alpaca_sets_the_context_apart() -> None:
    assert marked(AlpacaTemplate("<|endoftext|>"), ONE_TURN) == (
        "Be brief.\n\n### Instruction:\nHow many?\n\n### Input:\nFilm(title)\n\n### Response:\n⟦42<|endoftext|>⟧\n\n"
    )


def test_alpaca_without_context() -> None:
    assert marked(AlpacaTemplate("</s>"), TWO_TURNS) == (
        "### Instruction:\nOne?\n\n### Response:\n⟦1</s>⟧\n\n### Instruction:\nTwo?\n\n### Response:\n⟦2</s>⟧\n\n"
    )


@pytest.mark.parametrize("template", [CHATML, QWEN3, LLAMA3, AlpacaTemplate("<|endoftext|>")], ids=lambda t: t.name)
def test_the_trained_part_is_the_answer_and_its_end(template: Template) -> None:
    trained = [part.text for part in template.render(TWO_TURNS) if part.is_trained]
    assert trained == [f"1{template.end_token}", f"2{template.end_token}"]


def test_templates_have_different_texts() -> None:
    templates = (CHATML, QWEN3, LLAMA3, AlpacaTemplate("<|endoftext|>"), AlpacaTemplate("</s>"))
    assert len({template.text for template in templates}) == len(templates)


@given(st.lists(st.builds(Segment, st.text(max_size=3), st.booleans())))
def test_merging_keeps_text_and_mask(pieces: list[Segment]) -> None:
    merged = list(merge_segments(iter(pieces)))
    letters = [(letter, piece.is_trained) for piece in pieces for letter in piece.text]
    assert [(letter, piece.is_trained) for piece in merged for letter in piece.text] == letters
    assert all(a.is_trained != b.is_trained for a, b in pairwise(merged))
    assert all(piece.text for piece in merged)


@pytest.mark.parametrize("template", [CHATML, QWEN3, LLAMA3, AlpacaTemplate("</s>")], ids=lambda one: one.name)
def test_jinja_gives_the_trained_text_and_prompt(template: TurnTemplate | AlpacaTemplate) -> None:
    messages = [
        {"role": "system", "content": "Be 'brief'."},
        {"role": "user", "content": 'a\n{{ b }} "c"'},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "more?"},
        {"role": "assistant", "content": "two"},
    ]
    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template.to_jinja())
    segments = template.render(Conversation(tuple(Message(one["role"], one["content"]) for one in messages)))
    assert jinja.render(messages=messages) == "".join(segment.text for segment in segments)
    last = max(at for at, segment in enumerate(segments) if segment.is_trained)
    prompt = jinja.render(messages=messages[:-1], add_generation_prompt=True)
    assert prompt == "".join(segment.text for segment in segments[:last])
