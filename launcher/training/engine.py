"""Model, optimizer and schedule as accelerate prepared them: one micro-step, one update, whatever runs below."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from launcher.training.batches import PackedBatch
from launcher.training.model import TrainedModel


@dataclass(frozen=True, kw_only=True)
class Engine:
    accelerator: Accelerator
    module: TrainedModel  # as built
    model: nn.Module  # as prepared
    optimizer: Optimizer
    schedule: LRScheduler
    max_grad_norm: float | None
    num_micro_batches: int  # a step

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def rank(self) -> int:
        return self.accelerator.process_index

    @property
    def num_ranks(self) -> int:
        return self.accelerator.num_processes

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def learning_rate(self) -> float:
        return float(self.schedule.get_last_lr()[0])

    def micro_step(self, batch: PackedBatch, num_trained: int, *, is_last: bool) -> Tensor:
        """Forward and backward. Its share of the step's loss: a sum divided by the whole step's trained tokens."""
        with self._accumulating(is_last):
            loss: Tensor = self.model(batch) / num_trained
            self.accelerator.backward(loss * self._backward_scale)
        return loss.detach()

    @property
    def is_deepspeed(self) -> bool:
        return bool(self.accelerator.distributed_type == DistributedType.DEEPSPEED)

    @property
    def _backward_scale(self) -> float:
        """Engines average gradients over ranks, and DeepSpeed over micro-steps too; here they shall be added."""
        return self.num_ranks * (self.num_micro_batches if self.is_deepspeed else 1)

    @contextmanager
    def _accumulating(self, is_last: bool) -> Iterator[None]:
        """Gradients travel between ranks once a step, with the last micro-batch."""
        if self.is_deepspeed:  # it steps inside the backward pass in which accelerate says that gradients are complete
            self.accelerator.sync_gradients = is_last
            yield
        else:
            with nullcontext() if is_last else self.accelerator.no_sync(self.model):
                yield

    def update(self) -> Tensor:
        """One optimizer step with clipped gradients; the norm they had, still on the device."""
        limit = float("inf") if self.max_grad_norm is None else self.max_grad_norm
        norm = self.accelerator.clip_grad_norm_(self.trained_parameters(), limit)
        self.optimizer.step()
        if not self.accelerator.optimizer_step_was_skipped:  # by FP16's loss scaling
            self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        if isinstance(norm, DTensor):
            return norm.full_tensor()
        return norm if isinstance(norm, Tensor) else torch.tensor(float("nan") if norm is None else float(norm))

    def trained_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def add_up(self, total: Tensor) -> Tensor:
        """Over the ranks."""
        summed: Tensor = self.accelerator.reduce(total, reduction="sum")
        return summed

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train()
