"""Held-out rows as questions: what training would have shown, and what it would have taught."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.corpus.preparation import Preparation, make_preparation
from launcher.corpus.questions import read_held_out
from launcher.corpus.tokenizer import load_tokenizer
from launcher.errors import InputError
from launcher.inputs import Request, base_folders, plan_request
from tests.conftest import ROOT


def prepared(*overrides: str, expert: str = "sql", folder: Path | None = None) -> Preparation:
    plan = plan_request(Request(expert=expert, profile="smoke", overrides=overrides)).plan
    home = folder or Path(plan.data.folder)
    return make_preparation(plan, home, load_tokenizer(plan.base.name, base_folders(home)))


def rows_of(expert: str, split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (ROOT / f"experts/{expert}/sample/{split}.jsonl").read_text().splitlines()]


def test_every_test_row_is_asked_as_it_was_written() -> None:
    held_out = read_held_out(prepared(), None)
    assert (held_out.split, held_out.num_rows, len(held_out.rows)) == ("test", 200, 200)
    wanted = {(row["sql_prompt"], row["sql_context"], row["sql"]) for row in rows_of("sql", "test")}
    assert {(row.instruction, row.context, row.answer) for row in held_out.rows} == wanted
    for row in held_out.rows:
        assert row.prompt.endswith("<|im_start|>assistant\n")
        assert row.instruction in row.prompt
        assert row.answer not in row.prompt


def test_a_slice_stays_what_it_is() -> None:
    whole = read_held_out(prepared(), None).rows
    assert read_held_out(prepared(), 20).rows == whole[:20]
    assert [row.key for row in whole] == sorted(row.key for row in whole)
    assert len({row.key for row in whole}) == 200


def test_another_split_can_be_named() -> None:
    held_out = read_held_out(prepared(), 5, "validation")
    assert held_out.split == "validation"
    known = {row["sql"] for row in rows_of("sql", "validation")}
    assert all(row.answer in known for row in held_out.rows)


def test_without_held_out_rows_the_way_out_is_told() -> None:
    wanted = prepared()
    bare = Preparation(**{**{name: getattr(wanted, name) for name in wanted.__slots__}, "test": (), "validation": ()})
    with pytest.raises(InputError, match="no held-out rows to ask") as raised:
        read_held_out(bare, None)
    assert "training.dataset.test_path" in str(raised.value)


def test_what_is_cut_for_validation_is_asked_and_nothing_else() -> None:
    wanted = prepared()
    cut = Preparation(
        **{
            **{name: getattr(wanted, name) for name in wanted.__slots__},
            "test": (),
            "validation": (),
            "cuts_validation": True,
        }
    )
    held_out = read_held_out(cut, None)
    assert held_out.split == "validation"
    assert 50 < held_out.num_rows < 400, "about a tenth of 2,000 or less"
    known = {row["sql"] for row in rows_of("sql", "train")}
    assert all(row.answer in known for row in held_out.rows)
