"""Traces some steps: what cost most, whether the GPU waited, and what memory held. On the first rank."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from launcher.errors import say
from launcher.metrics import STEP_SECONDS, StepMetrics
from launcher.paths import write_text_atomically
from launcher.plan.model import ProfilePlan
from launcher.training.observers.base import Observer
from launcher.training.profile_summary import Cost, Span, describe_waiting, render_summary, sum_up
from launcher.training.run import Run

_MICRO = 1e-6
_MEMORY_EVENTS = 200_000
_SHOWN_KINDS = 4
_WARM_STEPS, _KEPT_STEPS = 3, 8


class Profiling(Observer):
    def __init__(self, plan: ProfilePlan) -> None:
        self._plan = plan
        self._profile: Any = None
        self._began, self._first = 0.0, 0
        self._untraced: list[float] = []  # seconds of the last steps before

    def on_step(self, run: Run, metrics: StepMetrics) -> None:
        """The first ones compile, record a graph, and fill caches."""
        is_before = self._profile is None and metrics.step < self._plan.first_step
        seconds = metrics.get(STEP_SECONDS)
        if run.engine.device.type == "cuda" and is_before and metrics.step > _WARM_STEPS and seconds is not None:
            self._untraced = [*self._untraced[1 - _KEPT_STEPS :], seconds]

    def before_step(self, run: Run, step: int) -> None:
        if not run.engine.is_main:
            return
        if self._profile is not None and step > self._plan.last_step:
            self._end(run, step - 1)
        elif self._profile is None and self._plan.first_step <= step <= self._plan.last_step and not self._first:
            self._begin(run, step)

    def on_end(self, run: Run, step: int) -> None:
        if self._profile is not None:
            self._end(run, step)
        elif run.engine.is_main and not self._first:
            say(f"note: nothing was traced: --profile-steps begins with step {self._plan.first_step:,}")

    def _begin(self, run: Run, step: int) -> None:
        activities = [ProfilerActivity.CPU]
        if run.engine.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
            torch.cuda.synchronize()
        self._profile = profile(activities=activities)
        self._profile.start()
        self._began, self._first = time.perf_counter(), step

    def _end(self, run: Run, last_step: int) -> None:
        """The device's queue is emptied first: the trace shall end where the step does."""
        is_cuda = run.engine.device.type == "cuda"
        if is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._began
        run.pulse.beat("saving")
        traced, self._profile = self._profile, None
        traced.stop()
        costs, spans = list_costs(traced, is_cuda), list_spans(traced)
        summary = sum_up(self._first, last_step, seconds, costs, spans, self._untraced)
        folder = run.paths.profile
        try:
            folder.mkdir(exist_ok=True)
            write_text_atomically(folder / "summary.md", render_summary(summary))
            traced.export_chrome_trace(str(folder / "trace.json.gz"))
            if is_cuda:
                _dump_memory(folder / "memory.pickle")
        except OSError as error:
            say(f"warning: the trace of steps {self._first} to {last_step} cannot be written: {error}")
            return
        finally:
            if is_cuda:
                torch.cuda.memory._record_memory_history(enabled=None)
        kinds = ", ".join(
            f"{kind.name} {kind.seconds / max(1e-9, summary.busy_seconds):.0%}" for kind in summary.kinds[:_SHOWN_KINDS]
        )
        say(f"traced steps {self._first} to {last_step}: {describe_waiting(summary)} {kinds}; {folder / 'summary.md'}")


def list_costs(traced: Any, is_cuda: bool) -> list[Cost]:
    """Of kernels, or of operations of the CPU, each without those that it calls."""
    costs = []
    for event in traced.key_averages():
        if is_cuda and not _is_kernel(event):
            continue
        micros = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        if micros > 0:
            costs.append(Cost(name=event.key, seconds=micros * _MICRO, count=event.count))
    return costs


def list_spans(traced: Any) -> list[Span]:
    """Of kernels and copies on the GPU."""
    return [
        Span(name=event.name, start=event.time_range.start * _MICRO, end=event.time_range.end * _MICRO)
        for event in traced.events()
        if _is_kernel(event)
    ]


def _is_kernel(event: Any) -> bool:
    """Ranges that somebody named, such as an optimizer's step, lie over kernels: they would count twice."""
    on_device = str(getattr(event, "device_type", "")).endswith("CUDA")
    return on_device and not getattr(event, "is_user_annotation", False)


def _dump_memory(file: Path) -> None:
    torch.cuda.memory._dump_snapshot(str(file))
