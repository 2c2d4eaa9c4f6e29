"""Trace some steps with torch.profiler on rank 0: costs, GPU idle time, and memory history."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from launcher.core.log import get_logger
from launcher.core.metrics import STEP_SECONDS, StepMetrics
from launcher.core.run_paths import write_text_atomically
from launcher.core.units import format_percent
from launcher.plan.model import ProfilePlan
from launcher.training.engine.run import TrainingRun
from launcher.training.observers.base import Observer

log = get_logger(__name__)

_MICRO = 1e-6
_MEMORY_EVENTS = 200_000
_SHOWN_KINDS = 4
_WARMUP_STEPS, _UNTRACED_STEPS = 3, 8
_SHOWN = 10
_LONGEST_NAME = 90
# Patterns of kernel or operation names in lower case; the first match counts.
_KINDS = (
    ("fused pointwise", r"triton_"),
    ("dequantization", r"dequantize"),  # of a 4-bit or 8-bit base
    ("attention", r"flash|attention|attn|fmha"),
    ("loss", r"cross_entropy|nll_loss|log_softmax"),
    ("fused pointwise", r"^_\w+_kernel$"),  # our other Triton kernels
    ("optimizer", r"adam|multi_tensor|foreach|optimizer"),
    ("communication", r"nccl|allreduce|all_reduce|reduce_scatter|all_gather|gloo|c10d"),
    ("copies", r"memcpy|memset|copy_|_to_copy"),
    ("matmuls", r"gemm|addmm|aten::mm|aten::bmm|cutlass|cublas|nvjet|matmul|linear"),
)
_OTHER = "others"

Span = tuple[float, float]  # start and end of a GPU kernel, in seconds


class Profiler(Observer):
    """Traces the planned window of steps and writes a summary."""

    def __init__(self, plan: ProfilePlan) -> None:
        self._plan = plan
        self._profile: Any = None
        self._began, self._first = 0.0, 0
        self._untraced: list[float] = []  # seconds of the last steps before the window

    def on_step(self, run: TrainingRun, metrics: StepMetrics) -> None:
        """Record the time of steps before tracing, for comparison, without the first ones, which compile."""
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
            f"traced steps {self._first} to {last_step}: {describe_idle_time(summary)} {kinds}; "
            f"see {folder / 'summary.md'}"
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
    """Whether a profiler event is a GPU kernel, not a user annotation, which would count its kernels twice."""
    on_device = str(getattr(event, "device_type", "")).endswith("CUDA")
    return on_device and not getattr(event, "is_user_annotation", False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Total time of a kernel, an operation or a kind of them."""

    name: str
    seconds: float
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileSummary:
    """Where the time of the traced steps went."""

    first_step: int
    last_step: int
    seconds: float  # from the first to the last GPU kernel; without GPU, wall time
    idle_seconds: float | None  # of the GPU; None without GPU
    untraced_seconds: float | None  # of as many untraced steps, by their median: tracing makes steps longer
    costs: tuple[Cost, ...]  # highest first
    kinds: tuple[Cost, ...]

    @property
    def busy_seconds(self) -> float:
        """The total time of all kernels or operations."""
        return sum(cost.seconds for cost in self.kinds)

    @property
    def idle_share(self) -> float | None:
        """The share of GPU idle time in an untraced step, if known: tracing delays launches, but not kernels."""
        if self.idle_seconds is None:
            return None
        busy = self.seconds - self.idle_seconds
        total = self.seconds if self.untraced_seconds is None else min(self.seconds, self.untraced_seconds)
        return max(0.0, 1.0 - busy / max(1e-9, total))


def summarize(
    first_step: int,
    last_step: int,
    seconds: float,
    costs: Iterable[Cost],
    spans: Sequence[Span],
    untraced: Sequence[float] = (),
) -> ProfileSummary:
    """Summarize traced steps. Without a GPU, `spans` is empty and `costs` are those of CPU operations."""
    ordered = tuple(sorted(costs, key=lambda cost: cost.seconds, reverse=True))
    if spans:  # excludes the wait for the empty queue at both ends
        seconds = max(end for _, end in spans) - min(start for start, _ in spans)
    return ProfileSummary(
        first_step=first_step,
        last_step=last_step,
        seconds=seconds,
        idle_seconds=max(0.0, seconds - _union(spans)) if spans else None,
        untraced_seconds=statistics.median(untraced) * (last_step - first_step + 1) if untraced else None,
        costs=ordered,
        kinds=_group_by_kind(ordered),
    )


def _union(spans: Sequence[Span]) -> float:
    """Return the time covered by spans; overlapping streams count once."""
    total, covered_until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return total


def _group_by_kind(costs: Sequence[Cost]) -> tuple[Cost, ...]:
    seconds: dict[str, float] = {}
    counts: dict[str, int] = {}
    for cost in costs:
        kind = classify_kernel(cost.name)
        seconds[kind] = seconds.get(kind, 0.0) + cost.seconds
        counts[kind] = counts.get(kind, 0) + cost.count
    kinds = (Cost(name=kind, seconds=seconds[kind], count=counts[kind]) for kind in seconds)
    return tuple(sorted(kinds, key=lambda cost: cost.seconds, reverse=True))


def classify_kernel(name: str) -> str:
    """Return the kind of work that a kernel or operation does."""
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name.lower())), _OTHER)


def render_summary(summary: ProfileSummary) -> str:
    """Render the summary as Markdown."""
    steps = summary.last_step - summary.first_step + 1
    lines = [
        f"# Steps {summary.first_step} to {summary.last_step}",
        "",
        f"{summary.seconds * 1000 / steps:.1f} ms per step. {describe_idle_time(summary)}",
        "",
        "| what | ms per step | share | calls per step |",
        "|---|---|---|---|",
        *(_render(cost, summary, steps) for cost in summary.kinds),
        "",
        f"The {min(_SHOWN, len(summary.costs))} most expensive:",
        "",
        "| name | ms per step | share | calls per step |",
        "|---|---|---|---|",
        *(_render(cost, summary, steps) for cost in summary.costs[:_SHOWN]),
        "",
        "`trace.json.gz` opens in https://ui.perfetto.dev; `memory.pickle` (GPU only) in https://docs.pytorch.org/memory_viz.",
    ]
    return "\n".join(lines) + "\n"


def describe_idle_time(summary: ProfileSummary) -> str:
    """Say how long the GPU was idle and what to do about it."""
    if summary.idle_seconds is None:
        return "No GPU: these are CPU operations, each without the operations it calls."
    share = summary.idle_share or 0.0
    text = f"The GPU was idle for {format_percent(share)} of it"
    if summary.untraced_seconds is not None:
        steps = summary.last_step - summary.first_step + 1
        before = f"{summary.untraced_seconds * 1000 / steps:.1f} ms"
        text = f"Untraced steps took {before}, of which the GPU was idle for {format_percent(share)}"
    if share < 0.05:
        return f"{text}: the GPU is the bottleneck; only less work or faster kernels help."
    if share < 0.2:
        return f"{text}: the host delays it sometimes; larger micro-batches or torch.compile help."
    return f"{text}: the host is the bottleneck. Try larger micro-batches, torch.compile or more loader workers."


def _render(cost: Cost, summary: ProfileSummary, steps: int) -> str:
    name = cost.name.replace("|", "\\|")[:_LONGEST_NAME]
    share = format_percent(cost.seconds / max(1e-9, summary.busy_seconds))
    return f"| `{name}` | {cost.seconds * 1000 / steps:.2f} | {share} | {cost.count / steps:.0f} |"
