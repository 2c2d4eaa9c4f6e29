"""What is measured beside the training itself, a class each: speed, memory, the GPU's own counters, lost time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from launcher import metrics
from launcher.errors import say
from launcher.metrics import CutMetrics, compute_mfu
from launcher.plan.recipes import workload_of
from launcher.speed import flops_per_token, peak_tflops
from launcher.training.gpu_counters import GpuCounters
from launcher.training.ledger import Ledger
from launcher.training.run import Run
from launcher.units import bytes_to_gib

_COMPILING = ("_compile.compile_inner", "backward._backward_impl")  # as dynamo names its own times


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """A step, as it was read back."""

    step: int
    packs: list[int]
    num_tokens: int  # real ones, over all ranks
    seconds: float
    starved_seconds: float  # in which the device had nothing to do for want of data
    is_skipped: bool


class Measure:
    """Nothing is measured here, so that each writes only what it is about."""

    def read(self, done: Done) -> dict[str, float]:  # noqa: ARG002
        """Of a step."""
        return {}

    def read_now(self) -> dict[str, float]:
        """Of the run so far: told with evaluations, too."""
        return {}


class Measures(Measure):
    """Several."""

    def __init__(self, measures: Sequence[Measure]) -> None:
        self._measures = tuple(measures)

    def read(self, done: Done) -> dict[str, float]:
        return {name: value for measure in self._measures for name, value in measure.read(done).items()}

    def read_now(self) -> dict[str, float]:
        return {name: value for measure in self._measures for name, value in measure.read_now().items()}


class Throughput(Measure):
    def __init__(self, run: Run) -> None:
        self._run = run
        gpu = run.plan.hardware.gpu if run.engine.device.type == "cuda" else None
        self._peak = None if gpu is None else peak_tflops(gpu, run.plan.precision.compute_dtype)

    def read(self, done: Done) -> dict[str, float]:
        train, engine, batch = self._run.train, self._run.engine, self._run.plan.batch
        seconds, rate = max(1e-9, done.seconds), done.num_tokens / max(1e-9, done.seconds)
        num_trained = int(train.num_trained[done.packs].sum())
        values = {
            metrics.TOKENS_PER_SECOND: rate,
            metrics.TRAINED_TOKENS_PER_SECOND: num_trained / seconds,
            metrics.SAMPLES_PER_SECOND: int(train.num_documents[done.packs].sum()) / seconds,
            metrics.STEPS_PER_SECOND: 1.0 / seconds,
            metrics.DEVICE_TOKENS_PER_SECOND: rate / engine.num_ranks,
            metrics.PACKING_EFFICIENCY: done.num_tokens / self._count_positions(done.step, batch.sequence_length),
        }
        mfu = compute_mfu(rate / engine.num_ranks, self._flops_per_token(done, num_trained), self._peak)
        return values if mfu is None else {**values, metrics.DEVICE_MFU: mfu}

    def _count_positions(self, step: int, sequence_length: int) -> int:
        """Of all ranks. The last step of an epoch may have fewer micro-batches."""
        num_micro_batches = self._run.count_micro_batches(step - 1)
        return self._run.engine.num_ranks * num_micro_batches * self._run.plan.batch.micro_batch_size * sequence_length

    def _flops_per_token(self, done: Done, num_trained: int) -> float:
        """With the real lengths of these documents: a token attends to half of its document on average."""
        plan, num_tokens = self._run.plan, max(1.0, float(done.num_tokens))
        workload = workload_of(plan, float(self._run.train.costs[done.packs].sum()) / num_tokens)
        return flops_per_token(workload, num_trained / num_tokens)


class Epochs(Measure):
    """How long each took, told with its last step."""

    def __init__(self, run: Run, seconds: float = 0.0) -> None:
        self._steps, self._seconds = run.steps_per_epoch, seconds

    def read(self, done: Done) -> dict[str, float]:
        self._seconds += done.seconds
        if done.step % self._steps:
            return {}
        seconds, self._seconds = self._seconds, 0.0
        return {metrics.EPOCH_SECONDS: seconds}


class MemoryUse(Measure):
    """Of this rank's GPU; nothing elsewhere.

    Peaks are those of the whole run. What was predicted is a step: evaluations, which have sizes of their own and make
    do with less, are kept apart from the error. The counters of torch are reset behind each, so they are kept here.
    """

    def __init__(self, run: Run) -> None:
        self._engine, self._device = run.engine, run.engine.device
        self._predicted = bytes_to_gib(run.plan.memory.allocated_bytes)
        self._is_step = False
        self._before: dict[str, int] = {}  # peaks that the counters no longer know
        self._of_steps = 0

    def read(self, done: Done) -> dict[str, float]:  # noqa: ARG002
        if self._device.type != "cuda":
            return {}
        self._is_step = True
        stats = torch.cuda.memory_stats(self._device)
        now = self._engine.peak_bytes
        # whoever resets the counters on the way, as benchmarks do, wants to know of what came since
        self._of_steps = max(self._of_steps, now) if self._before else now
        return {
            metrics.PEAK_ALLOCATED_GIB: max(bytes_to_gib(now), self._highest(stats, "allocated_bytes.all.peak")),
            metrics.PEAK_RESERVED_GIB: self._highest(stats, "reserved_bytes.all.peak"),
            metrics.ALLOC_RETRIES: float(stats.get("num_alloc_retries", 0)),
            metrics.PREDICTED_GIB: self._predicted,
            metrics.PREDICTION_ERROR: self._predicted / max(1e-9, bytes_to_gib(self._of_steps)) - 1.0,
        }

    def read_now(self) -> dict[str, float]:
        """Behind a step there is nothing more to tell; else an evaluation was made."""
        if self._device.type == "cuda" and not self._is_step:
            stats = torch.cuda.memory_stats(self._device)
            for name in ("allocated_bytes.all.peak", "reserved_bytes.all.peak"):
                self._before[name] = max(self._before.get(name, 0), stats[name])
            torch.cuda.reset_peak_memory_stats(self._device)
        self._is_step = False
        return {}

    def _highest(self, stats: Mapping[str, int], name: str) -> float:
        return bytes_to_gib(max(stats[name], self._before.get(name, 0)))


class Counters(Measure):
    """What the driver says of this rank's GPU, sampled beside the loop."""

    def __init__(self, counters: GpuCounters, num_ranks: int) -> None:
        self._counters, self._num_ranks = counters, num_ranks

    def read(self, done: Done) -> dict[str, float]:
        sample = self._counters.read()
        if sample is None:
            return {}
        joules = sample.watts * done.seconds
        return {
            metrics.GPU_UTILIZATION: sample.utilization,
            metrics.GPU_POWER_WATTS: sample.watts,
            metrics.GPU_TEMPERATURE: sample.celsius,
            metrics.JOULES_PER_TOKEN: joules * self._num_ranks / max(1, done.num_tokens),
        }


class Goodput(Measure):
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._compiled = _compile_seconds()

    def read(self, done: Done) -> dict[str, float]:
        compiled = _compile_seconds()
        compiling, self._compiled = min(compiled - self._compiled, done.seconds), compiled
        starved = min(done.starved_seconds, done.seconds - compiling)
        self._ledger.book(metrics.COMPILE_SECONDS, compiling)  # where engines could not be warmed up; and again
        self._ledger.book(metrics.DATA_SECONDS, starved)
        if done.is_skipped:
            self._ledger.book(metrics.SKIPPED_SECONDS, done.seconds - compiling - starved)
        return {}

    def read_now(self) -> dict[str, float]:
        return self._ledger.read()


def _compile_seconds() -> float:
    """That torch.compile has taken in this process so far."""
    times = torch._dynamo.utils.compilation_time_metrics
    return sum(sum(times.get(name, ())) for name in _COMPILING)


@contextmanager
def measured(run: Run, ledger: Ledger, told: CutMetrics) -> Iterator[Measure]:
    """All of them on the first rank, which tells them; on every rank the memory, whose storms each must see itself."""
    if not run.engine.is_main:
        yield MemoryUse(run)
        return
    counters = GpuCounters(run.engine.device)
    missing = counters.start()
    if missing is not None and run.engine.device.type == "cuda":
        say(f"no GPU counters: {missing}")
    try:
        yield Measures(
            [
                Throughput(run),
                Epochs(run, _sum_epoch(run, told)),
                MemoryUse(run),
                Counters(counters, run.engine.num_ranks),
                Goodput(ledger),
            ]
        )
    finally:
        counters.stop()


def _sum_epoch(run: Run, told: CutMetrics) -> float:
    """Seconds of the steps that an epoch has behind it already."""
    done = max((row.step for row in told.kept), default=0)
    first = done - done % run.steps_per_epoch
    return sum(row.values.get(metrics.STEP_SECONDS, 0.0) for row in told.kept if row.step > first)
