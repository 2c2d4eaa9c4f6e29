"""The examples of docs/TRAINING_GUIDE.md work."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from launcher.cli.main import main
from launcher.corpus.template_sandbox import compile_template
from launcher.judges.base import ReferenceRow
from launcher.judges.registry import open_judge_by_name
from tests.conftest import ROOT
from tests.docs.markdown import list_blocks

BLOCKS = list(list_blocks(ROOT / "docs/TRAINING_GUIDE.md"))


def example(language: str, words: str) -> str:
    """Return the one block of a language that contains some words."""
    texts = ["\n".join(block.lines) for block in BLOCKS if block.language == language]
    (text,) = [text for text in texts if words in text]
    return text


def test_chats_become_an_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = json.dumps(json.loads(example("json", "Where is order")))
    lines = [row.replace("9482", str(9000 + number)) for number in range(60)]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    assert main(["new", "orders", "--data", "chats.jsonl"]) == 0
    text = (tmp_path / "orders/manifest.json").read_text()
    assert '"messages": "messages"' in text


def test_dataset_of_the_hub_is_valid(tmp_path: Path) -> None:
    manifest = json.loads(example("json", '"rank": 16'))
    manifest["training"]["dataset"] = json.loads(example("json", "databricks-dolly"))["dataset"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert main(["validate", str(tmp_path)]) == 0


def test_several_columns_and_a_system_prompt_are_valid(tmp_path: Path) -> None:
    manifest = json.loads(example("json", '"rank": 16'))
    manifest["training"]["dataset"] = json.loads(example("json", "{subject}"))["dataset"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "tickets.csv").write_text("subject,body,product,answer\n" + "Refund,Please cancel.,App,{}\n" * 60)
    assert main(["validate", str(tmp_path)]) == 0
    (tmp_path / "tickets.csv").write_text("title,body,product,answer\n" + "Refund,Please cancel.,App,{}\n" * 60)
    assert main(["validate", str(tmp_path)]) != 0


def test_own_chat_template_is_valid(tmp_path: Path) -> None:
    manifest = json.loads(example("json", '"rank": 16'))
    manifest |= json.loads(example("json", "template.jinja"))
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "schema": "s", "sql": "SELECT 1"}\n' * 50)
    assert main(["validate", str(tmp_path)]) != 0  # no such file
    (tmp_path / "template.jinja").write_text(example("text", "add_generation_prompt"))
    assert main(["validate", str(tmp_path)]) == 0
    template = compile_template((tmp_path / "template.jinja").read_text())
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    text = template.render(messages=turns, eos_token="</s>")
    assert text == "<|user|>\nq\n<|assistant|>\na</s>\n", "every turn begins on a line of its own"


def test_judge_program_judges_each_line(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(example("python", "sys.stdin"))
    rows = [{"instruction": "", "context": "", "reference": "Yes", "answer": answer} for answer in (" yes", "no")]
    done = subprocess.run(
        [sys.executable, "judge.py"],
        cwd=tmp_path,
        input="".join(json.dumps(row) + "\n" for row in rows),
        capture_output=True,
        text=True,
        check=True,
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"right": True, "reason": ""},
        {"right": False, "reason": "expected Yes"},
    ]


def test_judge_class_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_judge.py").write_text(example("python", "FirstWordJudge"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAUNCHER_TRUST", "1")
    row = ReferenceRow(instruction="", context="", reference="blue whale")
    with closing(open_judge_by_name("my_judge:FirstWordJudge")) as judge:
        right, wrong = judge.judge([row, row], ["blue bird", "a " * 11])
    assert (right.checks, wrong.checks) == ({"short": True, "same": True}, {"short": False, "same": False})


def test_every_python_block_is_tested() -> None:
    assert sum(block.language == "python" for block in BLOCKS) == 2
