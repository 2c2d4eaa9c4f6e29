"""Overhead of metrics, console and W&B: blocks of steps with all of them alternate with blocks without.

Blocks alternate within one run, so that other load affects both alike. W&B logs offline in its own process, as in any
run; in blocks without tracking, that process and its service are stopped. The host time of observers is also measured
directly.

    python benchmarks/tracking_overhead.py --case 0.6B-lora-16 --out overhead.jsonl     # on a GPU
    python benchmarks/tracking_overhead.py --case tiny-lora --out overhead.jsonl        # anywhere
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.training import GROUPS, Case, build
from launcher.core import metrics
from launcher.core.metrics import CutMetrics, StepMetrics
from launcher.core.processes import find_children, send_signal
from launcher.training.engine.run import TrainingRun
from launcher.training.loop import train
from launcher.training.monitoring.goodput import GoodputTracker
from launcher.training.monitoring.meters import Meter, StepStats, open_meters
from launcher.training.observers.base import Observer, Observers
from launcher.training.observers.console import Console
from launcher.training.observers.memory_pressure import MemoryPressure
from launcher.training.observers.metrics_writer import MetricsWriter
from launcher.training.observers.nonfinite_steps import NonfiniteSteps
from launcher.training.runtime.run_record import RunRecorder, collect_versions
from launcher.training.tracking.tracker_process import start_trackers

WARMUP_STEPS = 6


class AlternatingObserver(Observer, Meter):
    """Observes and measures in every second block, and records all step times."""

    def __init__(self, observer: Observer, measure: Meter, block: int) -> None:
        self._observer, self._measure, self._block = observer, measure, block
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.host_seconds: list[float] = []
        self._measure_seconds = 0.0
        self._was_on = True

    def is_on(self, step: int) -> bool:
        return (step - WARMUP_STEPS) // self._block % 2 == 0

    def on_start(self, run: TrainingRun, step: int) -> None:
        self._observer.on_start(run, step)

    def switch(self, *, is_on: bool) -> None:
        """Stop the W&B processes at the end of a block, or continue them."""
        if is_on != self._was_on:
            uploaders = [pid for pid, _ in find_children(os.getpid()) if _is_uploader(pid)]
            services = [pid for uploader in uploaders for pid, _ in find_children(uploader)]
            send_signal((*uploaders, *services), signal.SIGCONT if is_on else signal.SIGSTOP)
        self._was_on = is_on

    def read(self, done: StepStats) -> dict[str, float]:
        self._measure_seconds = 0.0
        if not self.is_on(done.step):
            return {}
        began = time.perf_counter()
        values = {**self._measure.read(done), **self._measure.read_totals()}
        self._measure_seconds = time.perf_counter() - began
        return values

    def on_step(self, run: TrainingRun, metrics_: StepMetrics) -> None:
        is_on = self.is_on(metrics_.step)
        self.switch(is_on=self.is_on(metrics_.step + 1))
        if metrics_.step > WARMUP_STEPS:
            self.seconds[is_on].append(metrics_.values[metrics.STEP_SECONDS])
        if is_on:
            began = time.perf_counter()
            self._observer.on_step(run, metrics_)
            self.host_seconds.append(time.perf_counter() - began + self._measure_seconds)


def _is_uploader(pid: int) -> bool:
    return b"launcher.training.tracking.wandb_uploader" in Path(f"/proc/{pid}/cmdline").read_bytes()


def measure_case(case: Case, block: int) -> dict[str, Any]:
    os.environ["WANDB_MODE"] = "offline"
    with tempfile.TemporaryDirectory() as name:
        run, _ = build(case, Path(name))
        chronicle = RunRecorder(run.paths, is_main=True)
        chronicle.update(data_key=run.data_key, num_steps=run.num_steps)
        chronicle.attach_trackers(start_trackers(run.plan, run.paths, run.engine.accelerator))
        ledger = GoodputTracker()
        ledger.start(run.heartbeat, CutMetrics())
        with open_meters(run, ledger, CutMetrics()) as measure:
            observer = AlternatingObserver(
                Observers([Console(), MetricsWriter(), NonfiniteSteps(), MemoryPressure()]), measure, block
            )
            train(run, observer, meter=observer)
            observer.switch(is_on=True)
        chronicle.finish(status="done", exit_code=0)
    on, off = (statistics.median(observer.seconds[is_on]) for is_on in (True, False))
    return {
        "case": case.name,
        "step_seconds_tracked": round(on, 6),
        "step_seconds_untracked": round(off, 6),
        "overhead": round(on / off - 1, 5),
        "host_milliseconds_per_step": round(1000 * statistics.median(observer.host_seconds), 4),
        "num_steps_each": len(observer.seconds[False]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="0.6B-lora-16", help="one of benchmarks/training.py")
    parser.add_argument("--steps", type=int, default=126)
    parser.add_argument("--block", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    (case,) = [case for group in GROUPS.values() for case in group if case.name == args.case]
    row = measure_case(dataclasses.replace(case, num_steps=args.steps), args.block)
    row |= {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": collect_versions(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    with args.out.open("a") as out:
        out.write(json.dumps(row, sort_keys=True) + "\n")
    print(json.dumps(row, indent=2, sort_keys=True), file=sys.stderr)


if __name__ == "__main__":
    main()
