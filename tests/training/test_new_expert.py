"""From rows to a training run in two commands, then generated answers to the user's own rows."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import python_path
from tests.forked_python import run_python

CHAT = "messages"


def launch(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    return run_python(["-m", "launcher", *words], cwd=folder, env=environment, needs_torch=True)


def make_row(kind: str, number: int) -> dict[str, object]:
    question, answer = f"Which customers bought {number} things?", f"SELECT name FROM customers WHERE things = {number}"
    if kind == CHAT:
        turns = (("system", "You write SQL."), ("user", question), ("assistant", answer))
        return {CHAT: [{"role": role, "content": text} for role, text in turns]}
    return {"id": number, "question": question, "schema": "customers(name, things)", "sql": answer}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fields", pytest.param(CHAT, marks=pytest.mark.slow)])
def test_new_then_train(kind: str, tmp_path: Path) -> None:
    for name, numbers in (("rows", range(120)), ("test", range(200, 212))):
        lines = "".join(json.dumps(make_row(kind, number)) + "\n" for number in numbers)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    made = launch(tmp_path, "new", "sales", "--data", "rows.jsonl", "--test", "test.jsonl")
    assert made.returncode == 0, made.stderr
    assert "Next:  launcher train sales" in made.stdout
    trained = launch(tmp_path, "train", "sales", "--max-steps", "2", "--json")
    assert trained.returncode == 0, trained.stderr
    folder = tmp_path / json.loads(trained.stdout)["path"]
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps if "train/loss" in step["values"]] == [1, 2]
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()
    outcome = json.loads((folder / "outcome.json").read_text())
    assert outcome["shared_system"] == ("You write SQL." if kind == CHAT else "")
    asked = launch(tmp_path, "eval", "sales", "--rows", "2", "--max-new-tokens", "8", "--json")
    assert asked.returncode == 0, asked.stderr
    result = json.loads(asked.stdout)
    assert (result["split"], result["num_rows"], len(result["answers"])) == ("test", 12, 2)
