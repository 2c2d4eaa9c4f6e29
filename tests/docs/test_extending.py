"""The examples of docs/EXTENDING.md work."""

from __future__ import annotations

import csv
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.docs.markdown import list_blocks

PAGE = ROOT / "docs/EXTENDING.md"


def example(language: str, name: str) -> str:
    """Return the one block of a language that contains a name."""
    blocks = ["\n".join(block.lines) for block in list_blocks(PAGE) if block.language == language]
    matches = [block for block in blocks if name in block]
    assert len(matches) == 1, f"{len(matches)} {language} blocks contain {name}"
    return matches[0]


def run_example(name: str) -> dict[str, Any]:
    # A module of its own: pydantic and dataclasses look types up there.
    namespace: dict[str, Any] = {"__name__": "extending_example"}
    exec(compile(example("python", name), str(PAGE), "exec"), namespace)
    return namespace


def test_every_python_block_is_tested() -> None:
    names = ("YamlKeysJudge", "CsvTracker", "LossOptions", "make_vera_config", "make_hsdp_collectives", "check_family")
    blocks = {example("python", name) for name in names}
    assert len(blocks) == sum(block.language == "python" for block in list_blocks(PAGE))


def test_a_judge_named_in_a_manifest_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from launcher.judges.base import ReferenceRow
    from launcher.judges.registry import open_judge_by_name

    (tmp_path / "my_judge.py").write_text(example("python", "YamlKeysJudge"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAUNCHER_TRUST", "1")
    row = ReferenceRow(instruction="", context="", reference="a: 1\nb: 2")
    with closing(open_judge_by_name("my_judge:YamlKeysJudge")) as judge:
        same, different = judge.judge([row, row], ["b: 3\na: 0", "a: 1"])
    assert same.checks == {"has_keys": True, "same_keys": True}
    assert different.checks == {"has_keys": True, "same_keys": False}
    assert different.reason == "missing: b"


def test_an_observer_receives_every_step(tmp_path: Path) -> None:
    from launcher.training.loop import train
    from tests.training.builders import build, make_plan, make_uneven_packs, write_base, write_store

    plan = make_plan(write_base(tmp_path / "base"), {"batch.micro_batch_size": 4, "schedule.max_steps": 2})
    run = build(plan, write_store(tmp_path / "store", make_uneven_packs()), tmp_path / "run", is_checked=True)
    train(run, run_example("CsvTracker")["CsvTracker"](tmp_path / "loss.csv"))
    rows = list(csv.reader((tmp_path / "loss.csv").open()))
    assert [row[0] for row in rows] == ["1", "2"]
    assert all(float(row[1]) > 0 for row in rows)


def test_a_gpu_of_the_users_file_can_be_planned_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from launcher.cli.main import main

    text = example("json", "rtx2080ti")
    json.loads(text)
    (tmp_path / "hardware.json").write_text(text)
    monkeypatch.setenv("LAUNCHER_HARDWARE", str(tmp_path / "hardware.json"))
    assert main(["plan", "neo4j", "--gpu", "rtx2080ti"]) == 0


def test_a_manifest_type_validates_its_keys() -> None:
    from pydantic import ValidationError

    namespace = run_example("LossOptions")
    assert namespace["options"].label_smoothing == 0.1
    with pytest.raises(ValidationError, match="less than 1"):
        namespace["LossOptions"].model_validate({"label_smoothing": 1.0})


def test_vera_trains_as_many_parameters_as_counted(tmp_path: Path) -> None:
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    from launcher.base_models.shapes import make_shape
    from tests.training.builders import write_base

    targets = ("o_proj",)
    folder = write_base(tmp_path / "base")
    namespace = run_example("make_vera_config")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), namespace["make_vera_config"](8, targets))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    shape = make_shape(json.loads((folder / "config.json").read_text()), "base", "config")
    assert namespace["count_vera_parameters"](shape, 8, targets) == trained


def test_hsdp_moves_less_between_nodes_than_it_gathers() -> None:
    make_collectives = run_example("make_hsdp_collectives")["make_hsdp_collectives"]
    gather, scatter, reduce = make_collectives(weight_bytes=1e9, trained_bytes=1e6, num_layers=28)
    assert gather.moved_bytes(8) == 2e9 * 7 / 8
    assert scatter.moved_bytes(8) == 1e6 * 7 / 8
    assert reduce.moved_bytes(2) == 1e6


def test_a_listed_family_is_fused_and_has_the_same_gradients() -> None:
    check_family = run_example("check_family")["check_family"]
    num_blocks, difference = check_family("llama")
    assert num_blocks == 4
    assert difference < 1e-4
    assert check_family("olmo2")[0] == 0
