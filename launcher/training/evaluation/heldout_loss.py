"""Evaluation during training: the validation loss, and the task metrics."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from launcher.core import metrics
from launcher.core.log import get_logger
from launcher.training.data.collate import choose_batch_shape
from launcher.training.data.loader import iterate_eval_batches
from launcher.training.engine.run import Split, TrainingRun
from launcher.training.evaluation.task_metrics import TaskEvaluator

log = get_logger(__name__)


class Evaluator:
    """Evaluator of the model being trained. After CUDA out of memory it halves the batch; the loss is the same."""

    def __init__(self, run: TrainingRun, tasks: TaskEvaluator | None = None) -> None:
        self._run, self._tasks = run, tasks
        self._shape = None if run.validation is None else run.validation.shape

    @property
    def must_repeat(self) -> bool:
        """Whether a signal interrupted an evaluation that decides the best step: a resumed run must repeat it."""
        return self._tasks is not None and self._tasks.must_repeat

    def evaluate(self, step: int) -> dict[str, float]:
        """Return task metrics and validation loss after a step; empty without held-out rows, or if interrupted."""
        values = self.evaluate_tasks(step)
        return {} if self.must_repeat else {**values, **self._compute_loss()}

    def evaluate_tasks(self, step: int, *, is_last: bool = False) -> dict[str, float]:
        """Return the task metrics after a step; empty if the plan has none or they are not due at this step."""
        if self._tasks is None or not self._tasks.is_due(step, is_last=is_last):
            return {}
        return self._tasks.evaluate(step)

    def _compute_loss(self) -> dict[str, float]:
        """Return the mean loss over all trained tokens of the validation split, and how long it took."""
        split = self._run.validation
        if split is None:
            return {}
        started = time.perf_counter()
        loss = float(self._run.engine.all_reduce_sum(self._sum_loss(split))) / max(1, int(split.num_trained.sum()))
        return {metrics.EVAL_LOSS: loss, metrics.EVAL_SECONDS: time.perf_counter() - started}

    def _sum_loss(self, split: Split) -> Tensor:
        while True:
            try:
                return self._sum_loss_once(split)
            except torch.OutOfMemoryError:
                if not self._shrink(split):
                    raise
            self._run.engine.module.clear_cached_outputs()
            torch.cuda.empty_cache()

    def _sum_loss_once(self, split: Split) -> Tensor:
        engine = self._run.engine
        assert self._shape is not None
        total = torch.zeros((), device=engine.device)
        with engine.eval_mode():
            for batch in iterate_eval_batches(split.file, split.costs, self._shape, engine.rank, engine.num_ranks):
                self._run.heartbeat.beat("evaluating")
                total += engine.model(batch.to(engine.device))
        return total

    def _shrink(self, split: Split) -> bool:
        """Halve the batch size; return False, without a change, if it is 1 or if several ranks evaluate together."""
        assert self._shape is not None
        size = self._shape.micro_batch_size // 2
        if size == 0 or self._run.engine.num_ranks > 1:
            return False
        batch = self._run.plan.batch
        self._shape = choose_batch_shape(split.num_documents, size, batch.sequence_length, is_packed=batch.packed)
        log.warning(f"CUDA out of memory during evaluation; retrying with batch size {size}")
        return True
