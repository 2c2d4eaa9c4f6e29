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
from launcher.speed import Workload, flops_per_token, peak_tflops
from launcher.training.bench.real_loop import find_peak_gib, open_store, reset_peak
from launcher.training.bench.rung_data import AnyBatch, RungBatches, make_batches
from launcher.training.bench.rung_model import RungModel, build_rung_model, make_rung_plan
from launcher.training.clock import Lap, StepClock
from launcher.training.dealing import StepOrder
from launcher.training.gpu_counters import GpuCounters
from launcher.training.optim import build_optimizer

LEAST_TIMED = 2


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
            note = "" if size == wanted else f"micro-batch {size}: {wanted} did not fit"
            return timing.model_copy(update={"note": note})
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
    steps = find_steps(plan, file, spec.warm_steps + spec.timed_steps)
    batches = make_batches(file, steps, setup, micro_batch_size, plan.batch.sequence_length, tokenizer)
    loop = RungLoop(build_rung_model(plan, setup, folders, device), plan, batches, device)
    timing = loop.run(spec.warm_steps, spec.seconds)
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
        self._scaler = torch.amp.GradScaler(device.type, enabled=plan.precision.loss_scaling)
        self._loader: DataLoader[AnyBatch] = DataLoader(
            batches,
            batch_size=None,
            shuffle=False,
            num_workers=num_workers,
            pin_memory=num_workers > 0 and device.type == "cuda",
        )

    def run(self, warm_steps: int, seconds: float) -> Timing:
        """Until the batches are used up, or the seconds: of the warm steps, and again of the timed ones, of which at
        least one and two are made."""
        counters, clock = GpuCounters(self._device), StepClock(self._device)
        counters.start()
        micro_batches, laps, is_warm = iter(self._loader), list[tuple[int, Lap]](), False
        began = time.perf_counter()
        try:
            for step in range(len(self._batches.steps)):
                laps.append((step, self._train_step(step, micro_batches, clock)))
                laps[max(0, len(laps) - 2)][1].seconds()  # waits for the step before: the host runs ahead, but not far
                is_late = time.perf_counter() - began > seconds
                # Compiling is what warm steps are for: they are all made, however long it takes.
                if not is_warm and (step + 1 >= warm_steps or (is_late and not self._setup.is_compiled)):
                    is_warm, began = True, time.perf_counter()
                    laps.clear()
                    reset_peak()
                    counters.read()
                elif is_warm and len(laps) >= LEAST_TIMED and is_late:
                    break
            return self._make_timing(laps, counters)
        finally:
            counters.stop()

    def _train_step(self, step: int, micro_batches: Iterator[AnyBatch], clock: StepClock) -> Lap:
        num_trained = self._batches.count_trained(step)
        for _ in range(self._batches.count_micro_batches(step)):
            with clock.waiting():
                batch = next(micro_batches)
            loss = self._model(batch.to(self._device)) / num_trained
            self._scaler.scale(loss).backward()
        self._scaler.unscale_(self._optimizer)
        if self._max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._max_norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        return clock.lap()

    def _make_timing(self, laps: list[tuple[int, Lap]], counters: GpuCounters) -> Timing:
        seconds = tuple(lap.seconds() for _, lap in laps)
        waited = [min(1.0, lap.starved_seconds() / max(1e-9, lap.seconds())) for _, lap in laps]
        sample = counters.read()
        return Timing(
            seconds=seconds,
            tokens=tuple(self._batches.count_tokens(step) for step, _ in laps),
            data_wait_share=statistics.fmean(waited),
            peak_gib=find_peak_gib(),
            utilization=None if sample is None else sample.utilization,
            watts=None if sample is None else sample.watts,
        )


def _find_mfu(plan: Plan, file: PackFile, steps: list[tuple[int, ...]], timing: Timing) -> float | None:
    """Against the peak of the plan's own precision on every rung: FP32 is measured by what the card could do."""
    gpu = plan.hardware.gpu
    peak = None if gpu is None else peak_tflops(gpu, plan.precision.compute_dtype)
    packs = [pack for step in steps for pack in step]
    num_tokens = float(file.count("input_ids")[packs].sum())
    workload = Workload(
        shape=plan.base,
        adapter=plan.adapter.kind,
        quantization=plan.quantization_kind,
        compute_dtype=plan.precision.compute_dtype,
        compiled=plan.compile is not None,
        checkpointing=plan.checkpointing,
        document_tokens=float(file.column("sum_squares")[packs].sum()) / num_tokens,
    )
    trained_share = float(file.column("num_trained")[packs].sum()) / num_tokens
    return compute_mfu(timing.tokens_per_second, flops_per_token(workload, trained_share), peak)
