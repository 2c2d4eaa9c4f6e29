"""A training loop without a launcher, as short as such loops are: what every rung but the last one runs."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from launcher.bench.ladder import RungSpec
from launcher.bench.rungs import SMALL_MICRO_BATCH, Setup
from launcher.bench.values import Timing
from launcher.corpus.packs import PackFile
from launcher.corpus.tokenizer import load_tokenizer
from launcher.inputs import base_folders
from launcher.metrics import compute_mfu
from launcher.plan.model import Plan
from launcher.plan.recipes import workload_of
from launcher.speed import flops_per_token, peak_tflops
from launcher.training.bench.real_loop import find_peak_gib, open_store, reset_peak
from launcher.training.bench.rung_data import AnyBatch, RungBatches, make_batches
from launcher.training.bench.rung_model import RungModel, build_rung_model, make_rung_plan
from launcher.training.clock import Lap, StepClock
from launcher.training.dealing import StepOrder
from launcher.training.gpu_counters import GpuCounters
from launcher.training.optim import build_optimizer

LEAST_TIMED = 2
PROBED = 4  # micro-batches


def time_rung(spec: RungSpec, setup: Setup) -> Timing:
    """Where the larger micro-batch does not fit with what this rung has, the next smaller one is taken."""
    file = open_store(Path(spec.store)).open_split("train")
    size = wanted = _find_micro_batch(spec.plan, setup, file)
    while True:
        try:
            timing = _time(spec, setup, file, size)
        except torch.OutOfMemoryError:
            if size <= SMALL_MICRO_BATCH:
                raise
        else:
            smaller = "" if size == wanted else f"micro-batch {size}: {wanted} did not fit"
            return timing.model_copy(update={"note": "; ".join(filter(None, (smaller, timing.note)))})
        size = max(SMALL_MICRO_BATCH, size // 2)
        gc.collect()  # behind the handler: the error's traceback would hold what is to be freed
        torch.cuda.empty_cache()


def _find_micro_batch(plan: Plan, setup: Setup, file: PackFile) -> int:
    """In rows where they are padded: as many as the sequences of the plan's micro-batch hold."""
    if setup.rows == "packed" or setup.micro_batch_size == SMALL_MICRO_BATCH or not plan.batch.packed:
        return setup.micro_batch_size
    return max(SMALL_MICRO_BATCH, round(setup.micro_batch_size * float(file.count("document_lengths").mean())))


def _time(spec: RungSpec, setup: Setup, file: PackFile, micro_batch_size: int) -> Timing:
    plan = make_rung_plan(spec.plan, setup)
    device = torch.device("cuda" if plan.hardware.gpu is not None else "cpu")
    folders = base_folders(Path(plan.data.folder))
    tokenizer = load_tokenizer(plan.base.name, folders, any_will_do=plan.random_weights).backend
    steps = find_steps(plan, file, 1 + spec.warm_steps + max(LEAST_TIMED, spec.timed_steps))  # the first is probed
    batches = make_batches(file, steps, setup, micro_batch_size, plan.batch.sequence_length, tokenizer)
    loop = RungLoop(build_rung_model(plan, setup, folders, device), plan, batches, device)
    timing = loop.run(spec.warm_steps, spec.timed_steps, spec.seconds)
    return timing.model_copy(update={"mfu": _find_mfu(spec.plan, file, steps, timing)})


def find_steps(plan: Plan, file: PackFile, num_steps: int) -> list[tuple[int, ...]]:
    """Sequences of each: those that the plan's own training begins with."""
    order = StepOrder(num_packs=len(file), global_batch_size=plan.batch.global_batch_size, seed=plan.schedule.seed)
    return [order.packs_of(step) for step in range(num_steps)]


class RungLoop:
    def __init__(self, model: RungModel, plan: Plan, batches: RungBatches, device: torch.device) -> None:
        self._model, self._batches, self._device, self._setup = model, batches, device, batches.setup
        num_workers = batches.setup.num_workers
        self._optimizer = build_optimizer(plan.optimizer, model)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._max_norm = plan.optimizer.max_grad_norm
        self._num_trained = batches.count_trained(0)
        self._scaler = torch.amp.GradScaler(device.type, enabled=plan.precision.loss_scaling)
        self._loader: DataLoader[AnyBatch] = DataLoader(
            batches,
            batch_size=None,
            shuffle=False,
            num_workers=num_workers,
            pin_memory=num_workers > 0 and device.type == "cuda",
        )

    def run(self, warm_steps: int, timed_steps: int, seconds: float) -> Timing:
        """Until the batches are used up, or the seconds: of the warm steps, and again of the timed ones, of which at
        least one and two are made. Steps that take too long for that are cut: so many micro-batches, and an update."""
        counters, clock = GpuCounters(self._device), StepClock(self._device)
        counters.start()
        pieces = _Pieces(self._batches, iter(self._loader))
        whole = max(map(self._batches.count_micro_batches, range(len(self._batches.steps))))
        try:
            size = self._find_size(pieces, clock, whole, seconds)
            pieces.finish_step()
            self._make_steps(pieces, clock, size, warm_steps, 1, seconds)
            reset_peak()
            counters.read()
            laps = self._make_steps(pieces, clock, size, max(LEAST_TIMED, timed_steps), LEAST_TIMED, seconds)
            note = "" if size == whole else f"of a step's {whole} micro-batches {size} are timed, and an update"
            return self._make_timing(laps, counters).model_copy(update={"note": note})
        finally:
            counters.stop()

    def _find_size(self, pieces: _Pieces, clock: StepClock, whole: int, seconds: float) -> int:
        """In micro-batches. The first few compile and allocate: the next few say how long one takes."""
        if whole <= 2 * PROBED:
            return whole
        self._train_step(pieces, clock, PROBED)[1].seconds()
        before = pieces.num_taken
        lap = self._train_step(pieces, clock, PROBED)[1]
        each = lap.seconds() / (pieces.num_taken - before)
        return min(whole, max(PROBED, int(seconds / LEAST_TIMED / each)))

    def _make_steps(
        self, pieces: _Pieces, clock: StepClock, size: int, most: int, least: int, seconds: float
    ) -> list[tuple[int, Lap]]:
        laps, began = list[tuple[int, Lap]](), time.perf_counter()
        while len(laps) < most and pieces.are_left:
            laps.append(self._train_step(pieces, clock, size))
            laps[max(0, len(laps) - 2)][1].seconds()  # waits for the step before: the host runs ahead, but not far
            if len(laps) >= least and time.perf_counter() - began > seconds:
                break
        return laps

    def _train_step(self, pieces: _Pieces, clock: StepClock, size: int) -> tuple[int, Lap]:
        """Tokens of so many micro-batches, fewer where a step ends, and how long they took."""
        num_tokens = 0
        for _ in range(size):
            with clock.waiting():
                batch, count, is_last = pieces.take()
            num_tokens += count
            loss = self._model(batch.to(self._device)) / self._num_trained
            self._scaler.scale(loss).backward()
            if is_last:
                break
        self._scaler.unscale_(self._optimizer)
        if self._max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._max_norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        return num_tokens, clock.lap()

    def _make_timing(self, laps: list[tuple[int, Lap]], counters: GpuCounters) -> Timing:
        seconds = tuple(lap.seconds() for _, lap in laps)
        waited = [min(1.0, lap.starved_seconds() / max(1e-9, lap.seconds())) for _, lap in laps]
        sample = counters.read()
        return Timing(
            seconds=seconds,
            tokens=tuple(num_tokens for num_tokens, _ in laps),
            data_wait_share=statistics.fmean(waited),
            peak_gib=find_peak_gib(),
            utilization=None if sample is None else sample.utilization,
            watts=None if sample is None else sample.watts,
        )


class _Pieces:
    """Micro-batches, one after another."""

    def __init__(self, batches: RungBatches, micro_batches: Iterator[AnyBatch]) -> None:
        self._batches, self._micro_batches, self.num_taken = batches, micro_batches, 0

    @property
    def are_left(self) -> bool:
        return self.num_taken < len(self._batches)

    def finish_step(self) -> None:
        """What is left of the step that was begun is not trained."""
        while self.are_left and self.num_taken and not self._batches.is_last_of_step(self.num_taken - 1):
            self.take()

    def take(self) -> tuple[AnyBatch, int, bool]:
        """And how many tokens it has, and whether its step ends with it."""
        batch, num_tokens = next(self._micro_batches), self._batches.count_micro_batch_tokens(self.num_taken)
        is_last = self._batches.is_last_of_step(self.num_taken)
        self.num_taken += 1
        return batch, num_tokens, is_last


def _find_mfu(plan: Plan, file: PackFile, steps: list[tuple[int, ...]], timing: Timing) -> float | None:
    """Against the peak of the plan's own precision on every rung: FP32 is measured by what the card could do."""
    gpu = plan.hardware.gpu
    peak = None if gpu is None else peak_tflops(gpu, plan.precision.compute_dtype)
    packs = [pack for step in steps for pack in step]
    num_tokens = float(file.count("input_ids")[packs].sum())
    workload = workload_of(plan, float(file.column("sum_squares")[packs].sum()) / num_tokens)
    trained_share = float(file.column("num_trained")[packs].sum()) / num_tokens
    return compute_mfu(timing.tokens_per_second, flops_per_token(workload, trained_share), peak)
