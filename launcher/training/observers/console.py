"""Print progress, speed and remaining time: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
import time
from bisect import bisect_left
from collections import deque
from math import ceil, isfinite
from statistics import fmean, median

from launcher.core import metrics as names
from launcher.core.log import get_logger
from launcher.core.metrics import StepMetrics, find_values, load_metrics
from launcher.core.processes import LAUNCHER_TERMINAL
from launcher.core.units import format_count, format_duration, format_percent
from launcher.training.engine.run import TrainingRun
from launcher.training.observers.base import Observer

log = get_logger(__name__)

_BAR_WIDTH = 20
_RECENT_STEPS = 20


class _Epoch:
    """Losses, rows and seconds of the steps of one epoch."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._rows = self._seconds = 0.0

    def add(self, metrics: StepMetrics) -> None:
        seconds = metrics.values[names.STEP_SECONDS]
        self._losses.append(metrics.values[names.TRAIN_LOSS])
        self._rows += metrics.values[names.SAMPLES_PER_SECOND] * seconds
        self._seconds += seconds

    def describe(self) -> str:
        finite = [loss for loss in self._losses if isfinite(loss)]
        loss = f"mean loss {fmean(finite):.4f}" if finite else "no finite loss"
        rate = self._rows / max(1e-9, self._seconds)
        return f"{loss}  {format_duration(self._seconds)}  {rate:,.{0 if rate >= 10 else 2}f} rows/s"


def _load_epoch(run: TrainingRun, step: int) -> _Epoch:
    """Return the totals of the current epoch, read from the recorded metrics of steps up to `step`."""
    epoch = _Epoch()
    first = step - step % run.steps_per_epoch
    if step > first and run.paths.metrics.exists():
        for row in load_metrics(run.paths.metrics, max_bytes=None):
            if first < row.step <= step and names.STEP_SECONDS in row.values:
                epoch.add(row)
    return epoch


class _EvaluationTime:
    """Estimates the time of the evaluations ahead: each takes as long as the last one."""

    def __init__(self, run: TrainingRun | None = None) -> None:
        self._steps: list[int] = []  # after which the model is evaluated
        if run is not None:
            every = run.plan.schedule.evaluate_every_steps, run.plan.schedule.evaluate_every_epochs
            self._steps = [step for step in range(1, run.num_steps + 1) if run.is_due(step, *every)]
        self._each = self._base = 0.0

    def add(self, metrics: StepMetrics) -> None:
        seconds = sum(metrics.values.get(name, 0.0) for name in (names.EVAL_SECONDS, names.TASK_SECONDS))
        if metrics.step:
            self._each = seconds
        else:
            self._base = seconds

    def estimate(self, step: int) -> float:
        """Return the seconds of the evaluations after `step`, which may itself be followed by one."""
        ahead = len(self._steps) - bisect_left(self._steps, step)
        # Before the first: only answers were generated, which at least the last evaluation repeats.
        return ahead * self._each if self._each else min(1, ahead) * self._base


class Console(Observer):
    """Prints progress on rank 0."""

    def __init__(self) -> None:
        self._is_terminal = os.environ.get(LAUNCHER_TERMINAL) == "1" or sys.stderr.isatty()
        self._recent: deque[StepMetrics] = deque(maxlen=_RECENT_STEPS)
        self._epoch = _Epoch()
        self._evaluations = _EvaluationTime()
        self._began = time.monotonic()
        self._first = 0

    def on_start(self, run: TrainingRun, step: int) -> None:
        """Print what is trained."""
        batch = run.plan.batch
        sequences = min(batch.global_batch_size, len(run.train.file))  # an epoch may have fewer than a batch
        validation = "" if run.validation is None else f", {len(run.validation.file):,} in the validation split"
        self._print(
            run,
            f"training {run.plan.expert}: {run.num_steps:,} step{'s' if run.num_steps > 1 else ''} of "
            f"{sequences:,} sequence{'s' if sequences > 1 else ''} of {batch.sequence_length:,} tokens "
            f"({len(run.train.file):,} sequences{validation})" + (f", from step {step + 1:,}" if step else ""),
        )
        self._first = step
        if run.engine.is_main:
            self._epoch, self._evaluations = _load_epoch(run, step), _EvaluationTime(run)
        self._began = time.monotonic()

    def on_step(self, run: TrainingRun, metrics: StepMetrics) -> None:
        """Print a line every logging_steps, and move the progress bar."""
        if not run.engine.is_main:
            return
        self._recent.append(metrics)
        is_line = metrics.step % run.plan.schedule.logging_steps == 0 or metrics.step in (1, run.num_steps)
        text = self._describe(run, metrics)
        if is_line:
            self._print(run, f"step {metrics.step:,}/{run.num_steps:,}  {text}")
        elif self._is_terminal:
            self._draw_bar(run, metrics, text)
        self._epoch.add(metrics)
        if metrics.step % run.steps_per_epoch == 0:
            if run.steps_per_epoch > 1:
                number, total = metrics.step // run.steps_per_epoch, ceil(run.num_steps / run.steps_per_epoch)
                self._print(run, f"epoch {number:,}/{total:,}  {self._epoch.describe()}")
            self._epoch = _Epoch()

    def on_evaluation(self, run: TrainingRun, metrics: StepMetrics) -> bool:
        """Print validation loss and task metrics."""
        self._evaluations.add(metrics)
        where = f"step {metrics.step:,}/{run.num_steps:,}" if metrics.step else "base model"
        loss = metrics.get(names.EVAL_LOSS)
        if loss is not None:
            seconds = format_duration(metrics.values[names.EVAL_SECONDS])
            self._print(run, f"{where}  validation loss {loss:.4f}  ({seconds})")
        shares = names.find_task_metrics(metrics)
        if shares:
            results = ", ".join(f"{name} {format_percent(share)}" for name, share in shares.items())
            self._print(run, f"{where}  answers: {results}  ({format_duration(metrics.values[names.TASK_SECONDS])})")
        return False

    def on_end(self, run: TrainingRun, step: int) -> None:
        """Print the total time."""
        seconds = format_duration(time.monotonic() - self._began)
        self._print(run, f"{step - self._first:,} step{'s'[: step != self._first + 1]} in {seconds}")

    def _describe(self, run: TrainingRun, metrics: StepMetrics) -> str:
        """Return loss, speed, memory and remaining time as text; speed is the median of recent steps."""
        seconds, waits, rates, mfus = (
            find_values(self._recent, name)
            for name in (names.STEP_SECONDS, names.DATA_WAIT_SECONDS, names.TOKENS_PER_SECOND, names.DEVICE_MFU)
        )
        parts = [f"loss {metrics.values[names.TRAIN_LOSS]:.4f}", f"{format_count(median(rates))} tokens/s"]
        if mfus:
            parts.append(f"MFU {format_percent(median(mfus))}")
        peak = metrics.get(names.PEAK_ALLOCATED_GIB)
        if peak is not None:
            parts.append(f"VRAM {peak:.1f} GiB")
        parts.append(f"data wait {format_percent(sum(waits) / max(1e-9, sum(seconds)))}")
        left = median(seconds) * (run.num_steps - metrics.step) + self._evaluations.estimate(metrics.step)
        parts.append(f"{format_duration(left)} left")
        return "  ".join(parts)

    def _draw_bar(self, run: TrainingRun, metrics: StepMetrics, text: str) -> None:
        filled = int(_BAR_WIDTH * metrics.step / run.num_steps)
        bar = "█" * filled + "░" * (_BAR_WIDTH - filled)
        line = f"{bar} {metrics.step:,}/{run.num_steps:,}  {text}"
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\033[K{line[:width]}", end="", file=sys.stderr, flush=True)

    def _print(self, run: TrainingRun, line: str) -> None:
        if run.engine.is_main:
            log.info(("\r\033[K" if self._is_terminal else "") + line)
