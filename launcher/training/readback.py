"""What a step did, read from the device one step late, so that the host runs ahead of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from launcher import metrics
from launcher.metrics import StepMetrics, compute_mfu
from launcher.speed import Workload, flops_per_token, peak_tflops
from launcher.training.observers.base import Observer
from launcher.training.run import Run
from launcher.units import bytes_to_gib

if TYPE_CHECKING:
    from launcher.training.loop import StepResult


class Readback:
    def __init__(self, run: Run, observer: Observer, tokens_seen: int = 0) -> None:
        self._run, self._observer = run, observer
        self._waiting: StepResult | None = None
        self._tokens_seen = tokens_seen
        self._stops = False

    def add(self, result: StepResult) -> bool:
        """Whether the run shall stop. All ranks get the same answer at the same step: one that was read back."""
        before, self._waiting = self._waiting, result
        self._tell(before)
        return result.asks_to_stop if self._run.engine.num_ranks == 1 else self._stops

    def flush(self) -> None:
        """Tells the observers about the step that is still waiting."""
        result, self._waiting = self._waiting, None
        self._tell(result)

    def _tell(self, result: StepResult | None) -> None:
        if result is not None:
            self._observer.on_step(self._run, self._read(result))
            self._run.pulse.beat("training")

    def _read(self, result: StepResult) -> StepMetrics:
        run, packs = self._run, list(result.packs)
        seconds = result.seconds()  # waits for the step: from here on its facts are there
        loss, num_asking, grad_norm, skipped = result.facts.tolist()
        self._stops = num_asking > 0
        self._tokens_seen += result.num_tokens
        rate = result.num_tokens / max(1e-9, seconds)
        values = {
            metrics.TRAIN_LOSS: loss,
            metrics.GRAD_NORM: grad_norm,
            metrics.SKIPPED: skipped,
            metrics.LEARNING_RATE: result.learning_rate,
            metrics.STEP_SECONDS: seconds,
            metrics.DATA_WAIT_SECONDS: result.data_seconds,
            metrics.TOKENS_PER_SECOND: rate,
            metrics.TRAINED_TOKENS_PER_SECOND: int(run.train.num_trained[packs].sum()) / max(1e-9, seconds),
            metrics.SAMPLES_PER_SECOND: int(run.train.num_documents[packs].sum()) / max(1e-9, seconds),
            metrics.DEVICE_TOKENS_PER_SECOND: rate / run.engine.num_ranks,
            metrics.TOKENS_SEEN: float(self._tokens_seen),
        }
        mfu = compute_mfu(rate / run.engine.num_ranks, self._flops_per_token(packs), _peak_tflops(run))
        if mfu is not None:
            values[metrics.DEVICE_MFU] = mfu
        if run.engine.device.type == "cuda":
            values[metrics.PEAK_ALLOCATED_GIB] = bytes_to_gib(torch.cuda.max_memory_allocated())
            values[metrics.PEAK_RESERVED_GIB] = bytes_to_gib(torch.cuda.max_memory_reserved())
            values[metrics.ALLOC_RETRIES] = float(torch.cuda.memory_stats().get("num_alloc_retries", 0))
            values[metrics.PREDICTED_GIB] = bytes_to_gib(run.plan.memory.allocated_bytes)
        return StepMetrics(step=result.step, epoch=result.step / run.steps_per_epoch, values=values, packs=result.packs)

    def _flops_per_token(self, packs: list[int]) -> float:
        """With the real lengths of these documents: a token attends to half of its document on average."""
        run, plan = self._run, self._run.plan
        mean = float(run.train.costs[packs].sum()) / max(1.0, float(run.train.num_tokens[packs].sum()))
        workload = Workload(
            shape=plan.base,
            adapter=plan.adapter.kind,
            quantization=plan.quantization_kind,
            compute_dtype=plan.precision.compute_dtype,
            compiled=plan.compile is not None,
            checkpointing=plan.checkpointing,
            document_tokens=mean,
        )
        trained_share = float(run.train.num_trained[packs].sum()) / max(1.0, float(run.train.num_tokens[packs].sum()))
        return flops_per_token(workload, trained_share)


def _peak_tflops(run: Run) -> float | None:
    gpu = run.plan.hardware.gpu
    if gpu is None or run.engine.device.type != "cuda":
        return None
    return peak_tflops(gpu, run.plan.precision.compute_dtype)
