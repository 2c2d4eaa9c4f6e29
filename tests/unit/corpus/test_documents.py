"""Documents: segments by template, rejections with reasons, and the prompt hash."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.core.errors import InputError
from launcher.corpus.conversations import RowReader
from launcher.corpus.documents import Document, DocumentBuilder, make_template
from launcher.corpus.rows import BadRow, Json, Row
from launcher.corpus.templates import CHATML, LLAMA3, Segment
from launcher.corpus.tokenizer import BaseTokenizer
from tests.conftest import SHARED
from tests.unit.corpus.families import FAMILIES, write_family
from tests.unit.corpus.inputs import write_base

TURNS = RowReader(question="q", answer="a")
TEXT = RowReader(text="text")


def make(reader: RowReader, fields: dict[str, Json], *, trains_all: bool = False) -> Document | BadRow:
    return DocumentBuilder(reader=reader, template=CHATML, trains_all=trains_all).make(Row(number=5, fields=fields))


def made(reader: RowReader, fields: dict[str, Json], *, trains_all: bool = False) -> Document:
    document = make(reader, fields, trains_all=trains_all)
    assert isinstance(document, Document), document
    return document


def test_all_trains_everything() -> None:
    document = made(TURNS, {"q": "One?", "a": "1"}, trains_all=True)
    assert document.segments == (
        Segment("<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n", True),
    )


def test_a_row_without_an_answer_is_rejected_with_its_line() -> None:
    assert make(TURNS, {"q": "One?", "a": " \n"}) == BadRow(number=5, reason="a is empty")


def test_plain_text_is_trained_completely_or_rejected() -> None:
    assert make(TEXT, {"text": "Once upon a time"}) == BadRow(
        number=5, reason="templated text without an answer (no assistant marker)"
    )
    assert made(TEXT, {"text": "Once"}, trains_all=True).segments == (Segment("Once<|im_end|>", True),)
    assert made(TEXT, {"text": "Once<|im_end|>\n"}, trains_all=True).segments == (Segment("Once<|im_end|>\n", True),)


def test_plain_text_gets_the_start_and_end_of_the_tokenizer(tmp_path: Path) -> None:
    """The base's chat template has not rendered it, so its end of a turn and its missing BOS do not apply."""
    tokenizer = write_family(tmp_path, FAMILIES["gemma"])
    template = make_template("tokenizer", tokenizer)
    assert template.end_token != tokenizer.end_of_text
    builder = DocumentBuilder(reader=TEXT, template=template, trains_all=True)
    assert tokenizer.start_of_text
    start, end = tokenizer.start_of_text, tokenizer.end_of_text
    for text in ("Once", f"{start}Once{end}"):
        document = builder.make(Row(number=1, fields={"text": text}))
        assert isinstance(document, Document)
        assert document.segments == (Segment(f"{start}Once{end}", True),)


@pytest.mark.parametrize("trains_all", [False, True])
def test_the_hash_is_of_the_prompt_whatever_is_trained(trains_all: bool) -> None:
    one = made(TURNS, {"q": "One?", "a": "1"}, trains_all=trains_all)
    same = made(TURNS, {"q": "One?", "a": "uno"}, trains_all=trains_all)
    other = made(TURNS, {"q": "Two?", "a": "1"}, trains_all=trains_all)
    assert one.prompt_hash == same.prompt_hash != other.prompt_hash
    assert one.prompt_hash == made(TURNS, {"q": "One?", "a": "1"}).prompt_hash


def test_the_hash_depends_on_neither_template_nor_system_prompt() -> None:
    """So that prompts and templates can be compared on the same validation rows."""
    row = Row(number=1, fields={"q": "One?", "a": "1", "s": "Count."})
    readers = (TURNS, replace(TURNS, system_prompt="Be brief."), replace(TURNS, system_prompt="Be exact."))
    documents = [
        DocumentBuilder(reader=reader, template=template, trains_all=False).make(row)
        for reader in readers
        for template in (CHATML, LLAMA3)
    ]
    assert len({document.prompt_hash for document in documents if isinstance(document, Document)}) == 1
    assert len({document.segments for document in documents if isinstance(document, Document)}) == 6
    own = made(replace(TURNS, system="s"), dict(row.fields))
    assert own.prompt_hash != made(TURNS, dict(row.fields)).prompt_hash, "the row's own system message is asked, too"


@pytest.mark.parametrize(
    "same",
    ["what is  an axolotl", " What is\nan axolotl ?", "What is an \u201cAxolotl\u201d?", "What is\u00a0an axolotl..."],
)
def test_the_hash_ignores_case_whitespace_and_punctuation(same: str) -> None:
    question = made(TURNS, {"q": "What is an axolotl?", "a": "1"})
    assert made(TURNS, {"q": same, "a": "1"}).prompt_hash == question.prompt_hash
    for other in ("What is an axolotl-like animal?", "What was an axolotl?"):
        assert made(TURNS, {"q": other, "a": "1"}).prompt_hash != question.prompt_hash
    signs = [made(TURNS, {"q": text, "a": "1"}).prompt_hash for text in ("?", "!", "1.5", "15", "1,5", "-1")]
    assert len(set(signs)) == len(signs)


def test_a_template_that_renders_nothing_is_refused(tmp_path: Path) -> None:
    base = BaseTokenizer(folder=write_base(tmp_path, template="{# nothing #}"))
    with pytest.raises(InputError, match="the chat template leaves out the answer"):
        make_template("tokenizer", base)


def test_excluded_answers_are_not_trained() -> None:
    messages: list[Json] = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "wrong", "train": False},
        {"role": "user", "content": "Again?"},
        {"role": "assistant", "content": "1"},
    ]
    reader = RowReader(messages="messages")
    for flag in ({"train": False}, {"weight": 0}):
        fields: dict[str, Json] = {
            "messages": [messages[0], {"role": "assistant", "content": "wrong", **flag}, *messages[2:]]
        }
        completion = made(reader, fields)
        assert [part.text for part in completion.segments if part.is_trained] == ["1<|im_end|>"]
        assert completion.num_untrained_answers == 0
        whole = made(reader, fields, trains_all=True)
        assert [part.text for part in whole.segments if not part.is_trained] == ["wrong<|im_end|>"]


def test_an_excluded_answer_that_is_not_found_refuses_the_row(tmp_path: Path) -> None:
    """Otherwise loss_on: all would train it."""
    source = (
        "{% for m in messages %}{% if m.content == 'No.' %}No!{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template = make_template("tokenizer", BaseTokenizer(folder=write_base(tmp_path, template=source)))
    turns: list[Json] = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "No.", "train": False}]
    fields: dict[str, Json] = {"messages": [*turns, turns[0], {"role": "assistant", "content": "1"}]}
    builder = DocumentBuilder(reader=RowReader(messages="messages"), template=template, trains_all=True)
    document = builder.make(Row(number=5, fields=fields))
    assert isinstance(document, BadRow)
    assert document.reason == "an answer with train: false is not found in the text of the chat template"


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3", "alpaca", "tokenizer"])
def test_templates_by_name(tokenizer: BaseTokenizer, name: str) -> None:
    assert make_template(name, tokenizer).name == name


def test_end_token_must_be_one_token(tmp_path: Path) -> None:
    folder = write_base(tmp_path)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|eot_id|>", "<|other|>"))
    with pytest.raises(InputError, match=r"the template llama3 ends answers with '<\|eot_id\|>', not a token of this"):
        make_template("llama3", BaseTokenizer(folder=folder))


def test_alpaca_needs_an_end_of_text(tmp_path: Path) -> None:
    folder = write_base(tmp_path, settings={"eos_token": None})
    with pytest.raises(InputError, match="the tokenizer has no eos_token, which the alpaca template needs"):
        make_template("alpaca", BaseTokenizer(folder=folder))


def test_the_published_json_rows_are_understood() -> None:
    file = SHARED / "data/json_instructions.jsonl"
    if not file.is_file():
        pytest.skip("the published rows are not available")
    with file.open(encoding="utf-8") as lines:
        documents = [make(TEXT, json.loads(line)) for line in lines]
    good = [document for document in documents if isinstance(document, Document)]
    assert len(good) >= 0.99 * len(documents)
    for document in good:
        text = "".join(segment.text for segment in document.segments)
        assert text.startswith("<|im_start|>system\nTask: ")
        assert "<|end|>" not in text
        trained = [segment.text for segment in document.segments if segment.is_trained]
        assert len(trained) == 1
        assert trained[0].endswith("<|im_end|>")
