"""The plain training loop that every ablation stage but the last one runs."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from launcher.bench.ablation import StageSpec
from launcher.bench.ablation_stages import SMALL_MICRO_BATCH, LoopConfig
from launcher.bench.worker import Timing
from launcher.bench.workers.ablation_data import AnyBatch, StageBatches, make_batches
from launcher.bench.workers.ablation_model import StageModel, build_stage_model, derive_stage_plan
from launcher.bench.workers.training_loop import open_store, read_peak_gib, reset_peak
from launcher.core.metrics import compute_mfu
from launcher.corpus.pack_file import PackFile
from launcher.corpus.tokenizer import load_planned_tokenizer
from launcher.plan.estimate.step_time import compute_flops_per_token, get_peak_tflops
from launcher.plan.estimator_inputs import workload_from_plan
from launcher.plan.model import Plan
from launcher.request.request import base_folders
from launcher.training.data.sampler import PackSampler
from launcher.training.engine.optimizer import build_optimizer
from launcher.training.monitoring.nvml import NvmlSampler
from launcher.training.monitoring.step_timer import StepTimer, StepTiming

MIN_TIMED_STEPS = 2
PROBED_MICRO_BATCHES = 4


def time_stage(spec: StageSpec, config: LoopConfig) -> Timing:
    """Time an ablation stage; after CUDA out of memory, retry with half the micro-batch, down to SMALL_MICRO_BATCH."""
    file = open_store(Path(spec.store)).open_split("train")
    size = requested = _choose_micro_batch(spec.plan, config, file)
    while True:
        try:
            timing = _time(spec, config, file, size)
        except torch.OutOfMemoryError:
            if size <= SMALL_MICRO_BATCH:
                raise
        else:
            reduced = "" if size == requested else f"micro-batch {size}: {requested} did not fit"
            return timing.model_copy(update={"note": "; ".join(filter(None, (reduced, timing.note)))})
        size = max(SMALL_MICRO_BATCH, size // 2)
        gc.collect()  # outside the handler: the error's traceback would keep the tensors alive
        torch.cuda.empty_cache()


def _choose_micro_batch(plan: Plan, config: LoopConfig, file: PackFile) -> int:
    """Return the micro-batch size; for padded rows, the mean number of rows in the plan's packed micro-batch."""
    if config.rows == "packed" or config.micro_batch_size == SMALL_MICRO_BATCH or not plan.batch.packed:
        return config.micro_batch_size
    return max(SMALL_MICRO_BATCH, round(config.micro_batch_size * float(file.count("document_lengths").mean())))


def _time(spec: StageSpec, config: LoopConfig, file: PackFile, micro_batch_size: int) -> Timing:
    plan = derive_stage_plan(spec.plan, config)
    device = torch.device("cuda" if plan.hardware.gpu is not None else "cpu")
    folders = base_folders(Path(plan.data.folder))
    tokenizer = load_planned_tokenizer(plan, folders).backend
    num_steps = 1 + spec.warmup_steps + max(MIN_TIMED_STEPS, spec.timed_steps)  # the first is the probe
    steps = list_steps(plan, file, num_steps)
    batches = make_batches(file, steps, config, micro_batch_size, plan.batch.sequence_length, tokenizer)
    loop = PlainLoop(build_stage_model(plan, config, folders, device), plan, batches, device)
    timing = loop.run(spec.warmup_steps, spec.timed_steps, spec.seconds)
    return timing.model_copy(update={"mfu": _compute_mfu(spec.plan, file, steps, timing)})


def list_steps(plan: Plan, file: PackFile, num_steps: int) -> list[tuple[int, ...]]:
    """Return the indices of the packed sequences that a training with this plan uses in each of its first steps."""
    order = PackSampler(num_packs=len(file), global_batch_size=plan.batch.global_batch_size, seed=plan.schedule.seed)
    return [order.packs_for_step(step) for step in range(num_steps)]


class PlainLoop:
    """Plain PyTorch training loop with gradient accumulation and gradient clipping, which times its steps."""

    def __init__(self, model: StageModel, plan: Plan, batches: StageBatches, device: torch.device) -> None:
        """Build the optimizer, the gradient scaler and the loader."""
        self._model, self._batches, self._device = model, batches, device
        num_workers = batches.config.num_workers
        self._optimizer = build_optimizer(plan.optimizer, model)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._max_norm = plan.optimizer.max_grad_norm
        self._num_trained = batches.count_trained(0)
        self._scaler = torch.amp.GradScaler(device.type, enabled=plan.precision.loss_scaling)
        self._num_read = 0  # micro-batches of this run
        self._stream: Iterator[AnyBatch] = iter(())
        self._loader: DataLoader[AnyBatch] = DataLoader(
            batches,
            batch_size=None,
            shuffle=False,
            num_workers=num_workers,
            pin_memory=num_workers > 0 and device.type == "cuda",
        )

    def run(self, warmup_steps: int, timed_steps: int, seconds: float) -> Timing:
        """Run warm-up and timed steps; each phase ends after its number of steps, its seconds or the last batch.

        At least one warm-up step and two timed steps are run. If complete steps take too long for that, each step
        accumulates the gradients of fewer micro-batches.
        """
        sampler, timer = NvmlSampler(self._device), StepTimer(self._device)
        sampler.start()
        self._stream, self._num_read = iter(self._loader), 0
        complete = max(map(self._batches.count_micro_batches, range(len(self._batches.steps))))
        try:
            size = self._choose_step_size(timer, complete, seconds)
            while 0 < self._num_read < len(self._batches) and not self._batches.is_last_of_step(self._num_read - 1):
                self._read()  # the next step begins at its first micro-batch
            self._run_steps(timer, size, seconds, min_steps=1, max_steps=warmup_steps)
            reset_peak()
            sampler.read()
            max_steps = max(MIN_TIMED_STEPS, timed_steps)
            steps = self._run_steps(timer, size, seconds, min_steps=MIN_TIMED_STEPS, max_steps=max_steps)
            note = "" if size == complete else f"timed {size} of {complete} micro-batches per step, with the update"
            return self._make_timing(steps, sampler).model_copy(update={"note": note})
        finally:
            sampler.stop()

    def _read(self) -> tuple[AnyBatch, int]:
        """Return the next micro-batch and its number."""
        self._num_read += 1
        return next(self._stream), self._num_read - 1

    def _choose_step_size(self, timer: StepTimer, complete: int, seconds: float) -> int:
        """Return how many micro-batches per step fit in `seconds`, by timing a few of them after a warm-up."""
        if complete <= 2 * PROBED_MICRO_BATCHES:
            return complete
        self._train_step(timer, PROBED_MICRO_BATCHES)[1].seconds()
        num_before = self._num_read
        timing = self._train_step(timer, PROBED_MICRO_BATCHES)[1]
        each = timing.seconds() / (self._num_read - num_before)
        return min(complete, max(PROBED_MICRO_BATCHES, int(seconds / MIN_TIMED_STEPS / each)))

    def _run_steps(
        self, timer: StepTimer, size: int, seconds: float, *, min_steps: int, max_steps: int
    ) -> list[tuple[int, StepTiming]]:
        """Run steps for `seconds`, but at least `min_steps` and at most `max_steps`; return tokens and time of each."""
        steps: list[tuple[int, StepTiming]] = []
        began = time.perf_counter()
        while len(steps) < max_steps and self._num_read < len(self._batches):
            steps.append(self._train_step(timer, size))
            steps[max(0, len(steps) - 2)][1].seconds()  # sync with the previous step: the host is at most one ahead
            if len(steps) >= min_steps and time.perf_counter() - began > seconds:
                break
        return steps

    def _train_step(self, timer: StepTimer, size: int) -> tuple[int, StepTiming]:
        """Train up to `size` micro-batches, then run the optimizer step; return the number of tokens and the timing."""
        num_tokens = 0
        for _ in range(size):
            with timer.waiting_for_data():
                batch, index = self._read()
            num_tokens += self._batches.count_micro_batch_tokens(index)
            loss = self._model(batch.to(self._device)) / self._num_trained
            self._scaler.scale(loss).backward()
            if self._batches.is_last_of_step(index):
                break
        self._scaler.unscale_(self._optimizer)
        if self._max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._max_norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        return num_tokens, timer.finish_step()

    def _make_timing(self, steps: list[tuple[int, StepTiming]], sampler: NvmlSampler) -> Timing:
        waited = [min(1.0, timing.starved_seconds() / max(1e-9, timing.seconds())) for _, timing in steps]
        sample = sampler.read()
        return Timing(
            seconds=tuple(timing.seconds() for _, timing in steps),
            tokens=tuple(num_tokens for num_tokens, _ in steps),
            data_wait_share=statistics.fmean(waited),
            peak_gib=read_peak_gib(),
            utilization=None if sample is None else sample.utilization,
            watts=None if sample is None else sample.watts,
        )


def _compute_mfu(plan: Plan, file: PackFile, steps: list[tuple[int, ...]], timing: Timing) -> float | None:
    """Compute the MFU relative to the peak of the plan's own precision, so that stages are comparable."""
    gpu = plan.hardware.gpu
    peak = None if gpu is None else get_peak_tflops(gpu, plan.precision.compute_dtype)
    packs = [pack for step in steps for pack in step]
    num_tokens = float(file.count("input_ids")[packs].sum())
    document_tokens = float(file.column("sum_squares")[packs].sum()) / num_tokens
    trained_share = float(file.column("num_trained")[packs].sum()) / num_tokens
    workload = workload_from_plan(plan, document_tokens, trained_share)
    return compute_mfu(timing.tokens_per_second, compute_flops_per_token(workload), peak)
