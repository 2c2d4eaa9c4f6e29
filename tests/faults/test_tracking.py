"""W&B in a real training: a stopped and resumed run is one complete W&B run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from launcher.core import metrics
from launcher.core.metrics import load_metrics
from launcher.core.processes import find_processes
from launcher.runs.wandb_settings import load_trace
from tests.distributed.harness import Harness, TrainingCase
from tests.faults.fork_server import ForkServer
from tests.faults.restartable_run import CONFIG, NUM_STEPS, make_run
from tests.faults.test_preemption import SIGNAL_STEP, STOP_STEP, make_signal_variable
from tests.tracking.uploader_process import folders, read_back

pytest.importorskip("wandb")


@pytest.mark.slow
def test_resumed_run_is_one_wandb_run(harness: Harness, fork_server: ForkServer, tmp_path: Path) -> None:
    """With two ranks, rank 0 logs the tokens of both once."""
    assert SIGNAL_STEP < STOP_STEP < NUM_STEPS
    offline = {"WANDB_MODE": "offline", "HOME": str(tmp_path)}
    run = make_run(harness, TrainingCase(strategy="ddp", config=CONFIG))
    stopped = fork_server.launch(
        run.command, **offline, **make_signal_variable({0: [signal.SIGTERM], 1: [signal.SIGTERM]})
    )
    assert stopped.returncode != 0
    resumed = fork_server.launch(run.command, **offline)
    assert resumed.returncode == 0, resumed.console
    assert "W&B: offline (WANDB_MODE=offline); upload it with: wandb sync " in resumed.console

    trace = load_trace(run.paths)
    assert trace is not None
    assert run.trained.outcome.wandb is not None
    assert run.trained.outcome.wandb.id == trace.id
    first, second = (read_back(folder) for folder in folders(run.paths))
    assert {first.run["run_id"], second.run["run_id"]} == {trace.id}
    assert [record["exit_code"] for one in (first, second) for record in one.of("exit")] == [75, 0]
    assert first.of("preempting") == [{}]
    logged = [(row["train/step"], row["time/total"]) for one in (first, second) for row in one.rows]
    rows = load_metrics(run.paths.metrics)
    assert logged == [(row.step, row.values[metrics.TOTAL_SECONDS]) for row in rows], "each row once"
    assert second.summary["status"] == "done"
    last = rows[-1].values
    assert last[metrics.RESTART_SECONDS] > 0, "the second start"
    assert 0 < last[metrics.GOODPUT] < 1
    assert "Done." in run.paths.report.read_text()


def test_no_uploader_process_is_left(harness: Harness, fork_server: ForkServer, tmp_path: Path) -> None:
    run = make_run(harness, TrainingCase(strategy="single", ranks_per_node=1, config={**CONFIG, "max_steps": 2}))
    mark = f"HOME={tmp_path}"
    launched = fork_server.launch(run.command, WANDB_MODE="offline", HOME=str(tmp_path))
    assert launched.returncode == 0, launched.console
    assert find_processes(mark) == ()
