"""Time a few steps of a plan in the launcher's own training loop."""

from __future__ import annotations

import gc
import resource
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from launcher.bench.worker import Timing
from launcher.core import metrics
from launcher.core.errors import InputError
from launcher.core.metrics import StepMetrics
from launcher.core.run_paths import RunPaths
from launcher.core.units import bytes_to_gib
from launcher.corpus.store import Store, load_store_manifest
from launcher.plan.model import Plan
from launcher.request.request import base_folders
from launcher.runs.record import compute_median
from launcher.training.build import build_run
from launcher.training.engine.accelerator import build_accelerator
from launcher.training.engine.engine import Engine
from launcher.training.engine.run import TrainingRun
from launcher.training.loop import train
from launcher.training.monitoring.meters import Meters, NvmlMeter, ThroughputMeter
from launcher.training.monitoring.nvml import NvmlSampler
from launcher.training.observers.base import Observer
from launcher.training.topology_check import check_accelerator
from launcher.training.warmup_step import run_warmup_step


def build(plan: Plan, store: Path, folder: Path) -> tuple[TrainingRun, str]:
    """Build a run as for training, with checks and a warm-up step; return it and a description of what is compiled.

    Nothing is saved or evaluated.
    """
    quiet = _without_interruptions(plan)
    accelerator = build_accelerator(quiet)
    check_accelerator(quiet, accelerator)
    folders = base_folders(Path(plan.data.folder))
    run, _ = build_run(quiet, RunPaths(folder), open_store(store), folders, accelerator)
    run = replace(run, validation=None)
    return run, run_warmup_step(run).description


def open_store(folder: Path) -> Store:
    """Open prepared data; raises InputError if it no longer exists."""
    manifest = load_store_manifest(folder)
    if manifest is None:
        raise InputError(f"{folder}: the prepared data is gone", hint="run the command again to prepare it")
    return Store(folder, manifest)


def _without_interruptions(plan: Plan) -> Plan:
    names = ("save_every_steps", "save_every_epochs", "evaluate_every_steps", "evaluate_every_epochs")
    schedule = plan.schedule.model_copy(update=dict.fromkeys(names))
    return plan.model_copy(update={"schedule": schedule, "task_eval": None, "profile_steps": None})


class _TimedSteps(Observer):
    """Observer that collects the metrics of the steps after warm-up; resets peak memory and GPU counters before."""

    def __init__(self, warmup_steps: int, counters: NvmlSampler) -> None:
        self.rows: list[StepMetrics] = []
        self._warmup_steps, self._counters = warmup_steps, counters

    def on_step(self, run: TrainingRun, metrics: StepMetrics) -> None:  # noqa: ARG002
        if metrics.step > self._warmup_steps:
            self.rows.append(metrics)
        elif metrics.step == self._warmup_steps:
            reset_peak()
            self._counters.read()


def time_block(run: TrainingRun, warmup_steps: int, timed_steps: int) -> Timing:
    """Time steps from the first sequences on. The weights are not reset: step times do not depend on them."""
    counters = NvmlSampler(run.engine.device)
    counters.start()
    steps = _TimedSteps(warmup_steps, counters)
    measures = Meters([ThroughputMeter(run), NvmlMeter(counters, run.engine.num_ranks)])
    try:
        train(replace(run, num_steps=warmup_steps + timed_steps), steps, meter=measures)
    finally:
        counters.stop()
    gc.collect()  # ends the loader's workers
    return _make_timing(run, steps.rows)


def _make_timing(run: TrainingRun, rows: Sequence[StepMetrics]) -> Timing:
    return Timing(
        seconds=tuple(row.values[metrics.STEP_SECONDS] for row in rows),
        tokens=tuple(int(run.train.num_tokens[list(row.packs)].sum()) for row in rows),
        num_skipped=sum(int(row.values[metrics.SKIPPED]) for row in rows),
        data_wait_share=statistics.fmean(row.values[metrics.DATA_WAIT_SHARE] for row in rows),
        mfu=compute_median(rows, metrics.DEVICE_MFU),
        peak_gib=read_peak_gib(run.engine),
        utilization=_mean_over_time(rows, metrics.GPU_UTILIZATION),
        watts=_mean_over_time(rows, metrics.GPU_POWER_WATTS),
    )


def _mean_over_time(rows: Sequence[StepMetrics], name: str) -> float | None:
    """Return the mean of a metric over steps, weighted by their duration; None if no step has it."""
    known = [row for row in rows if name in row.values]
    seconds = sum(row.values[metrics.STEP_SECONDS] for row in known)
    return sum(row.values[name] * row.values[metrics.STEP_SECONDS] for row in known) / seconds if known else None


def reset_peak() -> None:
    """Reset the GPU's memory peak."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def read_peak_gib(engine: Engine | None = None) -> float:
    """Return the peak that torch allocated since reset_peak; without a GPU, the process's peak RSS."""
    if torch.cuda.is_available():
        return bytes_to_gib(torch.cuda.max_memory_allocated() if engine is None else engine.peak_bytes)
    return bytes_to_gib(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
