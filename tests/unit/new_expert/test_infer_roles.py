"""Known layouts are recognised by names and values; unclear ones are refused with a hint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.core.errors import InputError
from launcher.corpus.conversations import Conversation
from launcher.corpus.rows import BadRow, Row
from launcher.corpus.sources import FileSource
from launcher.new_expert.infer_roles import FieldFlags, infer_roles, score_name
from launcher.new_expert.row_profile import RowProfile, profile_fields

Fields = dict[str, Any]
CHAT = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "No one."}]
CALLS = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
AGENTS = [{"role": "customer", "content": "Who?"}, {"role": "agent", "content": "No one."}]


def look(*rows: Fields) -> RowProfile:
    made = tuple(Row(number=number, fields=fields) for number, fields in enumerate(rows, 1))
    source = FileSource(path=Path("rows.jsonl"), format="jsonl")
    return RowProfile(source=source, rows=made, bad_rows=(), fields=profile_fields(made), is_complete=True)


def repeat(fields: Fields, times: int = 4) -> RowProfile:
    """Make rows that differ: every text ends with the row number."""
    return look(
        *(
            {name: f"{value} {number}" if isinstance(value, str) else value for name, value in fields.items()}
            for number in range(times)
        )
    )


def roles_of(seen: RowProfile, **given: str) -> dict[str, str]:
    return infer_roles(seen, FieldFlags(**given)).mapping.model_dump(exclude_none=True)


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
        (("question", "remark"), {"instruction": "question", "response": "remark"}),
        (("ticket", "answer"), {"instruction": "ticket", "response": "answer"}),
        (("prompt_id", "prompt", "response_id", "response"), {"instruction": "prompt", "response": "response"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_usual_names_are_recognised(fields: tuple[str, ...], mapping: dict[str, str]) -> None:
    assert roles_of(repeat(dict.fromkeys(fields, "some words"))) == mapping


def test_every_guess_reports_its_share() -> None:
    seen = look(*({"question": f"q{n}", "answer": f"a{n}", "context": "c" if n < 2 else ""} for n in range(5)))
    reasons = {guess.name: guess.reason for guess in infer_roles(seen).guesses}
    assert reasons["prompt"] == "its name; in 5 of 5 rows"
    assert reasons["context"] == "its name; in 2 of 5 rows"


@pytest.mark.parametrize("name", ["messages", "conversations", "dialog", "whatever"])
def test_chats_are_recognised_by_their_values(name: str) -> None:
    assert roles_of(repeat({"id": "x", "prompt": "again", name: CHAT})) == {"messages": name}


def test_sharegpt_conversations_are_chats() -> None:
    turns = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "No one."}]
    assert roles_of(repeat({"conversations": turns})) == {"messages": "conversations"}


def test_text_with_marked_turns_is_templated() -> None:
    text = "<|user|>\nWho?\n<|end|>\n<|assistant|>\nNo one.\n<|end|>"
    roles = infer_roles(repeat({"text": text}))
    assert roles.kind == "templated"
    assert roles.mapping.text == "text"
    assert roles.guesses[0].reason == "already templated; in 4 of 4 rows"


def test_prompt_and_answer_win_over_their_templated_text() -> None:
    text = "### Instruction:\nWho?\n\n### Response:\nNo one."
    assert "text" not in roles_of(repeat({"instruction": "Who?", "output": "No one.", "text": text}))


def test_object_with_an_instruction_is_a_task() -> None:
    roles = infer_roles(repeat({"input": {"instruction": "Do it.", "schema": "s"}, "output": "done"}))
    assert (roles.kind, roles.reader.task, roles.reader.answer) == ("task", "input", "output")


def test_answer_may_be_an_object() -> None:
    roles = infer_roles(repeat({"question": "q", "output": {"a": 1}}))
    assert roles.mapping.answer == "output"
    assert roles.guesses[-1].reason == "its name; in 4 of 4 rows, 4 of them written as JSON"


@pytest.mark.parametrize("value", [3, True, 2.5])
def test_answer_may_be_a_number_if_its_name_says_so(value: object) -> None:
    roles = infer_roles(repeat({"question": "q", "label": value, "n": 7, "remark": "r"}))
    assert (roles.mapping.instruction, roles.mapping.answer) == ("question", "label")
    assert "written as JSON" in roles.guesses[1].reason


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {"prompt": [*CHAT, CHAT[0]], "completion": CHAT[1:]},
        {"prompt": CHAT[:1], "completion": "No one."},
        {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": CHAT[1:]},
    ],
    ids=["one turn", "more turns", "a text", "preferences"],
)
def test_conversational_prompt_and_completion_are_joined(fields: Fields) -> None:
    seen = repeat(fields)
    answer = next(name for name in fields if name != "prompt")
    given = infer_roles(seen, FieldFlags(prompt="prompt", answer=answer))
    for roles in (infer_roles(seen), given):
        assert roles.mapping.model_dump(exclude_none=True) == {"instruction": "prompt", "response": answer}
        assert f"the messages of prompt and {answer} are joined into one conversation" in roles.notes
        content = roles.reader.read(seen.rows[0])
        assert isinstance(content, Conversation)
        assert (content.messages[0].content, content.messages[-1].role) == ("Who?", "assistant")


def test_complete_chat_with_a_label_stays_a_chat() -> None:
    assert roles_of(repeat({"messages": [*CHAT, CHAT[0]], "label": "good"})) == {"messages": "messages"}


def test_chats_take_a_system_prompt_and_no_context() -> None:
    seen = repeat({"conversations": CHAT, "system": "Be brief.", "about": "them"})
    assert roles_of(seen) == {"messages": "conversations", "system": "system"}
    assert roles_of(seen, system="about") == {"messages": "conversations", "system": "about"}
    assert roles_of(seen, messages="conversations", system="about") == {"messages": "conversations", "system": "about"}
    for named in ({"context": "about"}, {"messages": "conversations", "context": "about"}):
        with pytest.raises(
            InputError, match="--context-field about: not read, because conversations is the complete row"
        ):
            infer_roles(seen, FieldFlags(**named))


@pytest.mark.parametrize(
    "fields",
    [
        {"input": {"instruction": "Do it."}, "output": "done", "extra": "x"},
        {"text": "<|user|>\nWho?\n<|end|>\n<|assistant|>\nNo one.\n<|end|>", "extra": "x"},
    ],
    ids=["task", "templated"],
)
@pytest.mark.parametrize("role", ["context", "system"])
def test_flags_are_never_ignored(fields: Fields, role: str) -> None:
    with pytest.raises(InputError, match=f"--{role}-field extra: .* is the complete row"):
        infer_roles(repeat(fields), FieldFlags(**{role: "extra"}))


@pytest.mark.parametrize("fields", [("question", "answer"), ("input", "output"), ("id", "body")])
def test_one_flag_leaves_the_other_field(fields: tuple[str, str]) -> None:
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
def test_flags_win_over_names(given: dict[str, str], mapping: dict[str, str]) -> None:
    assert roles_of(repeat({"a": "x", "b": "y", "c": "z"}), **given) == mapping


@pytest.mark.parametrize(
    ("fields", "prompt", "answer"),
    [
        ({"subj": "A", "body": "B", "team": "C"}, "{subj}\n{body}", "team"),
        ({"ticket": "A", "stars": 3}, "ticket", "stars"),
    ],
)
def test_only_field_that_is_left_is_the_answer(fields: Fields, prompt: str, answer: str) -> None:
    assert roles_of(repeat(fields), prompt=prompt) == {"instruction": prompt, "response": answer}


def test_one_flag_leaves_the_other_role_to_be_inferred() -> None:
    seen = repeat({"question": "q", "remark": "r", "answer": "a"})
    assert roles_of(seen, prompt="remark") == {"instruction": "remark", "response": "answer"}
    assert roles_of(seen, answer="remark") == {"instruction": "question", "response": "remark"}


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (
            repeat({"a": "x", "b": "y", "c": "z"}),
            ("cannot infer which field", '--answer-field; several fields make one prompt: --prompt-field "{a}\\n{b}"'),
        ),
        (repeat({"body": "only words"}), ("single field of text, body", "--text-field body")),
        (repeat({"text": "only words"}), ("single field of text, text", "--text-field text")),
        (repeat({"question": "q", "id": "7"}), ("cannot infer which field", "--prompt-field and --answer-field")),
        (
            repeat({"id": "1", "body": "only words"}),
            ("cannot infer which field", "--prompt-field and --answer-field"),
        ),
        (repeat({"id": 1, "body": "only words"}), ("single field of text, body", "--text-field body")),
        (repeat({"question": "q", "n": 3}), ("single field of text, question", "--answer-field name them")),
        (repeat({"a": 1, "b": 2}), ("most rows have no field of text", "they need prompts and answers")),
        (
            look(*({"question": f"q{n}", **({"answer": "a"} if n == 0 else {})} for n in range(5))),
            ("single field of text, question", "answer: text in 1 of 5 rows"),
        ),
        (
            repeat({"input": {"question": "q"}, "n": 1}),
            ("no field of text", "objects and lists with dots: input.question"),
        ),
        (
            repeat({"meta": {"id": 1}, "conversation": {"messages": CHAT}}),
            ("messages inside another field, conversation.messages", "add --messages-field conversation.messages"),
        ),
        (repeat({"input": {"instruction": "q"}}), ("no field of text", "input: JSON in 4 of 4 rows")),
        (repeat({"prompt": CHAT[:1], "n": 1}), ("4 rows: prompt has no assistant message", "into one list")),
        (
            repeat({"messages": CALLS}),
            ("4 rows: a tool call has no function name", "tool calls have OpenAI's form"),
        ),
        (
            repeat({"messages": AGENTS}),
            ("4 rows: a message has an unknown role: 'customer'", "rename others"),
        ),
        (
            repeat({"q": b"q", "answer": "a"}),
            ("single field of text, answer", "q: bytes or dates in 4 of 4 rows"),
        ),
        (
            repeat({"message_id": "1", "text": "How?", "role": "prompter"}),
            ("cannot infer which field", "--prompt-field and --answer-field"),
        ),
        (look({"a": "", "b": None}), ("no field of text", "a: empty in all rows")),
    ],
)
def test_unclear_layouts_are_refused_with_a_hint(seen: RowProfile, words: tuple[str, str]) -> None:
    with pytest.raises(InputError) as caught:
        infer_roles(seen)
    for word in words:
        assert word in str(caught.value)


def test_a_rejected_answer_is_never_suggested() -> None:
    with pytest.raises(InputError) as caught:
        infer_roles(repeat({"chosen": "Human: How? Assistant: So.", "rejected": "Human: How? Assistant: No."}))
    assert "--answer-field rejected" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prompt": "questoin"}, "did you mean 'question'?"),
        ({"prompt": "question", "answer": "question"}, "one field cannot have two roles"),
        (
            {"text": "answer", "prompt": "question"},
            "--prompt-field question: not read, because answer is the complete row",
        ),
        ({"messages": "answer"}, "4 rows: answer is not a list of messages"),
    ],
)
def test_flags_that_do_not_match_are_refused(given: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words.replace("?", r"\?")):
        infer_roles(repeat({"question": "q", "answer": "a"}), FieldFlags(**given))


def test_chats_stored_as_json_text_are_recognised() -> None:
    chat = json.dumps(CHAT)
    assert roles_of(look(*[{"id": "1", "messages": chat}] * 4)) == {"messages": "messages"}
    assert roles_of(look(*[{"conversations": f" {chat}"}] * 4)) == {"messages": "conversations"}
    people = '[{"from": "Ann", "to": "Bob"}]'  # an answer in JSON
    assert roles_of(look(*[{"question": "q", "answer": people}] * 4)) == {
        "instruction": "question",
        "response": "answer",
    }


def test_chats_as_python_writes_them_are_refused_with_row_and_column() -> None:
    with pytest.raises(InputError) as caught:
        infer_roles(look(*[{"id": "1", "messages": str(CHAT)}] * 4))
    assert (
        "4 rows: messages is not a list of messages: broken JSON: a Python list, which json.dumps writes as JSON "
        "(line 1, 2, 3, 4)" in str(caught.value)
    )


def test_datasets_of_mostly_unusable_rows_are_refused() -> None:
    seen = look({"question": "q", "answer": "a"}, *({"question": "", "answer": f"a{n}", "n": "x"} for n in range(3)))
    with pytest.raises(InputError, match="3 of 4 rows cannot be used"):
        infer_roles(seen, FieldFlags(prompt="question", answer="answer"))


@given(st.text(max_size=30))
def test_any_field_name_is_accepted(name: str) -> None:
    assert 0 <= score_name(name, "prompt") <= 100


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["instruction", "input", "output", "text", "messages", "label", "id", "x", "context"])


@given(st.lists(st.dictionaries(NAMES, JSON, min_size=1, max_size=4), min_size=1, max_size=6))
def test_any_rows_are_read_or_refused(rows: list[Fields]) -> None:
    """A mapping names existing fields, each once."""
    seen = look(*rows)
    try:
        roles = infer_roles(seen)
    except InputError:
        return
    named = list(roles.mapping.model_dump(exclude_none=True).values())
    assert len(set(named)) == len(named)
    assert set(named) <= set(seen.fields)
    json.dumps([guess.reason for guess in roles.guesses])
    assert any(not isinstance(roles.reader.read(row), BadRow) for row in seen.rows)


SQUAD = {"id": "a", "title": "T", "context": "Made in Lyon.", "question": "Where?"}


def test_squad_answers_are_the_first_of_their_list() -> None:
    rows: list[dict[str, Any]] = [
        {**SQUAD, "answers": {"text": [f"Lyon {n}", "Lyons"], "answer_start": [8]}} for n in range(4)
    ]
    roles = infer_roles(look(*rows))
    mapping = {"instruction": "question", "input": "context", "response": "answers.text.0"}
    assert roles.mapping.model_dump(exclude_none=True) == mapping
    content = roles.reader.read(Row(number=1, fields=rows[2]))
    assert isinstance(content, Conversation)
    assert content.messages[-1].content == "Lyon 2"
    assert {guess.value for guess in roles.guesses if guess.name == "not used"} == {"id, title"}


def test_text_is_not_the_answer_next_to_answers_in_an_object() -> None:
    with pytest.raises(InputError, match="cannot infer") as error:
        infer_roles(repeat({"question": "Where?", "title": "T", "answers": {"spans": {"first": "Lyon"}}}))
    assert "answers.spans.first" in str(error.value.hint)
    assert '"{question}\\n{title}"' in str(error.value.hint)


def test_reason_of_a_nested_field_counts_its_rows() -> None:
    rows = repeat({"question": "Where?", "reply": {"text": ["Lyon"]}})
    roles = infer_roles(rows, FieldFlags(answer="reply.text"))
    assert roles.guesses[1].reason == "set by flag; in 4 of 4 rows, 4 of them written as JSON"


def test_ids_are_not_offered_for_the_prompt() -> None:
    roles = infer_roles(repeat({"question": "Where?", "id": "a", "answer": "Here."}))
    assert roles.guesses[-1].reason == "no role for these fields"


def test_nan_is_a_missing_value() -> None:
    seen = repeat({"question": "How many?", "input": float("nan"), "answer": "Two"})
    assert roles_of(seen) == {"instruction": "question", "response": "answer"}
