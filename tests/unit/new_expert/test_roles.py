"""Which field plays which role: usual shapes are told, doubtful ones refused with the way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.corpus.conversations import Conversation
from launcher.corpus.rows import BadRow, Row
from launcher.corpus.sources import FileSource
from launcher.errors import InputError
from launcher.new_expert.guesses import GivenFields
from launcher.new_expert.names import is_about_row, rate_name, split_name
from launcher.new_expert.roles import check_usable, guess_roles
from launcher.new_expert.seeing import Seen, count_fields

Fields = dict[str, Any]
CHAT = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Nobody."}]
CALLS = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
AGENTS = [{"role": "customer", "content": "Who?"}, {"role": "agent", "content": "Nobody."}]


def look(*rows: Fields) -> Seen:
    made = tuple(Row(number=number, fields=fields) for number, fields in enumerate(rows, 1))
    source = FileSource(path=Path("rows.jsonl"), format="jsonl")
    return Seen(source=source, rows=made, bad_rows=(), fields=count_fields(made), is_whole=True)


def repeat(fields: Fields, times: int = 4) -> Seen:
    """Rows that differ: a number is put behind every text."""
    return look(
        *(
            {name: f"{value} {number}" if isinstance(value, str) else value for name, value in fields.items()}
            for number in range(times)
        )
    )


def roles_of(seen: Seen, **given: str) -> dict[str, str]:
    return guess_roles(seen, GivenFields(**given)).mapping.model_dump(exclude_none=True)


@pytest.mark.parametrize(
    ("fields", "mapping"),
    [
        (("instruction", "input", "output"), {"instruction": "instruction", "input": "input", "response": "output"}),
        (("input", "output"), {"instruction": "input", "response": "output"}),
        (("prompt", "completion"), {"instruction": "prompt", "response": "completion"}),
        (
            ("question", "schema", "cypher", "database"),
            {"instruction": "question", "input": "schema", "response": "cypher"},
        ),
        (("question", "sql", "db_name"), {"instruction": "question", "response": "sql"}),
        (("question", "query"), {"instruction": "question", "response": "query"}),
        (("query", "response"), {"instruction": "query", "response": "response"}),
        (
            ("sql_prompt", "sql_context", "sql"),
            {"instruction": "sql_prompt", "input": "sql_context", "response": "sql"},
        ),
        (("text", "label"), {"instruction": "text", "response": "label"}),
        (("text", "summary"), {"instruction": "text", "response": "summary"}),
        (("userQuestion", "modelAnswer"), {"instruction": "userQuestion", "response": "modelAnswer"}),
        (("Question", "Answer"), {"instruction": "Question", "response": "Answer"}),
        (
            ("system", "user", "assistant"),
            {"system": "system", "instruction": "user", "response": "assistant"},
        ),
        (("answer", "question"), {"instruction": "question", "response": "answer"}),
        (("prompt", "chosen", "rejected"), {"instruction": "prompt", "response": "chosen"}),
        (("id", "english", "french"), {"instruction": "english", "response": "french"}),
        (("question", "remark"), {"instruction": "question", "response": "remark"}),
        (("ticket", "answer"), {"instruction": "ticket", "response": "answer"}),
        (("prompt_id", "prompt", "response_id", "response"), {"instruction": "prompt", "response": "response"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_usual_names_are_told(fields: tuple[str, ...], mapping: dict[str, str]) -> None:
    assert roles_of(repeat(dict.fromkeys(fields, "some words"))) == mapping


def test_every_guess_has_its_share() -> None:
    seen = look(*({"question": f"q{n}", "answer": f"a{n}", "context": "c" if n < 2 else ""} for n in range(5)))
    told = {guess.what: guess.why for guess in guess_roles(seen).guesses}
    assert told["prompt"] == "its name; in 5 of 5 rows"
    assert told["context"] == "its name; in 2 of 5 rows"


@pytest.mark.parametrize("name", ["messages", "conversations", "dialog", "whatever"])
def test_chats_are_found_by_what_they_hold(name: str) -> None:
    assert roles_of(repeat({"id": "x", "prompt": "again", name: CHAT})) == {"messages": name}


def test_chats_of_sharegpt_are_chats() -> None:
    turns = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Nobody."}]
    assert roles_of(repeat({"conversations": turns})) == {"messages": "conversations"}


def test_text_with_marked_turns_is_templated() -> None:
    text = "<|user|>\nWho?\n<|end|>\n<|assistant|>\nNobody.\n<|end|>"
    roles = guess_roles(repeat({"text": text}))
    assert roles.kind == "templated"
    assert roles.mapping.text == "text"
    assert "in 4 of 4 rows" in roles.guesses[0].why


def test_a_pair_wins_over_the_text_that_joins_it() -> None:
    text = "### Instruction:\nWho?\n\n### Response:\nNobody."
    assert "text" not in roles_of(repeat({"instruction": "Who?", "output": "Nobody.", "text": text}))


def test_an_object_with_an_instruction_is_a_task() -> None:
    roles = guess_roles(repeat({"input": {"instruction": "Do it.", "schema": "s"}, "output": "done"}))
    assert (roles.kind, roles.reader.task, roles.reader.answer) == ("task", "input", "output")


def test_an_answer_may_be_an_object() -> None:
    roles = guess_roles(repeat({"question": "q", "output": {"a": 1}}))
    assert roles.mapping.answer == "output"
    assert "4 of them written as JSON" in roles.guesses[-1].why


@pytest.mark.parametrize("value", [3, True, 2.5])
def test_an_answer_may_be_a_number_where_its_name_says_so(value: object) -> None:
    roles = guess_roles(repeat({"question": "q", "label": value, "n": 7, "remark": "r"}))
    assert (roles.mapping.instruction, roles.mapping.answer) == ("question", "label")
    assert roles.notes == ('label is a number, true or false in 4 of 4 rows: written as text (3 as "3")',)
    check_usable(repeat({"question": "q", "label": value}), roles)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {"prompt": [*CHAT, CHAT[0]], "completion": CHAT[1:]},
        {"prompt": CHAT[:1], "completion": "Nobody."},
        {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": CHAT[1:]},
    ],
    ids=["one turn", "more turns", "a text", "preferences"],
)
def test_a_chat_that_asks_and_one_that_answers_are_joined(fields: Fields) -> None:
    seen = repeat(fields)
    answer = next(name for name in fields if name != "prompt")
    given = guess_roles(seen, GivenFields(prompt="prompt", answer=answer))
    for roles in (guess_roles(seen), given):
        assert roles.mapping.model_dump(exclude_none=True) == {"instruction": "prompt", "response": answer}
        assert f"the messages of prompt and {answer} are joined into one conversation" in roles.notes
        content = roles.reader.read(seen.rows[0])
        assert isinstance(content, Conversation)
        assert (content.messages[0].content, content.messages[-1].role) == ("Who?", "assistant")


def test_a_whole_chat_beside_a_label_stays_whole() -> None:
    assert roles_of(repeat({"messages": [*CHAT, CHAT[0]], "label": "good"})) == {"messages": "messages"}


def test_chats_take_a_system_prompt_and_no_context() -> None:
    seen = repeat({"conversations": CHAT, "system": "Be brief.", "about": "them"})
    assert roles_of(seen) == {"messages": "conversations", "system": "system"}
    assert roles_of(seen, system="about") == {"messages": "conversations", "system": "about"}
    assert roles_of(seen, messages="conversations", system="about") == {"messages": "conversations", "system": "about"}
    for named in ({"context": "about"}, {"messages": "conversations", "context": "about"}):
        with pytest.raises(InputError, match="context"):
            guess_roles(seen, GivenFields(**named))


@pytest.mark.parametrize(
    "fields",
    [
        {"input": {"instruction": "Do it."}, "output": "done", "extra": "x"},
        {"text": "<|user|>\nWho?\n<|end|>\n<|assistant|>\nNobody.\n<|end|>", "extra": "x"},
    ],
    ids=["task", "templated"],
)
@pytest.mark.parametrize("role", ["context", "system"])
def test_given_fields_are_never_dropped(fields: Fields, role: str) -> None:
    with pytest.raises(InputError, match=f"--{role}-field extra: .* is the whole row"):
        guess_roles(repeat(fields), GivenFields(**{role: "extra"}))


@pytest.mark.parametrize("fields", [("question", "answer"), ("input", "output"), ("id", "body")])
def test_of_two_fields_one_is_given_and_one_is_left(fields: tuple[str, str]) -> None:
    seen = repeat(dict.fromkeys(fields, "words"))
    first, second = fields
    assert roles_of(seen, prompt=second) == {"instruction": second, "response": first}
    assert roles_of(seen, answer=first) == {"instruction": second, "response": first}
    assert roles_of(seen, prompt=first) == {"instruction": first, "response": second}


@pytest.mark.parametrize(
    ("given", "mapping"),
    [
        ({"prompt": "b", "answer": "a"}, {"instruction": "b", "response": "a"}),
        ({"prompt": "b", "answer": "c", "context": "a"}, {"instruction": "b", "input": "a", "response": "c"}),
        ({"text": "c"}, {"text": "c"}),
        ({"prompt": "a", "answer": "c", "system": "b"}, {"instruction": "a", "response": "c", "system": "b"}),
    ],
)
def test_given_fields_win(given: dict[str, str], mapping: dict[str, str]) -> None:
    assert roles_of(repeat({"a": "x", "b": "y", "c": "z"}), **given) == mapping


def test_one_given_field_leaves_the_other_to_be_guessed() -> None:
    seen = repeat({"question": "q", "remark": "r", "answer": "a"})
    assert roles_of(seen, prompt="remark") == {"instruction": "remark", "response": "answer"}
    assert roles_of(seen, answer="remark") == {"instruction": "question", "response": "remark"}


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (repeat({"a": "x", "b": "y", "c": "z"}), ("which is the question", "--prompt-field and --answer-field")),
        (repeat({"body": "only words"}), ("one field of text only, body", "--text-field body")),
        (repeat({"text": "only words"}), ("one field of text only, text", "--text-field text")),
        (repeat({"id": "1", "body": "only words"}), ("which is the question", "--prompt-field and --answer-field")),
        (repeat({"id": 1, "body": "only words"}), ("one field of text only, body", "--text-field body")),
        (repeat({"question": "q", "n": 3}), ("which is the question", "--prompt-field and --answer-field")),
        (repeat({"a": 1, "b": 2}), ("no field of text", "--prompt-field and --answer-field")),
        (
            look(*({"question": f"q{n}", **({"answer": "a"} if n == 0 else {})} for n in range(5))),
            ("answer is missing in 4 of 5 rows", "leave out rows without answer"),
        ),
        (repeat({"input": {"question": "q"}, "n": 1}), ("lies in objects", "write question as fields")),
        (repeat({"input": {"instruction": "q"}}), ("no field holds their answers", "is called output")),
        (repeat({"prompt": CHAT[:1], "n": 1}), ("4 rows: prompt has no answer of the assistant", "into one list")),
        (repeat({"messages": CALLS}), ("4 rows: a message of the assistant has tool calls, and no text", "of tools")),
        (repeat({"messages": AGENTS}), ("4 rows: a message of an unknown role: 'customer'", "rename the others")),
        (repeat({"q": b"q", "answer": "a"}), ("which is the question", "q: bytes or dates in 4 of 4 rows")),
        (look({"a": "", "b": None}), ("empty in all of their fields", "empty in all rows")),
    ],
)
def test_what_cannot_be_told_is_refused_with_the_way_out(seen: Seen, words: tuple[str, str]) -> None:
    with pytest.raises(InputError) as caught:
        guess_roles(seen)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prompt": "questoin"}, "did you mean 'question'?"),
        ({"prompt": "question", "answer": "question"}, "one field cannot play two roles"),
        ({"text": "answer", "prompt": "question"}, "none is left for prompt"),
        ({"messages": "answer"}, "no row holds chat messages there, but text"),
    ],
)
def test_given_fields_that_do_not_fit_are_refused(given: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words.replace("?", r"\?")):
        guess_roles(repeat({"question": "q", "answer": "a"}), GivenFields(**given))


def test_mostly_unusable_rows_are_refused() -> None:
    seen = look({"question": "q", "answer": "a"}, *({"question": "", "answer": f"a{n}", "n": "x"} for n in range(3)))
    roles = guess_roles(seen, GivenFields(prompt="question", answer="answer"))
    with pytest.raises(InputError, match="3 of 4 rows cannot be used"):
        check_usable(seen, roles)


@given(st.text(max_size=30))
def test_names_are_never_too_odd(name: str) -> None:
    assert all(word.isascii() for word in split_name(name))
    assert rate_name(name, ("prompt",)) in (0, 50, 100)
    assert is_about_row(name) in (True, False)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["instruction", "input", "output", "text", "messages", "label", "id", "x", "context"])


@given(st.lists(st.dictionaries(NAMES, JSON, min_size=1, max_size=4), min_size=1, max_size=6))
def test_whatever_rows_hold_they_are_read_or_refused(rows: list[Fields]) -> None:
    """Never anything but an answer or a message; and a mapping names fields that are there, each once."""
    seen = look(*rows)
    try:
        roles = guess_roles(seen)
    except InputError:
        return
    named = list(roles.mapping.model_dump(exclude_none=True).values())
    assert len(set(named)) == len(named)
    assert set(named) <= set(seen.fields)
    json.dumps([guess.why for guess in roles.guesses])
    assert any(not isinstance(roles.reader.read(row), BadRow) for row in seen.rows) or roles.kind == "turn"
