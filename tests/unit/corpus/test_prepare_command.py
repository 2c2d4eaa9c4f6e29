"""Output and exit codes of `launcher prepare`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.unit.corpus.inputs import launcher, make_rows, write_expert, write_jsonl

pytestmark = pytest.mark.process


def run(expert: Path, base: Path, *more: str, **env: str) -> subprocess.CompletedProcess[str]:
    arguments = ("prepare", str(expert), "--gpu", "rtx4090", "--base", str(base), *more)
    return launcher(*arguments, cwd=expert.parent, **env)


def test_prepare_prints_audit_and_then_uses_the_cache(expert: Path, base: Path) -> None:
    rows: list[object] = [*make_rows(39), make_rows(1)[0]]
    rows[20] = {"question": "q", "schema": "s"}
    rows[0] = {"question": "\x1b[2Jq[bold]", "schema": "s", "cypher": "MATCH\nRETURN 1"}
    write_jsonl(expert.parent / "train.jsonl", rows)
    result = run(expert, base)
    assert result.returncode == 0, result.stderr
    assert result.stderr == "preparing neo4j: no data prepared yet\n"
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines[0] == "neo4j: template chatml, trained on answers only, packed"
    table = {line[:23].strip(): line[23:].strip() for line in lines[2:14]}
    assert table["rows read"] == "40"
    assert table["documents"] == "39"
    assert table["end token trained"] == "39 of 39"
    assert table["trained"].endswith("%)")
    assert "rejected (train): 1 row: no field cypher (line 21)" in lines
    histogram = lines[lines.index("Lengths in tokens:") + 2 :][:12]
    assert sum(int(line.split()[2]) for line in histogram) == 39
    assert any("█" in line for line in histogram)
    sample = lines[lines.index("One row; trained tokens are marked with |:") + 1 :]
    assert sample[:8] == [
        "  <|im_start|>user",
        "  \\x1b[2Jq[bold]",
        "",
        "  s<|im_end|>",
        "  <|im_start|>assistant",
        "| MATCH",
        "| RETURN 1<|im_end|>",
        "",
    ]
    assert "(built in " in lines[-1]
    again = run(expert, base)
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout.splitlines()[-1].endswith(" (cached)")
    assert again.stdout.splitlines()[:-1] == result.stdout.splitlines()[:-1]


def test_json_is_all_there_is_on_stdout(expert: Path, base: Path) -> None:
    write_expert(expert.parent, evaluation_strategy="epoch")
    result = run(expert, base, "--json")
    assert result.returncode == 0, result.stderr
    tree = json.loads(result.stdout)
    assert tree["hit"] is False
    assert (expert.parent / tree["store"] / "store.json").is_file()
    assert set(tree["audit"]["splits"]) == {"train", "validation"}
    assert sum(split["num_rows"] for split in tree["audit"]["splits"].values()) == 40
    assert [part["is_trained"] for part in tree["audit"]["sample"]] == [False, True, False]


def test_data_with_nothing_to_train_is_wrong_input(expert: Path, base: Path) -> None:
    write_jsonl(expert.parent / "train.jsonl", [{"question": "q " * 900, "schema": "s", "cypher": "c"}] * 3)
    result = run(expert, base)
    assert (result.returncode, result.stdout) == (2, "")
    assert f"error: {expert.parent}/train.jsonl: no row of the train split can be trained on" in result.stderr
    assert "3 rows: they have no trained tokens" in result.stderr
    assert "Traceback" not in result.stderr


def test_unreachable_hub_is_an_error_with_local_alternatives(expert: Path, base: Path) -> None:
    write_expert(expert.parent, {"path": "no-such-user/no-such-dataset", "format": "huggingface"})
    result = run(expert, base, HF_HUB_OFFLINE="1", HF_HOME=str(expert.parent / "cache"))
    assert (result.returncode, result.stdout) == (2, "")
    assert (
        "no-such-user/no-such-dataset: this dataset is neither in the cache nor available from the hub" in result.stderr
    )
    assert "--set training.dataset.path=rows.jsonl" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_package_is_named_with_the_command(expert: Path, base: Path, tmp_path: Path) -> None:
    """As in an environment that was set up for planning alone."""
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "numpy.py").write_text("raise ModuleNotFoundError('No module named numpy', name='numpy')\n")
    from tests.conftest import ROOT

    result = run(expert, base, PYTHONPATH=f"{blocked}:{ROOT}")
    assert result.returncode == 2
    assert result.stderr == (
        "error: launcher prepare needs packages that are not installed: numpy\n"
        "hint: pip install 'expert-launcher[data]'\n"
    )
