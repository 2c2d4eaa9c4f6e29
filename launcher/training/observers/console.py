"""Where the training is, how fast, and how long it will take: a moving line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import deque
from statistics import median

from launcher import metrics as names
from launcher.errors import say
from launcher.metrics import StepMetrics
from launcher.processes import LAUNCHER_TERMINAL
from launcher.training.observers.base import Observer
from launcher.training.run import Run
from launcher.units import format_count, format_duration, format_percent

_BAR_WIDTH = 20
_RECENT_STEPS = 20


class Console(Observer):
    def __init__(self) -> None:
        self._is_terminal = os.environ.get(LAUNCHER_TERMINAL) == "1" or sys.stderr.isatty()
        self._seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._waits: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._rates: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._mfus: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._began = time.monotonic()
        self._first = 0

    def on_start(self, run: Run, step: int) -> None:
        batch = run.plan.batch
        validation = "" if run.validation is None else f", {len(run.validation.file):,} held out"
        self._say(
            run,
            f"training {run.plan.expert}: {run.num_steps:,} steps of {batch.global_batch_size} sequences of "
            f"{batch.sequence_length:,} tokens ({len(run.train.file):,} sequences{validation})"
            + (f", from step {step + 1:,}" if step else ""),
        )
        self._first = step
        self._began = time.monotonic()

    def on_step(self, run: Run, metrics: StepMetrics) -> None:
        if not run.engine.is_main:
            return
        self._seconds.append(metrics.values[names.STEP_SECONDS])
        self._waits.append(metrics.values[names.DATA_WAIT_SECONDS])
        self._rates.append(metrics.values[names.TOKENS_PER_SECOND])
        if names.DEVICE_MFU in metrics.values:
            self._mfus.append(metrics.values[names.DEVICE_MFU])
        is_line = metrics.step % run.plan.schedule.logging_steps == 0 or metrics.step in (1, run.num_steps)
        text = self._describe(run, metrics)
        if is_line:
            self._say(run, f"step {metrics.step:,}/{run.num_steps:,}  {text}")
        elif self._is_terminal:
            self._move(run, metrics, text)

    def on_evaluation(self, run: Run, metrics: StepMetrics) -> bool:
        where = f"step {metrics.step:,}/{run.num_steps:,}" if metrics.step else "the base"
        loss = metrics.get(names.EVAL_LOSS)
        if loss is not None:
            seconds = format_duration(metrics.values[names.EVAL_SECONDS])
            self._say(run, f"{where}  held-out loss {loss:.4f}  ({seconds})")
        shares = names.find_task_metrics(metrics)
        if shares:
            told = ", ".join(f"{name} {format_percent(share)}" for name, share in shares.items())
            self._say(run, f"{where}  answers: {told}  ({format_duration(metrics.values[names.TASK_SECONDS])})")
        return False

    def on_end(self, run: Run, step: int) -> None:
        seconds = format_duration(time.monotonic() - self._began)
        self._say(run, f"{step - self._first:,} steps in {seconds}")

    def _describe(self, run: Run, metrics: StepMetrics) -> str:
        """The median of recent steps: one stall does not hide how fast it is."""
        values, seconds = metrics.values, median(self._seconds)
        parts = [f"loss {values[names.TRAIN_LOSS]:.4f}", f"{format_count(median(self._rates))} tokens/s"]
        if self._mfus:
            parts.append(f"MFU {format_percent(median(self._mfus))}")
        peak = metrics.get(names.PEAK_ALLOCATED_GIB)
        if peak is not None:
            parts.append(f"VRAM {peak:.1f} GiB")
        parts.append(f"data wait {format_percent(sum(self._waits) / max(1e-9, sum(self._seconds)))}")
        parts.append(f"{format_duration(seconds * (run.num_steps - metrics.step))} left")
        return "  ".join(parts)

    def _move(self, run: Run, metrics: StepMetrics, text: str) -> None:
        filled = int(_BAR_WIDTH * metrics.step / run.num_steps)
        bar = "█" * filled + "░" * (_BAR_WIDTH - filled)
        line = f"{bar} {metrics.step:,}/{run.num_steps:,}  {text}"
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\033[K{line[:width]}", end="", file=sys.stderr, flush=True)

    def _say(self, run: Run, line: str) -> None:
        if run.engine.is_main:
            say(("\r\033[K" if self._is_terminal else "") + line)
