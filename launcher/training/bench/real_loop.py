"""A few steps of a plan by the loop that trainings have, measured as they are."""

from __future__ import annotations

import gc
import resource
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from launcher import metrics
from launcher.bench.values import Timing
from launcher.corpus.store import Store, load_store_manifest
from launcher.errors import InputError
from launcher.inputs import base_folders
from launcher.metrics import StepMetrics
from launcher.paths import RunPaths
from launcher.plan.model import Plan
from launcher.training.assembly import assemble
from launcher.training.engine import Engine
from launcher.training.gpu_counters import GpuCounters
from launcher.training.loop import train
from launcher.training.measures import Counters, Measures, Throughput
from launcher.training.observers.base import Observer
from launcher.training.run import Run
from launcher.training.starting import start
from launcher.training.topology import check_started
from launcher.training.warming import rehearse_step
from launcher.units import bytes_to_gib


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    run: Run
    attention: str  # that runs: where the planned one is missing, the next
    compiled: str  # in words


def build(plan: Plan, store: Path, folder: Path) -> Built:
    """As a training is built, proof and rehearsal of a step included. Nothing is saved or evaluated on the way."""
    quiet = _without_interruptions(plan)
    accelerator = start(quiet)
    check_started(quiet, accelerator)
    folders = base_folders(Path(plan.data.folder))
    run, _ = assemble(quiet, RunPaths(folder), open_store(store), folders, accelerator)
    run = replace(run, validation=None)
    compiled = rehearse_step(run)
    return Built(run=run, attention=run.plan.attention.backend, compiled=compiled)


def open_store(folder: Path) -> Store:
    manifest = load_store_manifest(folder)
    if manifest is None:
        raise InputError(f"{folder}: the prepared data is gone", hint="start it again: it is prepared anew")
    return Store(folder, manifest)


def _without_interruptions(plan: Plan) -> Plan:
    names = ("save_every_steps", "save_every_epochs", "evaluate_every_steps", "evaluate_every_epochs")
    schedule = plan.schedule.model_copy(update=dict.fromkeys(names))
    return plan.model_copy(update={"schedule": schedule, "tasks": None, "profiled": None})


class _Steps(Observer):
    """Keeps what was measured behind the warm steps, whose peak of memory and samples count for nothing."""

    def __init__(self, warm_steps: int, counters: GpuCounters) -> None:
        self.rows: list[StepMetrics] = []
        self._warm_steps, self._counters = warm_steps, counters

    def on_step(self, run: Run, metrics: StepMetrics) -> None:  # noqa: ARG002
        if metrics.step > self._warm_steps:
            self.rows.append(metrics)
        elif metrics.step == self._warm_steps:
            reset_peak()
            self._counters.read()


def time_block(run: Run, warm_steps: int, timed_steps: int) -> Timing:
    """From the first sequences of the run on. The weights go on from where they are: no step's time depends on them."""
    counters = GpuCounters(run.engine.device)
    counters.start()
    seen = _Steps(warm_steps, counters)
    measures = Measures([Throughput(run), Counters(counters, run.engine.num_ranks)])
    try:
        train(replace(run, num_steps=warm_steps + timed_steps), seen, measure=measures)
    finally:
        counters.stop()
    gc.collect()  # the loader's workers end with it
    return _make_timing(run, seen.rows)


def _make_timing(run: Run, rows: Sequence[StepMetrics]) -> Timing:
    return Timing(
        seconds=tuple(row.values[metrics.STEP_SECONDS] for row in rows),
        tokens=tuple(int(run.train.num_tokens[list(row.packs)].sum()) for row in rows),
        num_skipped=sum(int(row.values[metrics.SKIPPED]) for row in rows),
        data_wait_share=statistics.fmean(row.values[metrics.DATA_WAIT_SHARE] for row in rows),
        mfu=_find_median(rows, metrics.DEVICE_MFU),
        peak_gib=find_peak_gib(run.engine),
        utilization=_find_mean(rows, metrics.GPU_UTILIZATION),
        watts=_find_mean(rows, metrics.GPU_POWER_WATTS),
    )


def _find_median(rows: Sequence[StepMetrics], name: str) -> float | None:
    values = [row.values[name] for row in rows if name in row.values]
    return statistics.median(values) if values else None


def _find_mean(rows: Sequence[StepMetrics], name: str) -> float | None:
    """Over time: a long step counts for more."""
    told = [row for row in rows if name in row.values]
    seconds = sum(row.values[metrics.STEP_SECONDS] for row in told)
    return sum(row.values[name] * row.values[metrics.STEP_SECONDS] for row in told) / seconds if told else None


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def find_peak_gib(engine: Engine | None = None) -> float:
    """What torch allocated on the GPU since the warm steps; without a GPU, the most that this process ever held."""
    if torch.cuda.is_available():
        return bytes_to_gib(torch.cuda.max_memory_allocated() if engine is None else engine.peak_bytes)
    return bytes_to_gib(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
