"""The held-out loss: same precision, same kernels, its own batch size; and what the expert's answers are worth."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from launcher import metrics
from launcher.errors import say
from launcher.training.batches import make_shape
from launcher.training.feeding import evaluation_batches
from launcher.training.products import forget
from launcher.training.run import Run, Split
from launcher.training.tasks import Tasks


class Evaluator:
    """Of one run. Where its batch does not fit, a smaller one gives the same loss, from then on."""

    def __init__(self, run: Run, tasks: Tasks | None = None) -> None:
        self._run, self._tasks = run, tasks
        self._shape = None if run.validation is None else run.validation.shape

    def evaluate(self, step: int) -> dict[str, float]:
        """Behind a step; no values where nothing is held out."""
        return {**self.ask(step), **self._find_loss()}

    def ask(self, step: int, *, is_last: bool = False) -> dict[str, float]:
        """Task metrics, where the plan has them."""
        if self._tasks is None or not self._tasks.is_due(step, is_last=is_last):
            return {}
        return self._tasks.evaluate(step)

    def _find_loss(self) -> dict[str, float]:
        """Mean over all trained tokens of the validation split."""
        split = self._run.validation
        if split is None:
            return {}
        started = time.perf_counter()
        loss = float(self._run.engine.add_up(self._total(split))) / max(1, int(split.num_trained.sum()))
        return {metrics.EVAL_LOSS: loss, metrics.EVAL_SECONDS: time.perf_counter() - started}

    def _total(self, split: Split) -> Tensor:
        while True:
            try:
                return self._add_up(split)
            except torch.OutOfMemoryError:
                if not self._shrink(split):
                    raise
            forget(self._run.engine.module.products)
            torch.cuda.empty_cache()

    def _add_up(self, split: Split) -> Tensor:
        engine = self._run.engine
        assert self._shape is not None
        total = torch.zeros((), device=engine.device)
        with engine.evaluating():
            for batch in evaluation_batches(split.file, split.costs, self._shape, engine.rank, engine.num_ranks):
                self._run.pulse.beat("evaluating")
                total += engine.model(batch.to(engine.device))
        return total

    def _shrink(self, split: Split) -> bool:
        """Alone only: engines of several ranks meet inside the forward pass."""
        assert self._shape is not None
        size = self._shape.micro_batch_size // 2
        if size == 0 or self._run.engine.num_ranks > 1:
            return False
        batch = self._run.plan.batch
        self._shape = make_shape(split.num_documents, size, batch.sequence_length, is_packed=batch.packed)
        say(f"warning: evaluation ran out of memory; it goes on with {size} at a time")
        return True
