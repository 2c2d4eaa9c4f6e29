"""Answers are located in already templated text of any dialect."""

from __future__ import annotations

import pytest

from launcher.corpus.dialects import cut_segments, find_dialect, find_system
from launcher.corpus.templates import CHATML, LLAMA3, QWEN3, AlpacaTemplate, Template

ALPACA = AlpacaTemplate("<|endoftext|>")
CHATML_TEXT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
    "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
)
LLAMA3_TEXT = (
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nOne?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n1<|eot_id|>"
)
ALPACA_TEXT = "Below is a task.\n\n### Instruction:\nOne?\n\n### Input:\nFilm(title)\n\n### Response:\n1"
ROLES_TEXT = (
    '<|system|>\nTask: json\nFormat: x\n<|end|>\n<|user|>\nGenerate\n<|end|>\n<|assistant|>\n{"id": 1}\n<|end|>'
)


def marked(text: str, template: Template) -> str | None:
    dialect = find_dialect(text)
    assert dialect is not None
    parts = cut_segments(text, dialect, template)
    return None if parts is None else "".join(f"⟦{p.text}⟧" if p.is_trained else p.text for p in parts)


@pytest.mark.parametrize("template", [CHATML, QWEN3])
def test_chatml_is_kept_as_it_is(template: Template) -> None:
    expected = CHATML_TEXT.replace("\n1<|im_end|>", "\n⟦1<|im_end|>⟧").replace("\n2<|im_end|>", "\n⟦2<|im_end|>⟧")
    assert marked(CHATML_TEXT, template) == expected


@pytest.mark.parametrize(
    ("text", "system"), [(CHATML_TEXT, "Be brief."), (ROLES_TEXT, "Task: json\nFormat: x"), (LLAMA3_TEXT, ""), ("", "")]
)
def test_system_message_is_found(text: str, system: str) -> None:
    assert find_system(text) == system


def test_llama3_is_kept_as_it_is() -> None:
    assert marked(LLAMA3_TEXT, LLAMA3) == LLAMA3_TEXT.replace("1<|eot_id|>", "⟦1<|eot_id|>⟧")


def test_alpaca_is_kept_and_closed() -> None:
    assert marked(ALPACA_TEXT, ALPACA) == ALPACA_TEXT[:-1] + "⟦1<|endoftext|>⟧"


def test_an_end_that_is_there_is_not_written_twice() -> None:
    assert marked(ALPACA_TEXT + "<|endoftext|>\n", ALPACA) == ALPACA_TEXT[:-1] + "⟦1<|endoftext|>⟧\n"


def test_headlines_of_a_markdown_answer_are_part_of_it() -> None:
    answer = "First.\n\n### Example\nSecond.\n\n### Notes:\nThird."
    text = f"### Instruction:\nWhat?\n\n### Response:\n{answer}"
    assert marked(text, ALPACA) == f"### Instruction:\nWhat?\n\n### Response:\n⟦{answer}<|endoftext|>⟧"
    rendered = marked(text, CHATML)
    assert rendered is not None
    assert rendered.endswith(f"⟦{answer}<|im_end|>⟧\n")


def test_two_alpaca_turns_are_two_answers() -> None:
    text = "### Instruction:\nOne?\n\n### Response:\n1\n\n### Instruction:\nTwo?\n\n### Response:\n2"
    assert marked(text, ALPACA) == (
        "### Instruction:\nOne?\n\n### Response:\n⟦1<|endoftext|>⟧\n\n"
        "### Instruction:\nTwo?\n\n### Response:\n⟦2<|endoftext|>⟧"
    )


def test_the_roles_dialect_is_rendered_as_chatml() -> None:
    assert marked(ROLES_TEXT, CHATML) == (
        "<|im_start|>system\nTask: json\nFormat: x<|im_end|>\n<|im_start|>user\nGenerate<|im_end|>\n"
        '<|im_start|>assistant\n⟦{"id": 1}<|im_end|>⟧\n'
    )


def test_an_answer_that_was_cut_off_is_closed() -> None:
    assert marked("<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n42", CHATML) == (
        "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n⟦42<|im_end|>⟧"
    )


def test_other_dialect_is_rendered_by_the_template() -> None:
    assert marked(CHATML_TEXT, LLAMA3) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nOne?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦1<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nTwo?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦2<|eot_id|>⟧"
    )
    assert marked(ALPACA_TEXT, CHATML) == (
        "<|im_start|>user\nOne?\n\nFilm(title)<|im_end|>\n<|im_start|>assistant\n⟦1<|im_end|>⟧\n"
    )


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("### Instruction:\nOne?\n\n### Schema:\nFilm(title)\n\n### Context:\nOld.", "One?\n\nFilm(title)\n\nOld."),
        ("### Context:\nOld.\n\n### Instruction:\nOne?", "One?\n\nOld."),
        ("### Context:\nOld.\n\n### Instruction:\nOne?\n\n### Input:\nFilm", "One?\n\nOld.\n\nFilm"),
        ("### Input:\nOne?", "One?"),
    ],
)
def test_no_context_of_an_alpaca_text_is_dropped(text: str, question: str) -> None:
    assert marked(f"{text}\n\n### Response:\n1", CHATML) == (
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n⟦1<|im_end|>⟧\n"
    )


@pytest.mark.parametrize(
    ("before", "system"),
    [
        ("Film(title, year)\n\n", "Film(title, year)"),
        ("<s> Be brief.\n\n", "Be brief."),
        ("<|begin_of_text|>Below is an instruction that describes a task.\n\n", ""),
    ],
)
def test_text_before_the_headlines_is_the_system_message(before: str, system: str) -> None:
    text = f"{before}### Instruction:\nOne?\n\n### Response:\n1"
    rendered = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    question = "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n⟦1<|im_end|>⟧\n"
    assert marked(text, CHATML) == rendered + question
    assert find_system(text) == system


@pytest.mark.parametrize("template", [CHATML, LLAMA3])
def test_a_text_without_an_answer_has_nothing_to_train(template: Template) -> None:
    assert marked("<|im_start|>user\nOne?<|im_end|>\n", template) is None


def test_plain_text_has_no_dialect() -> None:
    assert find_dialect("Once upon a time: ### nothing, <|user|> nothing.") is None
