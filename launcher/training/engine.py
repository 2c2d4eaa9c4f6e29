"""Model, optimizer and schedule as accelerate prepared them: one micro-step, one update, whatever runs below."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from launcher.training.batches import PackedBatch
from launcher.training.exchange import add_up_gradients
from launcher.training.graphs import GraphedMicroSteps
from launcher.training.model import TrainedModel
from launcher.training.optim import innermost


class HalfUpdatedError(torch.OutOfMemoryError):
    """Memory ran out within the update: some weights may be of this step and others of the one before."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    accelerator: Accelerator
    module: TrainedModel  # as built
    model: nn.Module  # as prepared
    optimizer: Optimizer
    schedule: LRScheduler
    max_grad_norm: float | None
    num_micro_batches: int  # a step
    reduces_always: bool  # gradients are too large to be held whole until the last micro-batch of a step
    graphs: GraphedMicroSteps | None  # None: kernels are launched one by one
    adds_up_behind: bool  # ranks' gradients, not while they are computed
    scales_loss: bool  # FP16: steps whose scaled gradients overflow are passed over until the scale fits

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
        if self.graphs is not None:
            self.module.products.refresh()  # a replay does not: weights may have come from a checkpoint meanwhile
            return self.graphs(batch, num_trained)
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
        if self.adds_up_behind:
            return 1.0
        return self.num_ranks * (self.num_micro_batches if self.is_deepspeed else 1)

    @contextmanager
    def _accumulating(self, is_last: bool) -> Iterator[None]:
        """Gradients travel between ranks once a step, with the last micro-batch, unless only shards have room."""
        if self.is_deepspeed:  # it steps inside the backward pass in which accelerate says that gradients are complete
            self.accelerator.sync_gradients = is_last
            yield
        else:
            travels = is_last or self.reduces_always
            with nullcontext() if travels else self.accelerator.no_sync(self.model):
                yield

    def update(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """One optimizer step with clipped gradients. The norm that they had, and whether the step was passed over,
        because the step's loss or the norm is no number: all ranks see the same. Both are still on the device."""
        if self.adds_up_behind:
            add_up_gradients(self.trained_parameters())
        limit = float("inf") if self.max_grad_norm is None else self.max_grad_norm
        norm = self._as_tensor(self.accelerator.clip_grad_norm_(self.trained_parameters(), limit))
        is_bad = ~torch.isfinite(norm + loss)
        try:
            is_bad = self._step(loss, is_bad)
            self.module.products.refresh(anyway=True)  # not every optimizer leaves a trace in a tensor's version
        except torch.OutOfMemoryError as error:
            raise HalfUpdatedError(str(error)) from error
        if not (self.scales_loss and self.accelerator.optimizer_step_was_skipped):
            self.schedule.step()
        self.optimizer.zero_grad(set_to_none=self.graphs is None)
        return norm, is_bad.to(loss)

    def _step(self, loss: Tensor, is_bad: Tensor) -> Tensor:
        """Whether it was passed over."""
        if self.is_deepspeed or self.scales_loss:  # these look for themselves, and wait for the device
            self.optimizer.step()
            return torch.full_like(loss, float(self.accelerator.optimizer_step_was_skipped))
        self._step_unless(is_bad)
        return is_bad

    def _step_unless(self, is_bad: Tensor) -> None:
        """Fused optimizers take a tensor that tells them to do nothing; for others the host must know it."""
        inner: Any = innermost(self.optimizer)
        if not inner.param_groups[0].get("fused"):
            if bool(is_bad):
                inner._opt_called = True  # torch would warn that the schedule came first
            else:
                self.optimizer.step()
            return
        inner.grad_scale, inner.found_inf = None, is_bad.float()
        try:
            self.optimizer.step()
        finally:
            del inner.grad_scale, inner.found_inf

    def _as_tensor(self, norm: Any) -> Tensor:
        if isinstance(norm, DTensor):
            return norm.full_tensor()
        if isinstance(norm, Tensor):
            return norm
        return torch.tensor(float("nan") if norm is None else float(norm), device=self.device)

    @property
    def peak_bytes(self) -> int:
        """Of a step, on this rank's GPU, since the counters were reset; graphs use memory that these do not see."""
        held = 0 if self.graphs is None else self.graphs.held_bytes
        return max(torch.cuda.max_memory_allocated(self.device), torch.cuda.memory_allocated(self.device) + held)

    def trained_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def add_up(self, total: Tensor) -> Tensor:
        """Over the ranks."""
        summed: Tensor = self.accelerator.reduce(total, reduction="sum")
        return summed

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self.model.eval()
        self.module.products.refresh()  # answers are generated without a call of this module
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train()
