"""Meters: throughput, epoch time, GPU memory, NVML counters and goodput, added to the metrics of each step."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from launcher.core import metrics
from launcher.core.log import get_logger
from launcher.core.metrics import CutMetrics, compute_mfu
from launcher.core.units import bytes_to_gib
from launcher.plan.estimate.step_time import compute_flops_per_token, get_peak_tflops
from launcher.plan.estimator_inputs import workload_from_plan
from launcher.training.engine.run import TrainingRun
from launcher.training.monitoring.goodput import GoodputTracker
from launcher.training.monitoring.nvml import NvmlSampler

log = get_logger(__name__)

_COMPILING = ("_compile.compile_inner", "backward._backward_impl")  # dynamo's names of its compile times


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStats:
    """What meters need of a completed step: its packs, tokens, duration and data wait."""

    step: int
    packs: list[int]
    num_tokens: int  # without padding, over all ranks
    seconds: float
    starved_seconds: float  # the device was idle for lack of data
    is_skipped: bool


class Meter:
    """Base class of meters, which measures nothing; subclasses override one or both methods."""

    def read(self, stats: StepStats) -> dict[str, float]:  # noqa: ARG002
        """Return the values of a step."""
        return {}

    def read_totals(self) -> dict[str, float]:
        """Return totals of the run so far, which are logged with steps and evaluations."""
        return {}


class Meters(Meter):
    """A meter that combines the values of several meters."""

    def __init__(self, meters: Sequence[Meter]) -> None:
        self._meters = tuple(meters)

    def read(self, stats: StepStats) -> dict[str, float]:
        """Return the values of all meters for a step."""
        return {name: value for meter in self._meters for name, value in meter.read(stats).items()}

    def read_totals(self) -> dict[str, float]:
        """Return the totals of all meters."""
        return {name: value for meter in self._meters for name, value in meter.read_totals().items()}


class ThroughputMeter(Meter):
    """Tokens, samples and steps per second, packing efficiency and MFU."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        gpu = run.plan.hardware.gpu if run.engine.device.type == "cuda" else None
        self._peak = None if gpu is None else get_peak_tflops(gpu, run.plan.precision.compute_dtype)

    def read(self, stats: StepStats) -> dict[str, float]:
        """Return throughput, packing efficiency and MFU of a step."""
        train, engine, batch = self._run.train, self._run.engine, self._run.plan.batch
        seconds, rate = max(1e-9, stats.seconds), stats.num_tokens / max(1e-9, stats.seconds)
        num_trained = int(train.num_trained[stats.packs].sum())
        values = {
            metrics.TOKENS_PER_SECOND: rate,
            metrics.TRAINED_TOKENS_PER_SECOND: num_trained / seconds,
            metrics.SAMPLES_PER_SECOND: int(train.num_documents[stats.packs].sum()) / seconds,
            metrics.STEPS_PER_SECOND: 1.0 / seconds,
            metrics.DEVICE_TOKENS_PER_SECOND: rate / engine.num_ranks,
            metrics.PACKING_EFFICIENCY: stats.num_tokens / self._count_positions(stats.step, batch.sequence_length),
        }
        mfu = compute_mfu(rate / engine.num_ranks, self._flops_per_token(stats, num_trained), self._peak)
        return values if mfu is None else {**values, metrics.DEVICE_MFU: mfu}

    def _count_positions(self, step: int, sequence_length: int) -> int:
        """Return the token positions of a step over all ranks; the last step of an epoch may have fewer."""
        num_micro_batches = self._run.count_micro_batches(step - 1)
        return self._run.engine.num_ranks * num_micro_batches * self._run.plan.batch.micro_batch_size * sequence_length

    def _flops_per_token(self, stats: StepStats, num_trained: int) -> float:
        """Return FLOPs per token for the real document lengths: a token attends to half of its document on average."""
        plan, num_tokens = self._run.plan, max(1.0, float(stats.num_tokens))
        document_tokens = float(self._run.train.costs[stats.packs].sum()) / num_tokens
        return compute_flops_per_token(workload_from_plan(plan, document_tokens, num_trained / num_tokens))


class EpochMeter(Meter):
    """The time of each epoch, with its last step."""

    def __init__(self, run: TrainingRun, seconds: float = 0.0) -> None:
        self._steps, self._seconds = run.steps_per_epoch, seconds

    def read(self, stats: StepStats) -> dict[str, float]:
        """Return the time of an epoch at the epoch's last step; empty at other steps."""
        self._seconds += stats.seconds
        if stats.step % self._steps:
            return {}
        seconds, self._seconds = self._seconds, 0.0
        return {metrics.EPOCH_SECONDS: seconds}


class MemoryMeter(Meter):
    """Peak memory of this rank's GPU over the run, and the error of its prediction.

    The prediction is for a step, so evaluations must not count towards its error: torch's counters are reset after each
    evaluation, and earlier peaks are kept here.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._engine, self._device = run.engine, run.engine.device
        self._predicted = bytes_to_gib(run.plan.memory.allocated_bytes)
        self._is_after_step = False
        self._earlier_peaks: dict[str, int] = {}  # peaks from before the last reset
        self._step_peak = 0

    def read(self, stats: StepStats) -> dict[str, float]:  # noqa: ARG002
        """Return peak memory and the prediction error."""
        if self._device.type != "cuda":
            return {}
        self._is_after_step = True
        memory = torch.cuda.memory_stats(self._device)
        now = self._engine.peak_bytes
        # benchmarks reset the counters between steps and need the peak since then
        self._step_peak = max(self._step_peak, now) if self._earlier_peaks else now
        return {
            metrics.PEAK_ALLOCATED_GIB: max(bytes_to_gib(now), self._highest(memory, "allocated_bytes.all.peak")),
            metrics.PEAK_RESERVED_GIB: self._highest(memory, "reserved_bytes.all.peak"),
            metrics.ALLOC_RETRIES: float(memory.get("num_alloc_retries", 0)),
            metrics.PREDICTED_GIB: self._predicted,
            metrics.PREDICTION_ERROR: self._predicted / max(1e-9, bytes_to_gib(self._step_peak)) - 1.0,
        }

    def read_totals(self) -> dict[str, float]:
        """Reset torch's peak memory counters after an evaluation, but not after a step, which calls `read` first."""
        if self._device.type == "cuda" and not self._is_after_step:
            memory = torch.cuda.memory_stats(self._device)
            for name in ("allocated_bytes.all.peak", "reserved_bytes.all.peak"):
                self._earlier_peaks[name] = max(self._earlier_peaks.get(name, 0), memory[name])
            torch.cuda.reset_peak_memory_stats(self._device)
        self._is_after_step = False
        return {}

    def _highest(self, memory: Mapping[str, int], name: str) -> float:
        return bytes_to_gib(max(memory[name], self._earlier_peaks.get(name, 0)))


class NvmlMeter(Meter):
    """GPU utilization, power, temperature, memory and energy per token."""

    def __init__(self, sampler: NvmlSampler, num_ranks: int) -> None:
        self._sampler, self._num_ranks = sampler, num_ranks

    def read(self, stats: StepStats) -> dict[str, float]:
        """Return the GPU counters since the last step."""
        sample = self._sampler.read()
        if sample is None:
            return {}
        joules = sample.watts * stats.seconds
        used = {} if sample.used_bytes is None else {metrics.USED_GIB: bytes_to_gib(sample.used_bytes)}
        return {
            **used,
            metrics.GPU_UTILIZATION: sample.utilization,
            metrics.GPU_POWER_WATTS: sample.watts,
            metrics.GPU_TEMPERATURE: sample.celsius,
            metrics.JOULES_PER_TOKEN: joules * self._num_ranks / max(1, stats.num_tokens),
        }


class HostMeter(Meter):
    """Load of the host, by this training and by other programs."""

    def read(self, stats: StepStats) -> dict[str, float]:  # noqa: ARG002
        """Return the load average of the last minute, per core."""
        return {metrics.HOST_LOAD: os.getloadavg()[0] / (os.cpu_count() or 1)}


class GoodputMeter(Meter):
    """Time lost within steps, and goodput so far."""

    def __init__(self, tracker: GoodputTracker) -> None:
        self._tracker = tracker
        self._compiled = _compile_seconds()

    def read(self, stats: StepStats) -> dict[str, float]:
        """Add the time lost within a step to the goodput tracker; return no values."""
        compiled = _compile_seconds()
        compiling, self._compiled = min(compiled - self._compiled, stats.seconds), compiled
        starved = min(stats.starved_seconds, stats.seconds - compiling)
        self._tracker.add(metrics.COMPILE_SECONDS, compiling)  # without a warm-up step, or recompilation
        self._tracker.add(metrics.DATA_SECONDS, starved)
        if stats.is_skipped:
            self._tracker.add(metrics.SKIPPED_SECONDS, stats.seconds - compiling - starved)
        return {}

    def read_totals(self) -> dict[str, float]:
        """Return total time, goodput and lost time by cause."""
        return self._tracker.read()


def _compile_seconds() -> float:
    """Return the time torch.compile has taken in this process so far."""
    times = torch._dynamo.utils.compilation_time_metrics
    return sum(sum(times.get(name, ())) for name in _COMPILING)


@contextmanager
def open_meters(run: TrainingRun, tracker: GoodputTracker, recorded: CutMetrics) -> Iterator[Meter]:
    """Yield all meters on rank 0, and elsewhere the memory meter only, for detecting allocator retries."""
    if not run.engine.is_main:
        yield MemoryMeter(run)
        return
    sampler = NvmlSampler(run.engine.device)
    missing = sampler.start()
    if missing is not None and run.engine.device.type == "cuda":
        log.warning(f"GPU utilization, power and temperature are not logged: {missing}")
    try:
        yield Meters(
            [
                ThroughputMeter(run),
                EpochMeter(run, _sum_epoch(run, recorded)),
                MemoryMeter(run),
                NvmlMeter(sampler, run.engine.num_ranks),
                HostMeter(),
                GoodputMeter(tracker),
            ]
        )
    finally:
        sampler.stop()


def _sum_epoch(run: TrainingRun, recorded: CutMetrics) -> float:
    """Return the time of the steps already completed in the current epoch."""
    done = max((row.step for row in recorded.kept), default=0)
    first = done - done % run.steps_per_epoch
    return sum(row.values.get(metrics.STEP_SECONDS, 0.0) for row in recorded.kept if row.step > first)
