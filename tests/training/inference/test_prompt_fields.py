"""Questions to experts whose prompt is a format of several fields."""

from __future__ import annotations

import json
import shlex
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.core.errors import InputError
from launcher.corpus.documents import make_template
from launcher.corpus.tokenizer import load_tokenizer
from launcher.manifest.dataset import FieldMapping
from launcher.training.inference.ask import parse_fields
from launcher.training.inference.prompt import Question, compose_question, render_prompt


def make_data(system_prompt: str | None = None, **mapping: str) -> Any:
    return SimpleNamespace(field_mapping=FieldMapping(response="answer", **mapping), system_prompt=system_prompt)


def test_fields_fill_the_formats_of_the_training() -> None:
    data = make_data("Be brief.", instruction="{subject}\n{body}", input="Product: {product}")
    fields = {"subject": "S", "body": "B", "product": "P"}
    assert compose_question(data, "", "", fields) == Question("S\nB", "Product: P", "Be brief.")
    empty = {"subject": "S", "body": "", "product": ""}
    assert compose_question(data, "", "", empty) == Question("S\n", "", "Be brief.")
    with pytest.raises(InputError, match="the prompt also needs body, product") as caught:
        compose_question(data, "", "", {"subject": "S"})
    assert caught.value.hint == "add --field body=... --field product=...; the text may be empty"


def test_known_system_message_need_not_be_given() -> None:
    data = make_data("Be brief.", instruction="{subject}\n{body}", system="rules")
    fields = {"subject": "S", "body": "B"}
    assert compose_question(data, "", "", fields) == Question("S\nB", "", "Be brief.")
    assert compose_question(data, "", "", {**fields, "rules": "R"}).system == "R"
    with pytest.raises(InputError, match="the prompt also needs rules"):
        compose_question(make_data(instruction="{subject}\n{body}", system="rules"), "", "", fields)


def test_field_is_given_once() -> None:
    with pytest.raises(InputError, match="--field body is given twice"):
        parse_fields(["body=a", "body=b"])


def test_a_question_takes_the_place_of_the_only_field() -> None:
    assert compose_question(make_data(instruction="Summarize: {body}"), "B", "", {}).content == "Summarize: B"
    assert compose_question(make_data(instruction="body", input="docs"), "B", "D", {}) == Question("B", "D", "")
    assert compose_question(make_data(), "B", "D", {}) == Question("B", "D", "")


@pytest.mark.parametrize(
    ("question", "fields", "message"),
    [
        ("Q", {}, "the question is built from the fields subject, body"),
        ("", {"subjct": "S"}, "the prompt has no such fields"),
    ],
)
def test_what_does_not_fit_is_an_error(question: str, fields: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        compose_question(make_data(instruction="{subject} {body}"), question, "", fields)


CHAT = [
    {"role": "user", "content": "Where is it?"},
    {"role": "assistant", "content": "On its way."},
    {"role": "user", "content": "Since when?"},
]


def test_chat_continues_with_the_answer_to_its_last_message() -> None:
    data = make_data("Be brief.", messages="messages")
    asked = compose_question(data, "", "", {"messages": json.dumps(CHAT)})
    template = make_template("chatml", load_tokenizer("launcher/tiny", ()))
    prompt = render_prompt(template, asked.content, context=asked.context, system=asked.system, history=asked.history)
    assert template.controls.unescape(prompt) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhere is it?<|im_end|>\n"
        "<|im_start|>assistant\nOn its way.<|im_end|>\n<|im_start|>user\nSince when?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("messages", "question", "words"),
    [
        ("{", "", "broken JSON"),
        ("{}", "", "not a list of messages"),
        ("[]", "", "the last message must be the user's"),
        (json.dumps(CHAT[:2]), "", "the last message must be the user's"),
        ('[{"role": "boss", "content": "?"}]', "", "unknown role: 'boss'"),
        (json.dumps(CHAT), "Who?", "omit the question and other --field flags"),
    ],
)
def test_wrong_chats_are_refused(messages: str, question: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        compose_question(make_data(messages="messages"), question, "", {"messages": messages})


def test_suggested_flags_can_be_pasted_into_a_shell() -> None:
    data = make_data(instruction="{My question (text)} {body}")
    with pytest.raises(InputError) as caught:
        compose_question(data, "Q", "", {})
    assert shlex.split(caught.value.hint)[1:5] == ["--field", "My question (text)=...", "--field", "body=..."]
    with pytest.raises(InputError) as caught:
        compose_question(data, "", "", {"body": "B"})
    assert caught.value.hint.startswith("add --field 'My question (text)=...';")
