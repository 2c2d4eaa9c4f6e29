"""W&B beside a real training: stopped and taken up, it is one run, and nothing of it is missing."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from launcher import metrics
from launcher.metrics import load_metrics
from launcher.processes import find_processes
from launcher.tracking import load_trace
from tests.distributed.bench import Bench, Cell
from tests.faults.courses import CONFIG, NUM_STEPS, make_course
from tests.faults.test_preemption import ASKED_AT, ENDS_AT, ask
from tests.faults.warm import Warm
from tests.tracking.uplinks import folders, read_back

pytest.importorskip("wandb")


def test_one_run_in_two_parts(bench: Bench, warm: Warm, tmp_path: Path) -> None:
    """Two ranks: the tokens of both are told once, by the first."""
    assert ASKED_AT < ENDS_AT < NUM_STEPS
    offline = {"WANDB_MODE": "offline", "HOME": str(tmp_path)}
    course = make_course(bench, Cell(strategy="ddp", config=CONFIG))
    stopped = warm.launch(course.command, **offline, **ask({0: [signal.SIGTERM], 1: [signal.SIGTERM]}))
    assert stopped.returncode != 0
    resumed = warm.launch(course.command, **offline)
    assert resumed.returncode == 0, resumed.console
    assert "W&B: offline (WANDB_MODE=offline); upload it with: wandb sync " in resumed.console

    trace = load_trace(course.paths)
    assert trace is not None
    assert course.trained.outcome.wandb is not None
    assert course.trained.outcome.wandb.id == trace.id
    first, second = (read_back(folder) for folder in folders(course.paths))
    assert {first.run["run_id"], second.run["run_id"]} == {trace.id}
    assert [record["exit_code"] for one in (first, second) for record in one.of("exit")] == [75, 0]
    assert first.of("preempting") == [{}]
    told = [(row["train/step"], row["time/total"]) for one in (first, second) for row in one.rows]
    rows = load_metrics(course.paths.metrics)
    assert told == [(row.step, row.values[metrics.TOTAL_SECONDS]) for row in rows], "each row once"
    assert second.summary["status"] == "done"
    last = rows[-1].values
    assert last[metrics.RESTART_SECONDS] > 0, "the second start"
    assert 0 < last[metrics.GOODPUT] < 1
    assert "Done." in course.paths.report.read_text()


def test_no_process_is_left(bench: Bench, warm: Warm, tmp_path: Path) -> None:
    course = make_course(bench, Cell(strategy="ddp", config={**CONFIG, "max_steps": 2}))
    mark = f"HOME={tmp_path}"
    launched = warm.launch(course.command, WANDB_MODE="offline", HOME=str(tmp_path))
    assert launched.returncode == 0, launched.console
    assert find_processes(mark) == ()
