"""The trials of a sweep: which are trained, recorded, repeated or resumed, and when it ends. Training is replaced."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.sweep import _format_command
from launcher.core.errors import ExitCode, InputError, RunFailedError
from launcher.core.file_lock import folder_locked
from launcher.core.metrics import EVAL_LOSS, TOTAL_SECONDS, TRAIN_LOSS, StepMetrics, append_metrics
from launcher.core.run_paths import RunPaths
from launcher.launch.sweep import run as sweep_run
from launcher.launch.sweep.run import Sweep, SweepResult, parse_objective, run_sweep
from launcher.launch.sweep.space import parse_params
from launcher.launch.sweep.study import Status, SweepStudy, TrialRecord
from launcher.launch.sweep.trial import TrialRun, Watcher
from launcher.launch.write_run import write_run
from launcher.request.request import Request
from launcher.runs.record import Outcome, write_outcome
from tests.conftest import ROOT

pytestmark = pytest.mark.long

pytest.importorskip("optuna", reason="pip install 'expert-launcher[sweep]'")

MANIFEST = ROOT / "experts/json/manifest.json"
NUM_STEPS, SECONDS = 4, 10.0
RATE = "training.config.learning_rate"


@dataclass
class Training:
    """Replaces train_trial: writes the files of a training of four steps, without training."""

    exit_code: Callable[[int], int] = lambda _call: 0
    losses: Callable[[int], float] = lambda call: 1.0 / call  # of the call, from 1
    trained: list[str] = field(default_factory=list)

    def __call__(self, trial: TrialRun, watcher: Watcher, max_restarts: int) -> Outcome:
        del max_restarts
        self.trained.append(trial.paths.run_id)
        call = len(self.trained)
        code = self.exit_code(call)
        if trial.resumed is None:
            write_run(trial.planned, trial.paths.root.parent, trial.paths.run_id)
        self._write(trial.paths, NUM_STEPS // 2, self.losses(call), None)
        watcher.start()
        if code == ExitCode.PREEMPTED:
            deadline = time.monotonic() + 5.0
            while not watcher.stop_reason and time.monotonic() < deadline and self.losses(call) > 1:
                time.sleep(0.05)
        else:
            self._write(trial.paths, NUM_STEPS, self.losses(call), code)
        watcher.end()
        return self._write(trial.paths, 0, 0.0, code)

    def _write(self, paths: RunPaths, step: int, loss: float, exit_code: int | None) -> Outcome:
        if step:
            values = {TRAIN_LOSS: 1.0, EVAL_LOSS: loss, TOTAL_SECONDS: SECONDS * step / NUM_STEPS}
            append_metrics(paths.metrics, StepMetrics(step=step, epoch=0.0, values=values))
        outcome = Outcome(
            run_id=paths.run_id,
            status="running" if exit_code is None else "done" if exit_code == 0 else "stopped",
            exit_code=exit_code,
            error="" if not exit_code else "it broke\nin many lines",
            started_at="2026-11-17T00:00:00+00:00",
            pid=1,
            num_steps=NUM_STEPS,
            best_step=NUM_STEPS,
        )
        write_outcome(paths.outcome, outcome)
        return outcome


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Training:
    training = Training()
    monkeypatch.setattr(sweep_run, "train_trial", training)
    monkeypatch.setattr(sweep_run, "prepare_trial", lambda _trial: None)
    monkeypatch.setattr("launcher.launch.sweep.trial._POLL_SECONDS", 0.05)
    monkeypatch.setattr("launcher.corpus.row_count.refine_estimate", lambda rows, *_: rows)  # reads all sample rows
    return training


def make_sweep(runs_dir: Path, *params: str, num_trials: int = 3, overrides: tuple[str, ...] = ()) -> Sweep:
    return Sweep(
        request=Request(expert=str(MANIFEST), max_steps=NUM_STEPS, overrides=overrides, calibrated=False),
        params=parse_params(params or ("learning_rate=1e-5..1e-3:log", "rank=8,16"), MANIFEST, overrides),
        runs_dir=runs_dir,
        name="s",
        num_trials=num_trials,
    )


def go(sweep: Sweep) -> SweepResult:
    return run_sweep(sweep, lambda _text: None)


def statuses(result: SweepResult) -> list[str]:
    return [trial.status for trial in result.trials]


def test_trials_are_runs_and_a_finished_sweep_trains_nothing_again(tmp_path: Path, train: Training) -> None:
    result = go(make_sweep(tmp_path))
    assert statuses(result) == ["done"] * 3
    assert result.best is not None
    assert (result.best.number, result.best.objective, result.exit_code) == (2, 1 / 3, ExitCode.DONE)
    assert train.trained == ["s-000", "s-001", "s-002"]
    assert all((tmp_path / name / "plan.json").is_file() for name in train.trained)
    assert go(make_sweep(tmp_path)) == result
    more = go(make_sweep(tmp_path, num_trials=4))
    assert train.trained == ["s-000", "s-001", "s-002", "s-003"]
    assert more.trials[:3] == result.trials


def test_a_trial_starts_only_if_its_time_fits_the_budget(tmp_path: Path, train: Training) -> None:
    result = go(replace(make_sweep(tmp_path), max_seconds=25.0))
    assert statuses(result) == ["done", "done", "running"]
    assert result.ended_because == "the budget has 5 s left, and trial 2 takes about 10 s"
    assert result.exit_code == ExitCode.DONE
    assert train.trained == ["s-000", "s-001"]
    assert not (tmp_path / "s-002").exists()
    more = go(replace(make_sweep(tmp_path), max_seconds=30.0))
    assert statuses(more) == ["done"] * 3
    assert more.trials[2].values == result.trials[2].values


def test_settings_that_contradict_are_infeasible_and_not_tried_again(tmp_path: Path, train: Training) -> None:
    sweep = make_sweep(
        tmp_path, "lr_scheduler=cosine,linear", overrides=("training.config.lr_scheduler_kwargs.num_cycles=2",)
    )
    result = go(sweep)
    assert statuses(result) == ["done", "infeasible"]
    assert "not applicable to lr_scheduler linear" in result.trials[1].reason
    assert result.ended_because == "all trials are done"
    assert train.trained == ["s-000"]
    assert go(sweep).trials == result.trials


def test_a_run_that_does_not_fit_is_infeasible_and_a_failed_one_keeps_its_error(
    tmp_path: Path, train: Training
) -> None:
    train.exit_code = lambda call: (3, 4, 0)[call - 1]
    result = go(make_sweep(tmp_path))
    assert statuses(result) == ["infeasible", "failed", "done"]
    assert result.trials[1].reason == "it broke"
    assert result.best is not None
    assert result.best.number == 2


def test_a_sweep_ends_after_three_failures(tmp_path: Path, train: Training) -> None:
    train.exit_code = lambda _call: 4
    with pytest.raises(RunFailedError, match="the last 3 trials failed"):
        go(make_sweep(tmp_path, num_trials=9))
    assert len(train.trained) == 3


def test_a_stopped_trial_is_resumed(tmp_path: Path, train: Training) -> None:
    train.exit_code = lambda call: 75 if call == 2 else 0
    result = go(make_sweep(tmp_path))
    assert (statuses(result), result.exit_code) == (["done", "running"], ExitCode.PREEMPTED)
    more = go(make_sweep(tmp_path))
    assert (statuses(more), more.exit_code) == (["done"] * 3, ExitCode.DONE)
    assert train.trained == ["s-000", "s-001", "s-001", "s-002"]
    assert more.trials[1].values == result.trials[1].values


def test_a_signal_between_trials_ends_the_sweep(tmp_path: Path, train: Training) -> None:
    def exit_code(call: int) -> int:
        if call == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return 0

    train.exit_code = exit_code
    result = go(make_sweep(tmp_path))
    assert (statuses(result), result.exit_code) == (["done"] * 2, ExitCode.PREEMPTED)
    assert result.ended_because == "stopped by SIGTERM"


def test_a_trial_worse_than_the_median_is_stopped(
    tmp_path: Path, train: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep that is killed after its decision does not train the rest of the pruned trial."""
    train.exit_code = lambda call: 75 if call == 4 else 0
    train.losses = lambda call: 9.0 if call == 4 else 1.0 / call
    with monkeypatch.context() as patch:
        finish = SweepStudy.finish

        def die(study: SweepStudy, trial: TrialRecord, status: Status, **more: Any) -> None:
            if status == "pruned":
                raise KeyboardInterrupt
            finish(study, trial, status, **more)

        patch.setattr(SweepStudy, "finish", die)
        with pytest.raises(KeyboardInterrupt):
            go(make_sweep(tmp_path, num_trials=5))
    result = go(make_sweep(tmp_path, num_trials=5))
    assert statuses(result) == ["done", "done", "done", "pruned", "done"]
    assert result.trials[3].objective == 9.0
    assert train.trained == ["s-000", "s-001", "s-002", "s-003", "s-004"]


def test_other_settings_need_another_name(tmp_path: Path, train: Training) -> None:
    go(make_sweep(tmp_path, num_trials=1))
    with pytest.raises(InputError) as raised:
        go(replace(make_sweep(tmp_path, "rank=8,16", num_trials=1), seed=1))
    assert "seed: 0 before, 1 now" in str(raised.value)
    assert "choose another --name" in raised.value.hint
    assert len(train.trained) == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    with pytest.raises(InputError, match="exists and is not a sweep"):
        go(replace(make_sweep(tmp_path), name="other"))


def test_a_foreign_run_is_not_touched(tmp_path: Path, train: Training) -> None:
    sweep = make_sweep(tmp_path, num_trials=1)
    other = replace(sweep, name="t")
    go(other)
    (tmp_path / "t-000").rename(tmp_path / "s-000")
    (tmp_path / "s-000/request.json").write_text("{}")
    with pytest.raises(InputError, match="exists and was not trained by this sweep"):
        go(sweep)
    assert len(train.trained) == 1


def test_two_sweeps_do_not_share_a_folder(tmp_path: Path, train: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.core.file_lock._WAIT_SECONDS", 0.1)
    (tmp_path / "s").mkdir()
    with (
        folder_locked(RunPaths(tmp_path / "s"), ""),
        pytest.raises(InputError, match="another process runs this sweep"),
    ):
        go(make_sweep(tmp_path))
    assert not train.trained


def test_parameters_that_were_tried_are_not_trained_again(tmp_path: Path, train: Training) -> None:
    """Three of four combinations, proposed at random."""
    result = go(make_sweep(tmp_path, "rank=8,16", "packing=true,false"))
    assert len({tuple(trial.values.values()) for trial in result.trials if trial.status == "done"}) == 3
    assert len(train.trained) == 3
    assert all("same parameters as" in trial.reason for trial in result.trials if trial.status == "repeated")


def test_a_name_that_is_no_folder_is_refused(tmp_path: Path, train: Training) -> None:
    for name in ("../up", "a/b", "n" * 99, ""):
        with pytest.raises(InputError, match="--name"):
            go(replace(make_sweep(tmp_path), name=name))
    assert not train.trained


@pytest.mark.parametrize("text", ["accuracy", "eval/", "eval_equal", ""])
def test_wrong_objectives_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="must be eval_loss or eval/<check>"):
        parse_objective(text)


@pytest.mark.usefixtures("train")
def test_command_of_the_best_trial_has_all_flags_of_the_sweep(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, num_trials=1, overrides=("training.config.dropout=0",))
    sweep = replace(sweep, request=replace(sweep.request, random_weights=True, tokens_per_row=90, hang_seconds=70))
    (trial,) = go(sweep).trials
    words = shlex.split(_format_command(sweep, trial))
    for wanted in (["--set", "training.config.dropout=0"], ["--tokens-per-row", "90"], ["--hang-timeout", "70"]):
        assert words[words.index(wanted[1]) - 1 :][:2] == wanted
    assert {"--random-weights", "--no-calibration"} <= {*words}
    assert all(f"{key}={value}" in words for key, value in trial.values.items())
