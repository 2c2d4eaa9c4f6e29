"""The study of a sweep: proposals, pruning, and what is left after a kill."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from launcher.core.errors import RunFailedError
from launcher.launch.sweep.space import Param
from launcher.launch.sweep.study import STUDY_FILE, SweepStudy, TrialRecord

pytestmark = pytest.mark.long

pytest.importorskip("optuna", reason="pip install 'expert-launcher[sweep]'")

RATE = Param(key="training.config.learning_rate", low=1e-5, high=1e-2, is_log=True)
RANK = Param(key="training.config.rank", choices=("8", "16", "32"))
SEED = 3


def open_study(folder: Path | None, *params: Param, num_trials: int = 8, maximizes: bool = False) -> SweepStudy:
    return SweepStudy(folder, params or (RATE, RANK), maximizes=maximizes, seed=SEED, num_trials=num_trials)


def compute_loss(trial: TrialRecord) -> float:
    return abs(float(trial.values[RATE.key]) - 1e-3)


def test_a_study_that_is_opened_for_each_trial_proposes_the_same(tmp_path: Path) -> None:
    """Proposals depend on the seed and the results, so a killed sweep continues as if nothing had happened."""
    whole = open_study(None)
    for _ in range(8):
        trial = whole.ask()
        whole.finish(trial, "done", objective=compute_loss(trial), seconds=1.0)
    for _ in range(8):
        trial = open_study(tmp_path).ask()
        open_study(tmp_path).finish(trial, "done", objective=compute_loss(trial), seconds=1.0)
    assert open_study(tmp_path).trials == whole.trials
    assert len({trial.values[RATE.key] for trial in whole.trials}) == 8
    assert all(1e-5 <= float(trial.values[RATE.key]) <= 1e-2 for trial in whole.trials)


def test_a_running_trial_is_found_again(tmp_path: Path) -> None:
    trial = open_study(tmp_path).ask()
    assert trial.status == "running"
    assert not open_study(tmp_path).report(trial, 500, 1.0)
    (found,) = open_study(tmp_path).trials
    assert (found.values, found.status, found.reported) == (trial.values, "running", (500,))


def test_a_grid_is_covered_once_in_order(tmp_path: Path) -> None:
    for _ in range(3):
        study = open_study(tmp_path, RANK, num_trials=3)
        study.finish(study.ask(), "done", objective=1.0)
    assert [trial.values[RANK.key] for trial in open_study(tmp_path, RANK, num_trials=3).trials] == ["8", "16", "32"]


@pytest.mark.parametrize("maximizes", [False, True])
def test_a_trial_worse_than_the_median_is_pruned(maximizes: bool) -> None:
    study = open_study(None, maximizes=maximizes)
    good, bad = (0.9, 0.1) if maximizes else (0.1, 0.9)
    for _ in range(3):
        trial = study.ask()
        assert not study.report(trial, 500, bad), "there is no median yet"
        assert not study.report(trial, 600, 0.5)
        study.finish(trial, "done", objective=0.5)
    trial = study.ask()
    assert not study.report(trial, 600, good)
    study.finish(trial, "done", objective=good)
    trial = study.ask()
    assert study.report(trial, 600, bad)
    pending = study.trials[-1]
    assert (pending.status, pending.is_pruned) == ("running", True)
    study.finish(pending, "pruned", objective=bad, seconds=2.0, reason="worse")
    assert (study.trials[-1].status, study.trials[-1].objective, study.trials[-1].seconds) == ("pruned", bad, 2.0)


def test_infeasible_and_failed_trials_keep_their_reason(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    study.finish(study.ask(), "infeasible", reason="does not fit")
    study.finish(study.ask(), "failed", seconds=3.0, reason="exit code 4")
    assert [(trial.status, trial.objective, trial.reason) for trial in open_study(tmp_path).trials] == [
        ("infeasible", None, "does not fit"),
        ("failed", None, "exit code 4"),
    ]


def test_a_damaged_database_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / STUDY_FILE).write_bytes(b"not a database " * 100)
    with pytest.raises(RunFailedError, match=r"study\.db: the study cannot be read or written: file is not a database"):
        open_study(tmp_path)


def test_a_locked_database_is_an_error_without_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.launch.sweep.study._LOCK_SECONDS", 0.1)
    study = open_study(tmp_path)
    other = sqlite3.connect(tmp_path / STUDY_FILE)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(RunFailedError, match="database is locked"):
        study.ask()
    other.close()
