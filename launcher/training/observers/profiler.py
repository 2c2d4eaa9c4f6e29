"""Trace some steps with torch.profiler on rank 0: costs, GPU idle time, and memory history."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from launcher.core.log import get_logger
from launcher.core.metrics import STEP_SECONDS, StepMetrics
from launcher.core.run_paths import write_text_atomically
from launcher.plan.model import ProfilePlan
from launcher.training.engine.run import TrainingRun
from launcher.training.observers.base import Observer
from launcher.training.observers.profile_summary import Cost, Span, describe_idle_time, render_summary, summarize

log = get_logger(__name__)

_MICRO = 1e-6
_MEMORY_EVENTS = 200_000
_SHOWN_KINDS = 4
_WARMUP_STEPS, _UNTRACED_STEPS = 3, 8


class Profiler(Observer):
    """Traces the planned window of steps and writes a summary."""

    def __init__(self, plan: ProfilePlan) -> None:
        self._plan = plan
        self._profile: Any = None
        self._began, self._first = 0.0, 0
        self._untraced: list[float] = []  # seconds of the last steps before the window

    def on_step(self, run: TrainingRun, metrics: StepMetrics) -> None:
        """Time untraced steps for comparison, except the first ones, which compile and fill caches."""
        is_before = self._profile is None and metrics.step < self._plan.first_step
        seconds = metrics.get(STEP_SECONDS)
        if run.engine.device.type == "cuda" and is_before and metrics.step > _WARMUP_STEPS and seconds is not None:
            self._untraced = [*self._untraced[1 - _UNTRACED_STEPS :], seconds]

    def before_step(self, run: TrainingRun, step: int) -> None:
        """Start or stop tracing at the limits of the window."""
        if not run.engine.is_main:
            return
        if self._profile is not None and step > self._plan.last_step:
            self._finish(run, step - 1)
        elif self._profile is None and self._plan.first_step <= step <= self._plan.last_step and not self._first:
            self._begin(run, step)

    def on_end(self, run: TrainingRun, step: int) -> None:
        """Stop tracing if the run ends within the window."""
        if self._profile is not None:
            self._finish(run, step)
        elif run.engine.is_main and not self._first:
            log.info(f"note: nothing was traced: --profile-steps starts at step {self._plan.first_step:,}")

    def _begin(self, run: TrainingRun, step: int) -> None:
        activities = [ProfilerActivity.CPU]
        if run.engine.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
            torch.cuda.synchronize()
        self._profile = profile(activities=activities)
        self._profile.start()
        self._began, self._first = time.perf_counter(), step

    def _finish(self, run: TrainingRun, last_step: int) -> None:
        """Stop tracing and write the results, after a synchronization, so that the trace ends with the step."""
        is_cuda = run.engine.device.type == "cuda"
        if is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._began
        run.heartbeat.beat("saving")
        traced, self._profile = self._profile, None
        traced.stop()
        costs, spans = list_costs(traced, is_cuda), list_spans(traced)
        summary = summarize(self._first, last_step, seconds, costs, spans, self._untraced)
        folder = run.paths.profile
        try:
            folder.mkdir(exist_ok=True)
            write_text_atomically(folder / "summary.md", render_summary(summary))
            traced.export_chrome_trace(str(folder / "trace.json.gz"))
            if is_cuda:
                torch.cuda.memory._dump_snapshot(str(folder / "memory.pickle"))
        except OSError as error:
            log.warning(f"cannot write the trace of steps {self._first} to {last_step}: {error}")
            return
        finally:
            if is_cuda:
                torch.cuda.memory._record_memory_history(enabled=None)
        kinds = ", ".join(
            f"{kind.name} {kind.seconds / max(1e-9, summary.busy_seconds):.0%}" for kind in summary.kinds[:_SHOWN_KINDS]
        )
        log.info(
            f"traced steps {self._first} to {last_step}: {describe_idle_time(summary)} {kinds}; {folder / 'summary.md'}"
        )


def list_costs(traced: Any, is_cuda: bool) -> list[Cost]:
    """Return the cost of each kernel, or on CPU of each operation without the operations it calls."""
    costs = []
    for event in traced.key_averages():
        if is_cuda and not _is_kernel(event):
            continue
        micros = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        if micros > 0:
            costs.append(Cost(name=event.key, seconds=micros * _MICRO, count=event.count))
    return costs


def list_spans(traced: Any) -> list[Span]:
    """Return the time spans of kernels and copies on the GPU."""
    return [
        (event.time_range.start * _MICRO, event.time_range.end * _MICRO)
        for event in traced.events()
        if _is_kernel(event)
    ]


def _is_kernel(event: Any) -> bool:
    """Whether an event is a kernel; user annotations, such as an optimizer step, would count kernels twice."""
    on_device = str(getattr(event, "device_type", "")).endswith("CUDA")
    return on_device and not getattr(event, "is_user_annotation", False)
