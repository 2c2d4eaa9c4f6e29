"""Validation and test files are read like the training rows, and sample/ holds all three splits."""

from __future__ import annotations

import csv
import json
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from launcher.core.errors import InputError
from launcher.corpus.heldout import load_held_out_rows
from launcher.corpus.spec import Split, make_preparation_spec
from launcher.corpus.tokenizer import load_tokenizer
from launcher.manifest import find_manifest, load_manifest
from launcher.new_expert.infer_roles import FieldFlags
from launcher.new_expert.proposal import Options
from launcher.request.request import Request, plan_request
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
        (b"", "other.jsonl has no rows"),
        (b'{"prompt": "a", "completion": "b"}\n' * 5, "other.jsonl has different fields than rows.jsonl"),
        (b'{"question": "a", "answr": "b"}\n' * 5, "rows have no field 'answer', which is the answer of the"),
        (
            b'{"question": "a", "answer": ""}\n' * 5,
            "other.jsonl: 5 of 5 rows cannot be used\n  5 rows: answer is empty",
        ),
    ],
)
def test_unusable_file_is_refused_by_name(split: str, content: bytes, words: str) -> None:
    Path("other.jsonl").write_bytes(content)
    other = Path("other.jsonl")
    options = Options(validation=other) if split == "validation" else Options(test=other)
    with pytest.raises(InputError) as caught:
        make(write_rows(make_rows()), options=options)
    assert words in str(caught.value)
    assert not Path("sales").exists()


def test_rows_of_another_layout_are_refused() -> None:
    task = [{"input": {"instruction": f"Do {n}."}, "output": "done"} for n in range(20)]
    options = Options(test=write_rows([{"input": f"Do {n}.", "output": "done"} for n in range(5)], "other.jsonl"))
    with pytest.raises(InputError, match=r"other\.jsonl: the rows do not have the layout of rows\.jsonl"):
        make(write_rows(task), options=options)


def test_few_unusable_rows_are_noted_with_the_file_name() -> None:
    rows: list[dict[str, Any]] = [*make_rows(9, first=100), {"question": "?", "answer": None}]
    made = make(write_rows(make_rows()), options=Options(test=write_rows(rows, "test.jsonl")))
    assert "test.jsonl: 1 of 10 rows cannot be used: answer is empty (line 10)" in made.proposal.notes


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (
            0,
            "test.jsonl: 20 of 20 rows have a prompt that is also in the training rows; "
            "this split cannot measure generalization",
        ),
        (35, "test.jsonl: 5 of 20 rows have a prompt that is also in the training rows"),
        (40, None),
    ],
)
def test_prompts_shared_with_training_are_noted(first: int, words: str | None) -> None:
    made = make(write_rows(make_rows()), options=Options(test=write_rows(make_rows(20, first), "test.jsonl")))
    assert made.proposal.notes == (() if words is None else (words,))


def test_format_is_omitted_if_file_names_show_it() -> None:
    """One format for all files would misread the second."""
    options = Options(test=write_rows(make_rows(9, first=100), "test.jsonl"))
    make(write_csv(make_rows(), "rows.csv"), options=options)
    dataset = load_manifest(find_manifest("sales")).manifest.training.dataset
    assert (dataset.format, dataset.path, dataset.test_path) == (None, "../rows.csv", "../test.jsonl")
    planned = plan_request(Request(expert="sales", gpu="h100", profile="full"))
    wanted = make_preparation_spec(planned.plan, planned.loaded.folder, load_tokenizer("launcher/tiny", ()))
    assert load_held_out_rows(wanted, None).num_rows == 9


def test_mixed_formats_that_names_do_not_show_are_refused() -> None:
    options = Options(test=write_csv(make_rows(9, first=100), "test.csv"))
    with pytest.raises(InputError, match="have different formats, which their names do not show"):
        make(write_rows(make_rows(), "rows.txt"), options=options)
    make(write_rows(make_rows(), "rows.txt"), options=Options(test=write_rows(make_rows(9, 100), "test.jsonl")))
    assert load_manifest(find_manifest("sales")).manifest.training.dataset.format == "jsonl"


def test_sample_splits_share_no_prompt() -> None:
    rows = make_rows(150)
    make(write_rows([*rows, *({**row, "answer": "Or so."} for row in rows)]))
    asked = {name: {row["question"] for row in read_sample(name)} for name in SPLITS}
    assert sum(map(len, asked.values())) == 150
    assert len(set().union(*asked.values())) == 150
    assert len(asked["train"]) > 100
    assert 5 <= len(asked["validation"]) <= 30
    assert 5 <= len(asked["test"]) <= 30


def test_sample_uses_the_given_files() -> None:
    """The smoke profile evaluates on them as well."""
    validation, test = make_rows(20, first=500), make_rows(30, first=600)
    options = Options(validation=write_rows(validation, "v.jsonl"), test=write_rows(test, "t.jsonl"))
    make(write_rows(make_rows(60)), options=options)
    asked = {name: [row["question"] for row in read_sample(name)] for name in SPLITS}
    assert asked == {
        name: [row["question"] for row in rows]
        for name, rows in zip(SPLITS, (make_rows(60), validation, test), strict=True)
    }
    planned = plan_request(Request(expert="sales", profile="smoke"))
    wanted = make_preparation_spec(planned.plan, planned.loaded.folder, load_tokenizer("launcher/tiny", ()))
    held_out = load_held_out_rows(wanted, None)
    assert (held_out.split, {row.instruction for row in held_out.rows}) == ("test", set(asked["test"]))
    assert {row.instruction for row in load_held_out_rows(wanted, None, "validation").rows} == set(asked["validation"])
    assert wanted.notes == ()


def test_rare_field_is_in_every_split_of_the_sample() -> None:
    rows = [{"question": f"q{n}", "answer": f"a{n}", **({"context": "c"} if n == 7 else {})} for n in range(120)]
    make(write_rows(rows))
    planned = plan_request(Request(expert="sales", profile="smoke"))
    wanted = make_preparation_spec(planned.plan, planned.loaded.folder, load_tokenizer("launcher/tiny", ()))
    for name in SPLITS:
        assert load_held_out_rows(wanted, None, name).num_rows == len(read_sample(name))


def test_sample_is_truncated_if_all_rows_are_too_long() -> None:
    rows = [{"question": f"row {n}", "answer": f"word {n} " * 4000} for n in range(5)]
    made = make(write_rows(rows))
    assert len(read_sample("train")) == 5
    long = "all rows are longer than the 4,096 tokens of the smoke profile: its sample is truncated"
    assert made.proposal.notes == (long,)


def test_lone_surrogates_are_escaped_or_refused() -> None:
    """They occur in an unused part of a message, and in the name of an unused field."""
    turns = '[{"role": "user", "content": "q%d"}, {"role": "assistant", "content": "ä%d", "note": "\\ud800"}]'
    lines = [f'{{"messages": {turns % (n, n)}, "me\\ud800ta": "\\udfff"}}' for n in range(80)]
    Path("rows.jsonl").write_text("\n".join(lines))
    made = make(Path("rows.jsonl"))
    assert made.proposal.notes == (r"ignored: 'me\ud800ta', because the name contains a lone surrogate",)
    assert {row["messages"][1]["note"] for name in SPLITS for row in read_sample(name)} == {"\ud800"}
    Path("rows.jsonl").write_text("".join(f'{{"que\\ud800stion": "q{n}", "answer": "a{n}"}}\n' for n in range(40)))
    with pytest.raises(InputError, match=r"'que\\ud800stion', because the name contains a lone surrogate"):
        make(Path("rows.jsonl"), force=True)


def test_path_that_is_not_utf8_is_refused() -> None:
    name = os.fsdecode(b"r\xff.jsonl")
    with pytest.raises(InputError, match="the name is not UTF-8"):
        make(write_rows(make_rows(), name))


def test_repeated_keys_are_noted() -> None:
    line = '{"question": "a%d", "question": "b%d", "answer": "c%d"}\n'
    Path("rows.jsonl").write_text("".join(line % (n, n, n) for n in range(40)))
    [note] = make(Path("rows.jsonl")).proposal.notes
    assert "'question' occurs twice in 40 objects" in note


def test_missing_csv_header_is_mentioned() -> None:
    Path("rows.csv").write_text("".join(f'"What is {n}?","It is {n}."\n' for n in range(41)))
    with pytest.raises(InputError, match="is the header line missing"):
        make(Path("rows.csv"))


def test_numbers_are_trained_as_text() -> None:
    make(write_rows([{"text": f"t{n}", "label": n % 3} for n in range(60)]))
    planned = plan_request(Request(expert="sales", profile="smoke"))
    wanted = make_preparation_spec(planned.plan, planned.loaded.folder, load_tokenizer("launcher/tiny", ()))
    assert {row.answer for row in load_held_out_rows(wanted, None, "train").rows} == {"0", "1", "2"}


def test_chats_in_two_fields_are_joined() -> None:
    rows = [
        {"prompt": [{"role": "user", "content": f"q{n}"}], "completion": [{"role": "assistant", "content": f"a{n}"}]}
        for n in range(60)
    ]
    for fields in (None, FieldFlags(prompt="prompt", answer="completion")):
        made = make(write_rows(rows), options=Options(fields=fields), force=True)
        segments = made.proposal.mask.segments
        assert [segment.text for segment in segments if segment.is_trained] == [
            f"a{made.proposal.mask.row - 1}<|im_end|>"
        ]
        assert "content" not in json.dumps([segment.text for segment in segments])


def test_decimals_of_parquet_are_numbers_in_the_sample() -> None:
    rows = [{"question": f"What costs {n}?", "answer": {"price": Decimal(n) / 4}} for n in range(40)]
    parquet.write_table(pa.Table.from_pylist(rows), "rows.parquet")
    make(Path("rows.parquet"))
    row = next(row for row in read_sample("train") if row["question"] == "What costs 39?")
    assert row["answer"] == {"price": 9.75}
