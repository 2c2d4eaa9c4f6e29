"""One trial of a sweep: a run directory, trained or resumed as by `launcher train`, and stopped if it is pruned."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.core.errors import InputError, LauncherError, first_line
from launcher.core.file_lock import check_unlocked
from launcher.core.metrics import TOTAL_SECONDS, StepMetrics, load_metrics
from launcher.core.run_files import read_text
from launcher.core.run_paths import RunPaths, make_run_paths
from launcher.launch.console import Console
from launcher.launch.prepare_data import prepare_planned
from launcher.launch.restart import StartOptions, run_with_restarts
from launcher.launch.resume import ResumedRun, check_unchanged, plan_resumed, rewrite_run
from launcher.launch.start import check_packages, check_startable
from launcher.launch.write_run import write_run
from launcher.request.request import PlannedRun, Request, format_request, plan_request
from launcher.runs.evaluations import find_kept_step
from launcher.runs.record import Outcome, load_outcome, load_record

_POLL_SECONDS = 1.0
_READ_SHARE = 0.05  # fraction of the time that reading the metrics of a long run may take
_POSITIONS = 1000  # of a run: trials with different numbers of steps are compared at the same fraction


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRun:
    """The run of a trial, and its plan."""

    planned: PlannedRun
    paths: RunPaths
    resumed: ResumedRun | None  # None: it has no run directory yet

    @property
    def is_done(self) -> bool:
        """Whether the training of this trial has finished."""
        return self.resumed is not None and self.resumed.is_done

    @property
    def seconds(self) -> float:
        """Return the seconds that this trial has taken so far."""
        times = [row.values[TOTAL_SECONDS] for row in _load_rows(self.paths) if TOTAL_SECONDS in row.values]
        return times[-1] if times else 0.0


def plan_trial(request: Request, overrides: Sequence[str], runs_dir: Path, run_id: str) -> TrialRun:
    """Plan a trial, or the rest of an interrupted one; raises LauncherError if nothing fits or settings are invalid."""
    paths = make_run_paths(runs_dir, run_id)
    own = replace(request, overrides=(*request.overrides, *overrides))
    if not paths.plan.is_file():
        if paths.root.is_dir() and not paths.checkpoints.exists() and not paths.metrics.exists():
            shutil.rmtree(paths.root, ignore_errors=True)  # killed while it was written
        return TrialRun(planned=plan_request(own), paths=paths, resumed=None)
    if read_text(paths.request) != format_request(own):
        raise InputError(
            f"{paths.root} exists and was not trained by this sweep", hint="choose another --name for the sweep"
        )
    resumed = plan_resumed(runs_dir, run_id, Request(expert=request.expert))
    return TrialRun(planned=resumed.planned, paths=paths, resumed=resumed)


class Watcher(threading.Thread):
    """Thread that follows a run's metrics, and stops the run if it is pruned, over budget or interrupted."""

    def __init__(
        self,
        trial: TrialRun,
        metric: str,
        report: Callable[[int, float], bool] | None,  # stores an evaluation, returns whether to prune; None: never
        reported: Sequence[int],
        seconds_left: float | None,
        stop_requested: Callable[[], bool],  # a signal came before the training could receive it
    ) -> None:
        super().__init__(name="sweep", daemon=True)
        self._trial, self._metric, self._report, self._stop_requested = trial, metric, report, stop_requested
        self._reported, self._size = set(reported), -1
        self._deadline = None if seconds_left is None else time.monotonic() + seconds_left
        self._ended = threading.Event()
        self.stop_reason = ""  # why the sweep stopped the run: "pruned", "budget" or "signal"
        self.error = ""

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()
        self.join()

    def run(self) -> None:
        """Poll until the run is stopped or has ended."""
        pause = _POLL_SECONDS
        while not self._ended.wait(pause) and not self.stop_reason:
            began = time.monotonic()
            try:
                self._look()
            except (LauncherError, OSError) as error:  # the run itself continues
                self.error = first_line(error)
                return
            pause = max(_POLL_SECONDS, (time.monotonic() - began) / _READ_SHARE)

    def _look(self) -> None:
        if self._stop_requested():
            self._stop_run("signal")
            return
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._stop_run("budget")
            return
        file = self._trial.paths.metrics
        size = file.stat().st_size if file.is_file() else -1
        if size == self._size or self._report is None:
            return
        self._size = size
        for position, value in find_evaluations(self._trial, self._metric):
            if position not in self._reported:
                self._reported.add(position)
                if self._report(position, value):
                    self._stop_run("pruned")
                    return

    def _stop_run(self, reason: str) -> None:
        self.stop_reason = reason
        os.kill(os.getpid(), signal.SIGUSR1)  # supervise() forwards it: finish the step, save, exit


def find_evaluations(trial: TrialRun, metric: str) -> list[tuple[int, float]]:
    """Return the evaluations before the last step, each with its position in the run in thousandths."""
    outcome = load_outcome(trial.paths.outcome)
    num_steps = trial.planned.plan.schedule.num_steps if outcome is None else outcome.num_steps
    rows = [row for row in _load_rows(trial.paths) if row.step > 0 and metric in row.values]
    if not num_steps:
        return []
    return [(_POSITIONS * row.step // num_steps, row.values[metric]) for row in rows if row.step < num_steps]


def _load_rows(paths: RunPaths) -> list[StepMetrics]:
    try:
        return load_metrics(paths.metrics)
    except InputError:  # it does not exist, or is being rewritten by a resume
        return []


def prepare_trial(trial: TrialRun) -> None:
    """Prepare the data of a trial unless it is cached; raise InputError if the trial cannot start on this machine."""
    check_startable(trial.planned.plan)
    check_packages(trial.planned.plan)
    prepare_planned(trial.planned, lambda _text: None, lambda _rows: None)


def train_trial(trial: TrialRun, watcher: Watcher, max_restarts: int) -> Outcome:
    """Train or resume the run of a trial to its end; the output is only in the run's console.log."""
    paths = trial.paths
    if trial.resumed is not None:
        check_unchanged(trial.resumed)
        check_unlocked(paths)
    if trial.resumed is None:
        write_run(trial.planned, paths.root.parent, paths.run_id)
    else:
        rewrite_run(trial.resumed)
    with Path(os.devnull).open("wb") as nowhere:
        console = Console(stdout=nowhere, stderr=nowhere, columns=None)
        watcher.start()
        try:
            return run_with_restarts(trial.planned, paths, console, StartOptions(max_restarts=max_restarts))
        finally:
            watcher.end()


def load_objective(paths: RunPaths, metric: str) -> float | None:
    """Return a metric of the weights that a run kept, at its best step or at its last evaluation; None if unknown."""
    record = load_record(paths)
    rows = [row for row in record.rows if row.step > 0 and metric in row.values]
    kept = find_kept_step(record)
    return next((row.values[metric] for row in rows if row.step == kept), rows[-1].values[metric] if rows else None)
