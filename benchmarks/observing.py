"""What observing costs: the same training with everything that is measured, shown and told, and with nothing, by turns.

Blocks of steps alternate within one run, so that whatever else the machine does falls on both alike. W&B is told
offline, by its process beside the training, as in any run; in blocks without, that process and its service are stopped.
The host's time in observers is measured directly, too.

    python benchmarks/observing.py --case 0.6B-lora-16 --out observing.jsonl     # on a GPU
    python benchmarks/observing.py --case tiny-lora --out observing.jsonl        # anywhere
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
from launcher import metrics
from launcher.metrics import CutMetrics, StepMetrics
from launcher.processes import find_children, send_signal
from launcher.training.chronicle import Chronicle, find_versions
from launcher.training.ledger import Ledger
from launcher.training.loop import train
from launcher.training.measures import Done, Measure, measured
from launcher.training.observers.bad_steps import BadSteps
from launcher.training.observers.base import Observer, Observers
from launcher.training.observers.console import Console
from launcher.training.observers.facts import Facts
from launcher.training.observers.pressure import Pressure
from launcher.training.run import Run
from launcher.training.telling import start_teller

WARM_STEPS = 6


class ByTurns(Observer, Measure):
    """Observes and measures in every second block, and keeps what each step took."""

    def __init__(self, observer: Observer, measure: Measure, block: int) -> None:
        self._observer, self._measure, self._block = observer, measure, block
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.host_seconds: list[float] = []
        self._measuring = 0.0
        self._was_on = True

    def is_on(self, step: int) -> bool:
        return (step - WARM_STEPS) // self._block % 2 == 0

    def on_start(self, run: Run, step: int) -> None:
        self._observer.on_start(run, step)

    def turn(self, *, is_on: bool) -> None:
        """With each block, those who tell W&B stand still, or go on."""
        if is_on != self._was_on:
            tellers = [pid for pid, _ in find_children(os.getpid()) if _is_uplink(pid)]
            services = [pid for teller in tellers for pid, _ in find_children(teller)]
            send_signal((*tellers, *services), signal.SIGCONT if is_on else signal.SIGSTOP)
        self._was_on = is_on

    def read(self, done: Done) -> dict[str, float]:
        self._measuring = 0.0
        if not self.is_on(done.step):
            return {}
        began = time.perf_counter()
        values = {**self._measure.read(done), **self._measure.read_now()}
        self._measuring = time.perf_counter() - began
        return values

    def on_step(self, run: Run, metrics_: StepMetrics) -> None:
        is_on = self.is_on(metrics_.step)
        self.turn(is_on=self.is_on(metrics_.step + 1))
        if metrics_.step > WARM_STEPS:
            self.seconds[is_on].append(metrics_.values[metrics.STEP_SECONDS])
        if is_on:
            began = time.perf_counter()
            self._observer.on_step(run, metrics_)
            self.host_seconds.append(time.perf_counter() - began + self._measuring)


def _is_uplink(pid: int) -> bool:
    return b"launcher.training.uplink" in Path(f"/proc/{pid}/cmdline").read_bytes()


def measure_case(case: Case, block: int) -> dict[str, Any]:
    os.environ["WANDB_MODE"] = "offline"
    with tempfile.TemporaryDirectory() as name:
        run, _ = build(case, Path(name))
        chronicle = Chronicle(run.paths, is_main=True)
        chronicle.note(data_key=run.data_key, num_steps=run.num_steps)
        chronicle.accompany(start_teller(run.plan, run.paths, run.engine.accelerator))
        ledger = Ledger()
        ledger.begin(run.pulse, CutMetrics())
        with measured(run, ledger, CutMetrics()) as measure:
            turns = ByTurns(Observers([Console(), Facts(), BadSteps(), Pressure()]), measure, block)
            train(run, turns, measure=turns)
            turns.turn(is_on=True)
        chronicle.end(status="done", exit_code=0)
    on, off = (statistics.median(turns.seconds[is_on]) for is_on in (True, False))
    return {
        "case": case.name,
        "step_seconds_observed": round(on, 6),
        "step_seconds_alone": round(off, 6),
        "overhead": round(on / off - 1, 5),
        "host_milliseconds_a_step": round(1000 * statistics.median(turns.host_seconds), 4),
        "num_steps_each": len(turns.seconds[False]),
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
        "versions": find_versions(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    with args.out.open("a") as out:
        out.write(json.dumps(row, sort_keys=True) + "\n")
    print(json.dumps(row, indent=2, sort_keys=True), file=sys.stderr)


if __name__ == "__main__":
    main()
