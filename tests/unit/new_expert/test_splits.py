"""Files for validation and test are read as the training rows are, and a sample has all three."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest

from launcher.corpus.preparation import Split, make_preparation
from launcher.corpus.questions import read_held_out
from launcher.corpus.tokenizer import load_tokenizer
from launcher.errors import InputError
from launcher.inputs import Request, plan_request
from launcher.manifest import find_manifest, load_manifest
from launcher.new_expert.guesses import GivenFields
from launcher.new_expert.proposal import Wishes
from tests.unit.new_expert.inputs import make, make_rows, read_sample, write_rows

SPLITS: tuple[Split, ...] = ("train", "validation", "test")


def write_csv(rows: list[dict[str, Any]], name: str) -> Path:
    with Path(name).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return Path(name)


@pytest.mark.parametrize("split", ["validation", "test"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (bytes(range(256)) * 8, "other.jsonl: no row can be read"),
        (b"", "other.jsonl is empty: there are no rows in it"),
        (b'{"prompt": "a", "completion": "b"}\n' * 5, "other.jsonl: its fields are not those of rows.jsonl"),
        (b'{"question": "a", "answr": "b"}\n' * 5, "rows have no field 'answer', the answer of the training rows; did"),
        (
            b'{"question": "a", "answer": ""}\n' * 5,
            "other.jsonl: 5 of 5 rows cannot be used\n  5 rows: answer is empty",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_told_by_its_name(split: str, content: bytes, words: str) -> None:
    Path("other.jsonl").write_bytes(content)
    other = Path("other.jsonl")
    wishes = Wishes(validation=other) if split == "validation" else Wishes(test=other)
    with pytest.raises(InputError) as caught:
        make(write_rows(make_rows()), wishes=wishes)
    assert words in str(caught.value)
    assert not Path("sales").exists()


def test_rows_of_another_form_are_refused() -> None:
    task = [{"input": {"instruction": f"Do {n}."}, "output": "done"} for n in range(20)]
    wishes = Wishes(test=write_rows([{"input": f"Do {n}.", "output": "done"} for n in range(5)], "other.jsonl"))
    with pytest.raises(InputError, match=r"other\.jsonl: the rows are of another form than those of rows\.jsonl"):
        make(write_rows(task), wishes=wishes)


def test_a_few_bad_rows_are_a_note_with_the_files_name() -> None:
    rows: list[dict[str, Any]] = [*make_rows(9, first=100), {"question": "?", "answer": None}]
    made = make(write_rows(make_rows()), wishes=Wishes(test=write_rows(rows, "test.jsonl")))
    assert "test.jsonl: 1 of 10 rows cannot be used: answer is empty (line 10)" in made.proposal.notes


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (0, "test.jsonl: 20 of 20 rows ask what training rows ask, too; it cannot tell what was learnt"),
        (35, "test.jsonl: 5 of 20 rows ask what training rows ask, too"),
        (40, None),
    ],
)
def test_rows_that_are_trained_on_are_no_test(first: int, words: str | None) -> None:
    made = make(write_rows(make_rows()), wishes=Wishes(test=write_rows(make_rows(20, first), "test.jsonl")))
    assert made.proposal.notes == (() if words is None else (words,))


def test_names_that_tell_the_format_need_no_other_word() -> None:
    """One format for all files would read the second as what it is not."""
    wishes = Wishes(test=write_rows(make_rows(9, first=100), "test.jsonl"))
    make(write_csv(make_rows(), "rows.csv"), wishes=wishes)
    dataset = load_manifest(find_manifest("sales")).manifest.training.dataset
    assert (dataset.format, dataset.path, dataset.test_path) == (None, "../rows.csv", "../test.jsonl")
    planned = plan_request(Request(expert="sales", gpu="h100", profile="full"))
    wanted = make_preparation(planned.plan, planned.loaded.folder, load_tokenizer("launcher/tiny", ()))
    assert read_held_out(wanted, None).num_rows == 9


def test_formats_that_no_one_word_can_say_are_refused() -> None:
    wishes = Wishes(test=write_csv(make_rows(9, first=100), "test.csv"))
    with pytest.raises(InputError, match="of different formats, which not all of their names tell"):
        make(write_rows(make_rows(), "rows.txt"), wishes=wishes)
    make(write_rows(make_rows(), "rows.txt"), wishes=Wishes(test=write_rows(make_rows(9, 100), "test.jsonl")))
    assert load_manifest(find_manifest("sales")).manifest.training.dataset.format == "jsonl"


def test_the_sample_is_cut_into_parts_that_share_no_question() -> None:
    rows = make_rows(150)
    make(write_rows([*rows, *({**row, "answer": "Or so."} for row in rows)]))
    asked = {name: {row["question"] for row in read_sample(name)} for name in SPLITS}
    assert sum(map(len, asked.values())) == 150
    assert len(set().union(*asked.values())) == 150
    assert len(asked["train"]) > 100
    assert 5 <= len(asked["validation"]) <= 30
    assert 5 <= len(asked["test"]) <= 30


def test_given_files_are_the_samples_own_and_are_what_is_asked() -> None:
    """The smoke profile, too, asks the rows that were meant to be asked."""
    validation, test = make_rows(20, first=500), make_rows(30, first=600)
    wishes = Wishes(validation=write_rows(validation, "v.jsonl"), test=write_rows(test, "t.jsonl"))
    make(write_rows(make_rows(60)), wishes=wishes)
    asked = {name: [row["question"] for row in read_sample(name)] for name in SPLITS}
    assert asked == {
        name: [row["question"] for row in rows]
        for name, rows in zip(SPLITS, (make_rows(60), validation, test), strict=True)
    }
    planned = plan_request(Request(expert="sales", profile="smoke"))
    wanted = make_preparation(planned.plan, planned.loaded.folder, load_tokenizer("launcher/tiny", ()))
    held_out = read_held_out(wanted, None)
    assert (held_out.split, {row.instruction for row in held_out.rows}) == ("test", set(asked["test"]))
    assert {row.instruction for row in read_held_out(wanted, None, "validation").rows} == set(asked["validation"])
    assert wanted.notes == ()


def test_a_field_that_few_rows_have_is_a_field_of_every_part() -> None:
    rows = [{"question": f"q{n}", "answer": f"a{n}", **({"context": "c"} if n == 7 else {})} for n in range(60)]
    make(write_rows(rows))
    planned = plan_request(Request(expert="sales", profile="smoke"))
    wanted = make_preparation(planned.plan, planned.loaded.folder, load_tokenizer("launcher/tiny", ()))
    for name in SPLITS:
        assert read_held_out(wanted, None, name).num_rows == len(read_sample(name))


def test_rows_that_are_all_too_long_are_the_sample_all_the_same() -> None:
    rows = [{"question": f"q{n}", "answer": f"word {n} " * 4000} for n in range(5)]
    made = make(write_rows(rows))
    assert len(read_sample("train")) == 5
    long = "all rows are longer than the 4,096 tokens of the smoke profile: in its sample they are cut"
    assert made.proposal.notes == (long,)


def test_half_a_character_is_escaped_where_it_is_written() -> None:
    """In a part of a message that nobody reads, and in a field that plays no role."""
    turns = '[{"role": "user", "content": "q%d"}, {"role": "assistant", "content": "ä%d", "note": "\\ud800"}]'
    lines = [f'{{"messages": {turns % (n, n)}, "me\\ud800ta": "\\udfff"}}' for n in range(40)]
    Path("rows.jsonl").write_text("\n".join(lines))
    made = make(Path("rows.jsonl"))
    assert made.proposal.notes == (
        r"not looked at: 'me\ud800ta', a name with half a character in it (a lone surrogate)",
    )
    assert {row["messages"][1]["note"] for name in SPLITS for row in read_sample(name)} == {"\ud800"}
    Path("rows.jsonl").write_text("".join(f'{{"que\\ud800stion": "q{n}", "answer": "a{n}"}}\n' for n in range(40)))
    with pytest.raises(InputError, match=r"'que\\ud800stion': a name with half a character in it"):
        make(Path("rows.jsonl"), force=True)


def test_a_path_that_no_manifest_can_name_is_refused() -> None:
    name = os.fsdecode(b"r\xff.jsonl")
    with pytest.raises(InputError, match="its name is not UTF-8"):
        make(write_rows(make_rows(), name))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rows.jsonl", '{"question": "a%d", "question": "b%d", "answer": "c%d"}\n', "'question' stands twice in 40"),
        ("rows.csv", '"What is %d?","It is %d%d."\n', "reads like a row ('What is 0?')"),
    ],
)
def test_what_is_lost_of_a_file_is_told(name: str, content: str, words: str) -> None:
    Path(name).write_text("".join(content % (n, n, n) for n in range(40 if name == "rows.jsonl" else 41)))
    [note] = make(Path(name)).proposal.notes
    assert words in note


def test_numbers_are_answers_in_the_sample_and_in_training() -> None:
    make(write_rows([{"text": f"t{n}", "label": n % 3} for n in range(60)]))
    planned = plan_request(Request(expert="sales", profile="smoke"))
    wanted = make_preparation(planned.plan, planned.loaded.folder, load_tokenizer("launcher/tiny", ()))
    assert {row.answer for row in read_held_out(wanted, None, "train").rows} == {"0", "1", "2"}


def test_chats_in_two_fields_are_trained_as_one() -> None:
    rows = [
        {"prompt": [{"role": "user", "content": f"q{n}"}], "completion": [{"role": "assistant", "content": f"a{n}"}]}
        for n in range(60)
    ]
    for fields in (None, GivenFields(prompt="prompt", answer="completion")):
        made = make(write_rows(rows), wishes=Wishes(fields=fields), force=True)
        segments = made.proposal.mask.segments
        assert [segment.text for segment in segments if segment.is_trained] == [
            f"a{made.proposal.mask.row - 1}<|im_end|>"
        ]
        assert "content" not in json.dumps([segment.text for segment in segments])
