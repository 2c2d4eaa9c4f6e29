"""Held-out rows have the training prompt and the reference answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.core.errors import InputError
from launcher.corpus.heldout import load_held_out_rows
from launcher.corpus.spec import PreparationSpec, make_preparation_spec
from launcher.corpus.tokenizer import load_tokenizer
from launcher.request.request import Request, base_folders, plan_request
from tests.conftest import ROOT
from tests.unit.corpus.inputs import make_spec, write_expert, write_jsonl


def prepared(*overrides: str, expert: str = "sql", folder: Path | None = None) -> PreparationSpec:
    plan = plan_request(Request(expert=expert, profile="smoke", overrides=overrides)).plan
    home = folder or Path(plan.data.folder)
    return make_preparation_spec(plan, home, load_tokenizer(plan.base.name, base_folders(home)))


def rows_of(expert: str, split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (ROOT / f"experts/{expert}/sample/{split}.jsonl").read_text().splitlines()]


def test_held_out_rows_have_the_training_prompt() -> None:
    held_out = load_held_out_rows(prepared(), None)
    assert (held_out.split, held_out.num_rows, len(held_out.rows)) == ("test", 200, 200)
    spec = {(row["sql_prompt"], row["sql_context"], row["sql"]) for row in rows_of("sql", "test")}
    assert {(row.instruction, row.context, row.answer) for row in held_out.rows} == spec
    for row in held_out.rows:
        assert row.prompt.endswith("<|im_start|>assistant\n")
        assert row.instruction in row.prompt
        assert row.answer not in row.prompt


def test_limited_rows_are_a_stable_subset() -> None:
    whole = load_held_out_rows(prepared(), None).rows
    assert load_held_out_rows(prepared(), 20).rows == whole[:20]
    assert [row.key for row in whole] == sorted(row.key for row in whole)
    assert len({row.key for row in whole}) == 200


def test_another_split_can_be_named() -> None:
    held_out = load_held_out_rows(prepared(), 5, "validation")
    assert held_out.split == "validation"
    known = {row["sql"] for row in rows_of("sql", "validation")}
    assert all(row.answer in known for row in held_out.rows)


def test_missing_held_out_rows_are_an_error_with_a_hint() -> None:
    spec = prepared()
    bare = PreparationSpec(**{**{name: getattr(spec, name) for name in spec.__slots__}, "test": (), "validation": ()})
    with pytest.raises(InputError, match="no held-out rows: neither") as raised:
        load_held_out_rows(bare, None)
    assert "training.dataset.test_path" in str(raised.value)


def test_cut_validation_rows_are_the_held_out_rows() -> None:
    spec = prepared()
    cut = PreparationSpec(
        **{
            **{name: getattr(spec, name) for name in spec.__slots__},
            "test": (),
            "validation": (),
            "cuts_validation": True,
        }
    )
    held_out = load_held_out_rows(cut, None)
    assert held_out.split == "validation"
    assert 50 < held_out.num_rows < 400, "about a tenth of 2,000 or less"
    known = {row["sql"] for row in rows_of("sql", "train")}
    assert all(row.answer in known for row in held_out.rows)


def test_answers_of_a_chat_are_counted(tmp_path: Path, base: Path) -> None:
    rows = []
    for number in range(2):
        turns = [("user", f"One of {number}?"), ("assistant", "1"), ("user", "Two?"), ("assistant", "2")][
            : 2 + 2 * number
        ]
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    write_jsonl(tmp_path / "train.jsonl", rows)
    dataset = {"test_path": "train.jsonl", "field_mapping": {"messages": "messages"}}
    held_out = load_held_out_rows(make_spec(write_expert(tmp_path, dataset), base), None)
    assert {(row.instruction, row.answer, row.num_answers) for row in held_out.rows} == {
        ("One of 0?", "1", 1),
        ("One of 1?", "1", 2),
    }
