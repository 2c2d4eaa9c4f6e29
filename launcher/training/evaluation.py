"""The held-out loss: same precision, same kernels, its own batch size."""

from __future__ import annotations

import time

import torch

from launcher import metrics
from launcher.metrics import StepMetrics
from launcher.training.feeding import evaluation_batches
from launcher.training.run import Run


def evaluate(run: Run, step: int) -> StepMetrics:
    """Mean loss over all trained tokens of the validation split; no value where there is no split."""
    split, engine = run.validation, run.engine
    values: dict[str, float] = {}
    if split is not None:
        started = time.perf_counter()
        total = torch.zeros((), device=engine.device)
        with engine.evaluating():
            for batch in evaluation_batches(split.file, split.costs, split.shape, engine.rank, engine.num_ranks):
                total += engine.model(batch.to(engine.device))
        loss = float(engine.add_up(total)) / max(1, int(split.num_trained.sum()))
        values = {metrics.EVAL_LOSS: loss, metrics.EVAL_SECONDS: time.perf_counter() - started}
    return StepMetrics(step=step, epoch=step / run.steps_per_epoch, values=values)
