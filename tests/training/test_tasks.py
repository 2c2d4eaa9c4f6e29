"""Answers that are judged while an expert trains: by the live model, and without a trace in what is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher import metrics
from launcher.metrics import StepMetrics, find_task_metrics, load_metrics
from launcher.paths import RunPaths
from launcher.quality.results import load_result
from tests.conftest import ROOT
from tests.training.trained_run import Trained, launcher, run_python

pytest.importorskip("jsonschema_rs", reason="pip install 'expert-launcher[quality]'")

ROWS, STEPS = 4, 8
SETTINGS = {
    "training.config.batch_size": 3,
    "training.config.gradient_accumulation_steps": 1,
    "training.config.dropout": 0.1,  # draws random numbers, which must not be others because answers were drawn
    "training.config.evaluation_strategy": "steps",
    "training.config.eval_steps": STEPS // 2,
    "training.config.save_strategy": "steps",
    "training.config.save_steps": STEPS // 2,
}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("tasks")
    return Trained(runs_dir=folder / "runs", data_dir=folder / "data", base=folder / "base")


def train(scratch: Trained, run_id: str, task_rows: int, *more: str) -> RunPaths:
    words = [str(ROOT / "launcher/train.py"), "--manifest", str(ROOT / "experts/json/manifest.json")]
    words += ["--max-steps", str(STEPS), "--runs-dir", str(scratch.runs_dir), "--run-id", run_id]
    for key, value in {**SETTINGS, "evaluation.task_rows": task_rows}.items():
        words += ["--set", f"{key}={value}"]
    result = run_python([*words, *more], scratch)
    assert result.returncode == 0, result.stderr
    return RunPaths(scratch.runs_dir / run_id)


@pytest.fixture(scope="module")
def asked(scratch: Trained) -> RunPaths:
    return train(scratch, "asked", ROWS)


def find_tasks(paths: RunPaths) -> dict[int, StepMetrics]:
    return {row.step: row for row in load_metrics(paths.metrics) if find_task_metrics(row)}


def test_the_base_and_every_evaluation_are_judged(asked: RunPaths) -> None:
    rows = find_tasks(asked)
    assert sorted(rows) == [0, STEPS // 2, STEPS]
    assert all(row.values[metrics.TASK_SECONDS] > 0 for row in rows.values())
    base, last = find_task_metrics(rows[0]), find_task_metrics(rows[STEPS])
    assert base["parses"] == 0.0  # it names the language, and no more
    assert last["parses"] == 1.0  # a few small steps suffice for the form
    assert metrics.EVAL_LOSS not in rows[0].values
    assert metrics.EVAL_LOSS in rows[STEPS].values


def test_each_is_kept_with_its_answers(asked: RunPaths) -> None:
    for step, row in find_tasks(asked).items():
        result = load_result(asked.evaluation_at(step))
        assert len(result.answers) == ROWS
        assert result.split == "validation"
        assert {check.name: check.rate for check in result.checks if check.num_judged} == find_task_metrics(row)
    assert "base" in load_result(asked.evaluation_at(0)).subject


def test_what_is_trained_is_the_same_without(scratch: Trained, asked: RunPaths) -> None:
    silent = train(scratch, "silent", 0)
    assert find_tasks(silent) == {}
    assert not silent.evaluations.exists()
    (one,), (other,) = (list(paths.adapter.glob("*.safetensors")) for paths in (asked, silent))
    assert one.read_bytes() == other.read_bytes()


def test_it_says_what_eval_says(scratch: Trained, asked: RunPaths) -> None:
    """Of the same rows, by an expert that was loaded again."""
    out = scratch.runs_dir / "again.json"
    result = launcher(scratch, "eval", "--run", "asked", "--split", "validation", "--rows", str(ROWS), "-o", str(out))
    assert result.returncode == 0, result.stderr
    again, before = load_result(out), load_result(asked.evaluation_at(STEPS))
    assert [answer.key for answer in again.answers] == [answer.key for answer in before.answers]
    assert [answer.answer for answer in again.answers] == [answer.answer for answer in before.answers]


def test_a_judge_that_fails_costs_no_more_than_its_metrics(scratch: Trained, tmp_path: Path) -> None:
    program = tmp_path / "judge"
    program.write_text("#!/bin/sh\necho nonsense\n")
    program.chmod(0o755)
    command = ("--set", f'evaluation.judge_command=["{program}"]')
    paths = train(scratch, "misjudged", 2, *command, "--max-steps", "1")
    assert find_tasks(paths) == {}
    assert (paths.adapter / "adapter_model.safetensors").is_file()
