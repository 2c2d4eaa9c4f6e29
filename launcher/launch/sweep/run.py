"""A sweep: plans, trains and records one trial after another, within its budget, and continues after a kill."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from launcher.core.errors import ExitCode, InputError, LauncherError, Problem, RunFailedError, hint_for
from launcher.core.file_lock import folder_locked
from launcher.core.frozen_model import Frozen
from launcher.core.metrics import EVAL_LOSS, EVAL_PREFIX
from launcher.core.run_files import load_model
from launcher.core.run_paths import RunPaths, make_run_paths, write_text_atomically
from launcher.core.units import format_duration
from launcher.launch.supervise import collect_signals
from launcher.launch.sweep.space import Param, list_grid
from launcher.launch.sweep.study import Status, SweepStudy, TrialRecord
from launcher.launch.sweep.trial import (
    TrialRun,
    Watcher,
    find_evaluations,
    load_objective,
    plan_trial,
    prepare_trial,
    train_trial,
)
from launcher.plan.model import Plan
from launcher.plan.resume_identity import find_changed_settings
from launcher.request.request import Request, format_request
from launcher.runs.record import load_outcome

_RECORD_FILE = "sweep.json"
_MAX_REPEATED = 20  # proposals in a row that were tried before: the space is exhausted
_MAX_FAILED = 3  # trials in a row that crash: not a matter of their parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """Settings of a sweep: what is searched, for how long, and where its runs are stored."""

    request: Request
    params: tuple[Param, ...]
    runs_dir: Path
    name: str
    num_trials: int
    objective: str = EVAL_LOSS  # or eval/<check>
    seed: int = 0
    prunes: bool = True
    max_seconds: float | None = None
    max_restarts: int = 0

    @property
    def folder(self) -> Path:
        """Return the folder of the study."""
        return self.runs_dir / self.name

    @property
    def maximizes(self) -> bool:
        """Return whether a higher objective is better."""
        return self.objective != EVAL_LOSS

    @property
    def num_planned(self) -> int:
        """Return the number of trials; if all parameters are lists, at most the number of their combinations."""
        grid = list_grid(self.params, self.num_trials)
        return self.num_trials if grid is None else len(grid)

    def open_study(self, *, in_memory: bool = False) -> SweepStudy:
        """Open the study, or create it."""
        folder = None if in_memory else self.folder
        return SweepStudy(folder, self.params, maximizes=self.maximizes, seed=self.seed, num_trials=self.num_trials)

    def name_run(self, trial: TrialRecord) -> str:
        """Return the id of a trial's run."""
        return f"{self.name}-{trial.number:03d}"


class _SweepRecord(Frozen):
    """Content of sweep.json: the settings that must not change when a sweep continues."""

    schema_version: Literal[1] = 1
    settings: dict[str, JsonValue]


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepResult:
    """All trials of a sweep, and why it ended."""

    trials: list[TrialRecord]
    best: TrialRecord | None  # None: no trial is done
    ended_because: str
    exit_code: ExitCode


def check_objective(plan: Plan, objective: str) -> None:
    """Raise InputError if evaluation is off, or if another metric than the objective chooses the best checkpoint."""
    schedule = plan.schedule
    if schedule.evaluate_every_steps is None and schedule.evaluate_every_epochs is None:
        raise InputError(
            "a sweep compares evaluations, but evaluation is off",
            hint="add --set training.config.evaluation_strategy=epoch",
        )
    if objective != EVAL_LOSS and schedule.metric_for_best_model != objective:
        what = f"--objective {objective} differs from metric_for_best_model={schedule.metric_for_best_model}"
        raise InputError(what, hint="remove metric_for_best_model from --set")


def parse_objective(text: str) -> str:
    """Return the metric that --objective names."""
    if text in ("loss", "eval_loss", EVAL_LOSS):
        return EVAL_LOSS
    if not text.startswith(EVAL_PREFIX) or text == EVAL_PREFIX:
        raise InputError(f"--objective {text}: must be eval_loss or eval/<check>, such as eval/parses")
    return text


def run_sweep(sweep: Sweep, log: Callable[[str], None]) -> SweepResult:
    """Run trials until their number, the budget or the search space is exhausted, or a signal arrives."""
    try:
        make_run_paths(sweep.runs_dir, f"{sweep.name}-{10**6}")  # the longest id of a trial
    except InputError as error:
        raise InputError(f"--name {sweep.name!r} gives no valid run ids ({error.title})") from None
    paths = RunPaths(sweep.folder)
    _create_folder(paths)
    with folder_locked(paths, "another process runs this sweep"):
        _check_same(sweep, paths)
        study = sweep.open_study()
        ended, code = _Runner(sweep, study, log).run()
        trials = study.trials
    done = [trial for trial in trials if trial.status == "done" and trial.objective is not None]
    sign = -1.0 if sweep.maximizes else 1.0
    best = min(done, key=lambda trial: (sign * (trial.objective or 0.0), trial.number), default=None)
    return SweepResult(trials=trials, best=best, ended_because=ended, exit_code=code)


class _Runner:
    """Runs the trials of one sweep."""

    def __init__(self, sweep: Sweep, study: SweepStudy, log: Callable[[str], None]) -> None:
        self._sweep, self._study, self._log = sweep, study, log
        self._watcher: Watcher | None = None
        self._received: list[int] = []  # stop signals

    def run(self) -> tuple[str, ExitCode]:
        """Run trials; return why the sweep ended, and its exit code."""
        num_repeated = 0
        with collect_signals(self._note_signal):
            while True:
                if self._received:
                    return f"stopped by {signal.Signals(self._received[0]).name}", ExitCode.PREEMPTED
                trials = self._study.trials
                _check_failures(trials)
                trial = next((trial for trial in trials if trial.status == "running"), None)
                if trial is None:
                    if sum(each.status != "repeated" for each in trials) >= self._sweep.num_planned:
                        return "all trials are done", ExitCode.DONE
                    trial = self._study.ask()
                if earlier := _find_repeated(trial, trials):
                    num_repeated += 1
                    self._finish_repeated(trial, earlier)
                    if num_repeated >= _MAX_REPEATED:
                        return f"the last {_MAX_REPEATED} proposed parameters had all been tried before", ExitCode.DONE
                    continue
                num_repeated = 0
                ended = self._run_trial(trial)
                if ended is not None:
                    return ended

    def _note_signal(self, number: int) -> None:
        """Record a stop signal, which does not end this process; the training of a running trial receives it, too."""
        if self._watcher is None or not self._watcher.stop_reason:  # else the run had ended before its signal
            self._received.append(number)

    def _finish_repeated(self, trial: TrialRecord, earlier: TrialRecord) -> None:
        known = None if earlier.status == "pruned" else earlier.objective
        self._study.finish(trial, "repeated", objective=known, reason=f"same parameters as trial {earlier.number}")

    def _run_trial(self, trial: TrialRecord) -> tuple[str, ExitCode] | None:
        """Plan, train and record one trial; return why the sweep ends and its exit code, or None if it continues."""
        sweep, label = self._sweep, f"trial {trial.number} ({format_values(trial)})"
        try:
            run = plan_trial(sweep.request, trial.overrides, sweep.runs_dir, sweep.name_run(trial))
            if not run.is_done and not trial.is_pruned:
                prepare_trial(run)
        except LauncherError as error:
            has_run = RunPaths(sweep.runs_dir / sweep.name_run(trial)).plan.is_file()
            if has_run or isinstance(error, RunFailedError):  # not a matter of the parameters
                raise
            reason = "; ".join([error.title, *map(str, error.problems)])
            self._study.finish(trial, "infeasible", reason=reason)
            self._log(f"{label}: infeasible: {reason}")
            return None
        is_pruned = trial.is_pruned  # before the sweep was killed
        if not run.is_done and not is_pruned:
            ended, is_pruned = self._train(trial, run, label)
            if ended is not None:
                return ended
        self._record(trial, run, label, is_pruned=is_pruned)
        return None

    def _train(self, trial: TrialRecord, run: TrialRun, label: str) -> tuple[tuple[str, ExitCode] | None, bool]:
        """Train a trial if the budget allows; return why the sweep ends, or None, and whether the trial was pruned."""
        sweep, trials = self._sweep, self._study.trials
        needed, left = estimate_seconds(run, trials), None
        if sweep.max_seconds is not None:
            left = sweep.max_seconds - run.seconds - sum(each.seconds for each in trials)
            if left <= 0 or (needed or 0.0) > left:
                takes = "" if needed is None else f", and trial {trial.number} takes about {format_duration(needed)}"
                return (f"the budget has {format_duration(max(0.0, left))} left{takes}", ExitCode.DONE), False
        verb = "training" if run.resumed is None else "resuming"
        self._log(f"{label}: {verb} {run.paths.root}{'' if needed is None else f', about {format_duration(needed)}'}")
        self._watcher = watcher = Watcher(
            run,
            sweep.objective,
            (lambda position, value: self._study.report(trial, position, value)) if sweep.prunes else None,
            trial.reported,
            left,
            lambda: bool(self._received),
        )
        outcome = train_trial(run, watcher, sweep.max_restarts)
        self._watcher = None
        if watcher.error:
            self._log(f"warning: {label} could not be pruned: {watcher.error}")
        is_pruned = watcher.stop_reason == "pruned"
        if outcome.exit_code != ExitCode.PREEMPTED or is_pruned:
            return None, is_pruned
        if watcher.stop_reason == "budget":
            return (f"the budget is spent; trial {trial.number} is not finished", ExitCode.DONE), False
        return ("stopped by a signal", ExitCode.PREEMPTED), False

    def _record(self, trial: TrialRecord, run: TrialRun, label: str, *, is_pruned: bool) -> None:
        metric, seconds = self._sweep.objective, run.seconds
        outcome = load_outcome(run.paths.outcome)
        exit_code = None if outcome is None else outcome.exit_code
        value: float | None = None
        if exit_code == ExitCode.DONE or is_pruned:
            is_pruned = exit_code != ExitCode.DONE  # it may have ended before the signal
            if not is_pruned and self._sweep.prunes:  # evaluations shortly before its end, for the median
                reported = next(each.reported for each in self._study.trials if each.number == trial.number)
                for position, known in find_evaluations(run, metric):
                    if position not in reported:
                        self._study.report(trial, position, known)
            value = load_objective(run.paths, metric)
            if value is not None and math.isfinite(value):
                status: Status = "pruned" if is_pruned else "done"
                reason = "worse than the median of the other trials" if is_pruned else ""
                shown = f"{metric} {value:.4f}{', pruned' if is_pruned else ''} after {format_duration(seconds)}"
            else:
                status, reason, value = "failed", f"no finite {metric} was computed", None
                shown = f"failed: {reason}"
        else:
            status = "infeasible" if exit_code == ExitCode.DOES_NOT_FIT else "failed"
            error = "" if outcome is None else outcome.error.strip()
            reason = error.splitlines()[0] if error else f"exit code {exit_code}"
            shown = f"{status}: {reason}; its output is in {run.paths.console_log}"
        self._study.finish(trial, status, objective=value, seconds=seconds, reason=reason)
        self._log(f"{label}: {shown}")


def estimate_seconds(run: TrialRun, trials: Sequence[TrialRecord]) -> float | None:
    """Return a trial's remaining seconds: by its plan or by the mean of done trials if longer; None if unknown."""
    planned = run.planned.plan.speed.total_seconds
    measured = [trial.seconds for trial in trials if trial.status == "done" and trial.seconds]
    mean = sum(measured) / len(measured) if measured else None
    total = max(filter(None, (planned, mean)), default=None)
    return None if total is None else max(0.0, total - run.seconds)


def format_values(trial: TrialRecord) -> str:
    """Return the parameters of a trial as text."""
    return ", ".join(f"{key.rpartition('.')[2]}={shorten_number(value)}" for key, value in trial.values.items())


def shorten_number(text: str) -> str:
    """Shorten a number to four significant digits for display; the run uses all of them."""
    try:
        return text if text.lstrip("-").isdigit() else f"{float(text):.4g}"
    except ValueError:
        return text.strip('"')


def _find_repeated(trial: TrialRecord, trials: Sequence[TrialRecord]) -> TrialRecord | None:
    """Return a finished trial with the same parameters as `trial`; None if there is none."""
    finished = (each for each in trials if each.status not in ("running", "repeated", "failed"))
    return next((each for each in finished if each.values == trial.values), None)


def _check_failures(trials: Sequence[TrialRecord]) -> None:
    last = [trial for trial in trials if trial.status not in ("running", "repeated")][-_MAX_FAILED:]
    if len(last) == _MAX_FAILED and all(trial.status == "failed" for trial in last):
        raise RunFailedError(
            f"the last {_MAX_FAILED} trials failed",
            tuple(Problem(where=f"trial {trial.number}", what=trial.reason) for trial in last),
            hint="correct the cause, then start another sweep with --name",
        )


def _create_folder(paths: RunPaths) -> None:
    try:
        paths.root.mkdir(parents=True, exist_ok=True)
        is_other = any(not file.name.startswith(".") for file in paths.root.iterdir())
    except OSError as error:
        hint = hint_for(error, "--runs-dir")
        raise InputError(f"{paths.root} cannot be created: {error.strerror}", hint=hint) from None
    if is_other and not (paths.root / _RECORD_FILE).exists():
        raise InputError(f"{paths.root} exists and is not a sweep", hint="choose another --name")


def _check_same(sweep: Sweep, paths: RunPaths) -> None:
    """Store the settings of a new sweep; raise InputError if an existing sweep was started with other settings."""
    params = [f"{param.key}: {param.describe()}" for param in sweep.params]
    settings = {**json.loads(format_request(sweep.request)), "objective": sweep.objective, "seed": sweep.seed}
    record = _SweepRecord(settings={**settings, "params": params})
    file = paths.root / _RECORD_FILE
    if not file.exists():
        write_text_atomically(file, record.model_dump_json(indent=2) + "\n")
        return
    before = load_model(_SweepRecord, file).settings
    problems = find_changed_settings(before, record.settings)
    if problems:
        raise InputError(
            f"{paths.root}: this sweep was started with other settings",
            problems,
            "repeat the command as it was, or choose another --name; --trials and the budget may change",
        )
