"""Answers that are judged while an expert trains: by the live model, and without a trace in what is trained."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import metrics
from launcher.inputs import Request, plan_request
from launcher.launch import write_run
from launcher.metrics import StepMetrics, append_metrics, cut_metrics, find_task_metrics, load_metrics
from launcher.paths import RunPaths
from launcher.quality.results import load_result
from launcher.training.slices import load_slice
from tests.conftest import ROOT, python_path
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


@pytest.mark.slow
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


JUDGE = """
from launcher.quality.judging import Check, Closing, Verdict

class {name}(Closing):
    checks = (Check(name="{check}", title="is right", checker="a test"),)
    main_check = "{check}"
    def judge(self, questions, answers):
        {body}
"""


@pytest.mark.parametrize(
    ("check", "body", "words"),
    [
        pytest.param(
            "right",
            "raise KeyError('nobody caught me')",
            "were not judged: 'nobody caught me'",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "right", "return [Verdict(checks={'right': None}) for _ in answers]", None, marks=pytest.mark.slow
        ),
        pytest.param(
            "loss", "return []", "a check called loss, which is the held-out loss's name", marks=pytest.mark.slow
        ),
    ],
)
def test_a_judge_that_fails_costs_no_more_than_its_metrics(
    scratch: Trained, tmp_path: Path, check: str, body: str, words: str | None
) -> None:
    (tmp_path / "odd_judge.py").write_text(JUDGE.format(name="Odd", check=check, body=body))
    script = [str(ROOT / "launcher/train.py"), "--manifest", str(ROOT / "experts/json/manifest.json")]
    script += ["--max-steps", "1", "--runs-dir", str(tmp_path), "--run-id", "odd"]
    settings = {**SETTINGS, "evaluation.task_rows": 2, "evaluation.judge": "odd_judge:Odd"}
    script += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    environment = {**scratch.environment, "PYTHONPATH": os.pathsep.join([python_path(), str(tmp_path)])}
    command = [sys.executable, *script]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert words is None or words in result.stderr
    paths = RunPaths(tmp_path / "odd")
    assert find_tasks(paths) == {}
    assert [row.step for row in load_metrics(paths.metrics) if metrics.EVAL_LOSS in row.values] == [1]


def test_what_was_told_of_the_base_is_told_once(tmp_path: Path) -> None:
    """A run that is killed before its first checkpoint begins anew, and asks anew."""
    file = tmp_path / "metrics.jsonl"
    for step, name in ((0, "eval/parses"), (0, metrics.TASK_SECONDS), (1, metrics.TRAIN_LOSS)):
        append_metrics(file, StepMetrics(step=step, epoch=0.0, values={name: 1.0}))
    assert cut_metrics(file, 0).kept == ()
    assert load_metrics(file) == []


@pytest.mark.slow
def test_a_run_that_times_its_answers(scratch: Trained, tmp_path: Path) -> None:
    """As on a GPU: the plan leaves open how many there are, and a few tokens of one batch tell."""
    request = Request(
        expert=str(ROOT / "experts/json/manifest.json"),
        max_steps=2,
        overrides=tuple(f"{key}={value}" for key, value in SETTINGS.items()),
    )
    planned = plan_request(request)
    assert planned.plan.tasks is not None
    timed = planned.plan.tasks.model_copy(update={"is_fixed": False, "num_rows": 8})
    planned = replace(planned, plan=planned.plan.model_copy(update={"tasks": timed}))
    paths = write_run(planned, tmp_path, "timed")
    result = run_python([str(ROOT / "launcher/train.py"), "--plan", str(paths.plan)], scratch)
    assert result.returncode == 0, result.stderr
    assert "answers to 8 validation rows are judged at each evaluation: 2 x 8 answers take at most" in result.stderr
    assert sorted(find_tasks(paths)) == [0, 2]
    chosen = load_slice(paths.evaluations / "slice.json")
    assert chosen is not None
    # What is a tight share of the time for the same training: it is said, and nothing is asked.
    stingy = timed.model_copy(update={"share": 1e-9})
    speed = planned.plan.speed.model_copy(update={"seconds_per_step": 1.0})
    plan = planned.plan.model_copy(update={"tasks": stingy, "speed": speed})
    paths = write_run(replace(planned, plan=plan), tmp_path, "stingy")
    result = run_python([str(ROOT / "launcher/train.py"), "--plan", str(paths.plan)], scratch)
    assert result.returncode == 0, result.stderr
    assert "no answers are judged while it trains: they would take" in result.stderr
    assert find_tasks(paths) == {}
