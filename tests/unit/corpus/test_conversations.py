"""Field mapping of rows, and reasons why a row is unusable."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from typing import Any

import pytest

from launcher.core.errors import InputError
from launcher.corpus.conversations import (
    Conversation,
    Message,
    RowReader,
    find_task_field,
    make_row_reader,
)
from launcher.corpus.rows import BadRow, Json, Row
from launcher.manifest.dataset import FieldMapping


def read(reader: RowReader, **fields: Any) -> Any:
    return reader.read(Row(number=3, fields=fields))


def reason(reader: RowReader, **fields: Any) -> str:
    result = read(reader, **fields)
    assert isinstance(result, BadRow), result
    assert result.number == 3
    return result.reason


TURN = RowReader(system="system", question="q", context="schema", answer="a")
CHAT = RowReader(messages="messages")


def test_question_context_system_and_answer() -> None:
    assert read(TURN, system="Be brief.", q="How many?", schema="Film", a="42") == Conversation(
        (Message("system", "Be brief."), Message("user", "How many?", "Film"), Message("assistant", "42"))
    )


def test_system_and_context_may_be_missing() -> None:
    expected = Conversation((Message("user", "How many?"), Message("assistant", "42")))
    assert read(TURN, q="How many?", a="42") == expected
    assert read(TURN, system=None, schema="", q="How many?", a="42") == expected


def test_objects_become_json() -> None:
    conversation = read(TURN, q="Make one", schema=["a", "b"], a={"title": "Ä", "on": datetime.date(2024, 1, 2)})
    assert conversation.messages[0].context == '["a", "b"]'
    assert conversation.messages[1].content == '{"title": "Ä", "on": "2024-01-02"}'


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"q": "x"}, "no field a"),
        ({"q": "x", "a": None}, "a is empty"),
        ({"q": "x", "a": " \n\t"}, "a is empty"),
        ({"q": "x", "a": float("nan")}, "a is empty"),
        ({"q": "x", "a": b"42"}, "a is of type bytes, not text"),
        ({"q": "x", "a": "bad \ud800"}, "a value contains a lone surrogate"),
        ({"q": "x", "a": {"deep": ["bad \udfff"]}}, "a value contains a lone surrogate"),
    ],
)
def test_unusable_rows_say_why(fields: dict[str, Any], expected: str) -> None:
    assert reason(TURN, **fields) == expected


def test_numbers_and_flags_are_written_as_json_writes_them() -> None:
    for value, text in ((42, "42"), (1.5, "1.5"), (True, "true"), (False, "false"), (0, "0")):
        assert read(TURN, q="x", a=value).messages[-1].content == text
    assert read(TURN, q=7, a="x").messages[0].content == "7"


def test_decimals_of_parquet_are_numbers() -> None:
    assert read(TURN, q="x", a=Decimal("19.90")).messages[-1].content == "19.90"
    assert read(TURN, q="x", a={"total": Decimal("19.9")}).messages[-1].content == '{"total": 19.9}'


def test_messages_with_a_separate_system_field() -> None:
    reader = RowReader(messages="messages", system="system")
    chat = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    spoken = (Message("user", "u"), Message("assistant", "a"))
    own = [{"role": "system", "content": "s"}]
    assert read(reader, system="s", messages=chat) == Conversation((Message("system", "s"), *spoken))
    assert read(reader, system="s", messages=own + chat) == Conversation((Message("system", "s"), *spoken))
    assert read(reader, system="", messages=own + chat) == Conversation((Message("system", "s"), *spoken))
    assert read(reader, messages=chat) == Conversation(spoken)
    assert reason(reader, system="other", messages=own + chat).startswith("two system messages")


def test_a_chat_that_asks_and_one_that_answers_are_one() -> None:
    """As TRL has them; the context goes with the last that was asked."""
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    answered = [{"role": "assistant", "content": "a"}]
    expected = Conversation((Message("system", "s"), Message("user", "u", "c"), Message("assistant", "a")))
    assert read(TURN, q=asked, schema="c", a=answered) == expected
    assert read(TURN, q=asked, schema="c", a="a") == expected
    assert (
        reason(TURN, q=asked, a=[{"role": "assistant", "content": None}]) == "a message of role assistant has no text"
    )
    assert reason(TURN, q=[{"role": "agent", "content": "u"}], a="a") == "a message has an unknown role: 'agent'"


@pytest.mark.parametrize("prompt", ["u", [{"role": "user", "content": "u"}]])
def test_an_answer_that_repeats_the_prompt_is_read_after_it(prompt: Json) -> None:
    """Preference data often has the complete conversation in chosen."""
    chosen = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    expected = Conversation((Message("user", "u", "c"), Message("assistant", "a")))
    assert read(TURN, q=prompt, schema="c", a=chosen) == expected
    assert read(TURN, q="other", a=chosen).messages[-1].content == json.dumps(chosen)


@pytest.mark.parametrize(
    "answer", [[{"role": "admin", "name": "Ada"}], [{"from": 1, "to": 2}], [{"role": "user", "content": "x"}], []]
)
def test_lists_that_are_no_answer_of_the_assistant_stay_json(answer: list[Any]) -> None:
    assert read(TURN, q="x", a=answer).messages[-1].content == json.dumps(answer)


def test_text() -> None:
    assert read(RowReader(text="text"), text="<|im_start|>") == "<|im_start|>"
    assert reason(RowReader(text="text"), text="") == "text is empty"


def test_messages_and_sharegpt() -> None:
    expected = Conversation((Message("system", "s"), Message("user", "u"), Message("assistant", "a")))
    assert (
        read(
            CHAT,
            messages=[
                {"role": "system", "content": "s"},
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": "a"},
            ],
        )
        == expected
    )
    assert (
        read(
            RowReader(messages="conversations"),
            conversations=[
                {"from": "system", "value": "s"},
                {"from": "human", "value": "u"},
                {"from": "gpt", "value": "a"},
            ],
        )
        == expected
    )


def test_a_developer_message_is_the_system_message() -> None:
    turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    conversation = read(CHAT, messages=[{"role": "developer", "content": "s"}, *turns])
    assert isinstance(conversation, Conversation)
    assert conversation.messages[0] == Message("system", "s")
    assert read(CHAT, messages=[{"role": "developer", "content": ""}, *turns]) == read(CHAT, messages=turns)


@pytest.mark.parametrize("system", ["", " \n", None])
def test_an_empty_system_message_costs_nothing(system: str | None) -> None:
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    assert read(CHAT, messages=messages) == Conversation((Message("user", "u"), Message("assistant", "a")))


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": 'ü, "u"'}, {"role": "assistant", "content": "a\nb"}],
        [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a", "train": False}],
        [{"role": "user", "content": "u"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
    ],
)
def test_messages_may_be_json_text(messages: Any) -> None:
    """As in a column of a CSV or Parquet file."""
    assert read(CHAT, messages=json.dumps(messages)) == read(CHAT, messages=messages)
    assert read(CHAT, messages=f" {json.dumps(messages, ensure_ascii=False, indent=1)}\n") == read(
        CHAT, messages=messages
    )


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    conversation = read(CHAT, messages=[{"role": "user", "content": parts}, {"role": "assistant", "content": "a"}])
    assert conversation.messages[0].content == "one two"


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (None, "messages is not a list of messages"),
        ("hello", "messages is not a list of messages: broken JSON: Expecting value"),
        ("", "messages is not a list of messages"),
        ("{}", "messages is not a list of messages"),
        ('"[]"', "messages is not a list of messages"),
        ('[{"role": "user"', "messages is not a list of messages: broken JSON: Expecting ',' delimiter"),
        (
            "[{'role': 'user', 'content': 'u'}]",
            "messages is not a list of messages: broken JSON: a Python list, which json.dumps writes as JSON",
        ),
        ("[" * 500 + "]" * 500, "messages is not a list of messages: nested too deeply"),
        ("[" * 50_000, "messages is not a list of messages: nested too deeply"),
        ("[" + "1" * 5000 + "]", "messages is not a list of messages: broken JSON: a number with too many digits"),
        ("null", "messages is not a list of messages"),
        ('[{"role": "narrator", "content": "x"}]', "a message has an unknown role: 'narrator'"),
        ([], "messages is not a list of messages"),
        (["hello"], "a message is not an object"),
        ([{"role": "user", "content": "u"}], "messages has no assistant message"),
        ([{"role": "assistant", "content": None}], "a message of role assistant has no text"),
        ([{"role": "assistant"}], "a message of role assistant has no text"),
        ([{"role": "user", "content": " "}], "a message of role user has no text"),
        (
            [{"role": "assistant", "content": None, "tool_calls": [{}]}],
            "a tool call has no function name",
        ),
        ([{"role": "system", "content": ""}], "messages is empty"),
        ([{"role": "narrator", "content": "x"}], "a message has an unknown role: 'narrator'"),
        ([{"role": "\ud800\x1b[2J", "content": "x"}], r"a message has an unknown role: '\ud800\x1b[2J'"),
        ([{"content": "x"}], "a message has an unknown role: None"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "a chat message has content that is not text (such as images)",
        ),
    ],
)
def test_unusable_messages_say_why(messages: Any, expected: str) -> None:
    assert reason(CHAT, messages=messages) == expected


def test_a_wrong_field_name_gets_a_suggestion() -> None:
    mapping = FieldMapping(instruction="questoin", input="shema", response="cypher")
    with pytest.raises(InputError, match="the field mapping does not match the rows") as caught:
        make_row_reader(mapping, ["question", "schema", "cypher"], source="train.jsonl")
    message = str(caught.value)
    assert message.startswith("train.jsonl: the field mapping")
    assert "field_mapping.instruction: rows have no field 'questoin'; did you mean 'question'?" in message
    assert "field_mapping.input: rows have no field 'shema'; did you mean 'schema'?" in message
    assert "hint: rows have: question, schema, cypher" in message


@pytest.mark.parametrize(
    ("mapping", "keys"),
    [
        ({"text": "t", "instruction": "q", "response": "a"}, ("instruction", "response")),
        ({"text": "t", "messages": "m", "system": "q"}, ("messages", "system")),
        ({"messages": "m", "input": "q"}, ("input",)),
    ],
)
def test_fields_next_to_a_complete_row_are_refused(mapping: dict[str, str], keys: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="does not match the rows") as caught:
        make_row_reader(FieldMapping(**mapping), ["t", "m", "q", "a"])
    for key in keys:
        assert f"training.dataset.field_mapping.{key}: would not be read, because " in str(caught.value)


def test_both_sides_are_needed() -> None:
    with pytest.raises(InputError, match=r"field_mapping\.response: missing: instruction and response must both"):
        make_row_reader(FieldMapping(instruction="question"), ["question"])
    with pytest.raises(InputError, match=r"field_mapping\.instruction: missing: instruction and response must both"):
        make_row_reader(FieldMapping(output="answer"), ["answer"])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (["id", "text"], RowReader(text="text")),
        (["messages"], RowReader(messages="messages")),
        (["conversations"], RowReader(messages="conversations")),
        (["instruction", "input", "output"], RowReader(question="instruction", context="input", answer="output")),
        (["question", "schema", "cypher"], RowReader(question="question", context="schema", answer="cypher")),
        (["system", "prompt", "completion"], RowReader(system="system", question="prompt", answer="completion")),
    ],
)
def test_usual_names_need_no_mapping(fields: list[str], expected: RowReader) -> None:
    assert make_row_reader(FieldMapping(), fields) == expected


def test_unusual_names_are_listed() -> None:
    with pytest.raises(InputError, match="none of the usual fields") as caught:
        make_row_reader(FieldMapping(), ["frage", "antwort"])
    assert "rows have: frage, antwort" in caught.value.hint


def test_rows_of_published_multi_task_data() -> None:
    """An instruction with what goes with it in one object; the answer is `output`, or `chosen` in preference data."""
    given: dict[str, Json] = {
        "instruction": "Repair it.",
        "broken_json": "{",
        "schema": {"type": "object"},
        "note": None,
    }
    rows = [Row(number=1, fields={"task": "repair", "input": given, "output": "{}"})]
    assert find_task_field(rows) == "input"
    reader = make_row_reader(FieldMapping(), ["task", "input", "output"], task="input")
    content = reader.read(rows[0])
    context = 'Broken json:\n{\n\nSchema:\n{"type": "object"}'
    assert content == Conversation((Message("user", "Repair it.", context), Message("assistant", "{}")))
    chosen = make_row_reader(FieldMapping(), ["input", "chosen", "rejected"], task="input")
    assert chosen.answer == "chosen"
    assert reader.read(Row(number=2, fields={"input": "text", "output": "x"})) == BadRow(
        number=2, reason="input is not an object"
    )
    empty = reader.read(Row(number=3, fields={"input": {"instruction": " "}, "output": "x"}))
    assert empty == BadRow(number=3, reason="instruction is empty")


def test_a_plain_input_is_no_task() -> None:
    assert find_task_field([Row(number=1, fields={"instruction": "a", "input": "b", "output": "c"})]) is None


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), {"x": float("nan")}, [{"y": [float("inf")]}]])
def test_numbers_that_json_does_not_have_are_refused(value: object) -> None:
    assert reason(TURN, q="one", a=value) == "a contains NaN or Infinity, which is not JSON"


@pytest.mark.parametrize("value", [{"x": b"\xff"}, [b"abc"], {"x": [bytearray(b"1")]}])
def test_nested_bytes_are_refused(value: object) -> None:
    assert reason(TURN, q="one", a=value) == "a value contains bytes, which are not text"


FIELDS = ["subject", "body", "answer", "a.b", "{odd}", "meta", "meta.title"]


def make_format_reader(instruction: str, **others: str) -> RowReader:
    return make_row_reader(FieldMapping(instruction=instruction, response="answer", **others), FIELDS)


@pytest.mark.parametrize(
    ("instruction", "question"),
    [
        ("{subject}\n{body}", "S\nB"),
        ("Ticket {{1}}: {subject}", "Ticket {1}: S"),
        ("{a.b} / {meta.title}", "AB / T"),
        ("meta.title", "T"),
        ("a.b", "AB"),
        ("{odd}", "O"),
        ("{subject}{subject}", "SS"),
        ("{meta}", '{"title": "T"}'),
    ],
)
def test_several_fields_make_one_prompt(instruction: str, question: str) -> None:
    fields: dict[str, Json] = {
        "subject": "S",
        "body": "B",
        "answer": "x",
        "a.b": "AB",
        "{odd}": "O",
        "meta": {"title": "T"},
    }
    content = make_format_reader(instruction).read(Row(number=1, fields=fields))
    assert content == Conversation((Message("user", question), Message("assistant", "x")))


def test_empty_fields_of_a_format_are_empty_text_and_all_empty_rejects_the_row() -> None:
    reader = make_format_reader("{subject}\n{body}", input="about {meta}", system="for {a.b}")
    content = reader.read(Row(number=1, fields={"subject": None, "body": "B", "answer": "x", "a.b": float("nan")}))
    assert content == Conversation((Message("user", "\nB"), Message("assistant", "x")))
    rejected = reader.read(Row(number=2, fields={"subject": None, "body": " ", "answer": "x"}))
    assert isinstance(rejected, BadRow)
    assert rejected.reason == "{subject}\n{body} is empty"


@pytest.mark.parametrize(
    ("instruction", "problem"),
    [
        ("{subjct} {body}", "rows have no field 'subjct'; did you mean 'subject'?"),
        ("{meta.titel}", "rows have no field 'meta.titel'; did you mean 'meta.title'?"),
        ("{subject", "a brace without a field: write {{ for a literal {"),
        ("{} {subject}", "a brace without a field"),
        ("subject}", "a brace without a field: write }} for a literal }"),
        ("{{subject}}", "a format needs at least one {field}"),
    ],
)
def test_wrong_formats_are_errors(instruction: str, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        make_format_reader(instruction)
    assert f"training.dataset.field_mapping.instruction: {problem}" in str(caught.value).replace(
        f"{instruction!r}: ", ""
    )


def test_fixed_system_prompt_is_for_rows_without_their_own() -> None:
    mapping = FieldMapping(instruction="q", response="a", system="s")
    reader = make_row_reader(mapping, ["q", "a", "s"], system_prompt="Be brief.")
    for own, expected in (("Be long.", "Be long."), (None, "Be brief."), ("", "Be brief.")):
        content = reader.read(Row(number=1, fields={"q": "?", "a": "!", "s": own}))
        assert isinstance(content, Conversation)
        assert content.messages[0] == Message("system", expected)
    chats = make_row_reader(FieldMapping(messages="m"), ["m"], system_prompt="Be brief.")
    turns: list[Json] = [{"role": "system", "content": "Own."}, {"role": "user", "content": "?"}]
    content = chats.read(Row(number=1, fields={"m": [*turns, {"role": "assistant", "content": "!"}]}))
    assert isinstance(content, Conversation)
    assert [message.content for message in content.messages] == ["Own.", "?", "!"]
    with pytest.raises(InputError, match=r"system_prompt cannot be put into complete texts \(t\)"):
        make_row_reader(FieldMapping(text="t"), ["t"], system_prompt="Be brief.")


def test_context_and_system_of_a_mapping_are_used_without_question_and_answer() -> None:
    reader = make_row_reader(FieldMapping(input="docs"), ["instruction", "response", "docs"])
    assert reader == RowReader(question="instruction", answer="response", context="docs")


@pytest.mark.parametrize("extra", [{}, {"reasoning_content": None}, {"reasoning": "  "}, {"thinking": "hm"}])
def test_reasoning_is_kept_apart_from_the_answer(extra: dict[str, Json]) -> None:
    turns: list[Json] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **extra}]
    conversation = RowReader(messages="m").read(Row(number=1, fields={"m": turns}))
    assert isinstance(conversation, Conversation)
    answer = conversation.messages[-1]
    assert (answer.content, answer.reasoning) == ("a", "hm" if "thinking" in extra else "")
