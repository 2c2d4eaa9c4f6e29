"""Micro-steps and updates with the model, optimizer and LR schedule that accelerate prepared, for every strategy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from launcher.training.data.collate import PackedBatch
from launcher.training.engine.chunked_adamw import ChunkedAdamW, OptimizerInBackward
from launcher.training.engine.collectives import all_reduce_gradients
from launcher.training.engine.cuda_graph import GraphedMicroSteps
from launcher.training.engine.optimizer import unwrap_optimizer
from launcher.training.model.fp8_linear import use_unrounded_forward
from launcher.training.model.packed_lm import PackedCausalLM


class HalfUpdatedError(torch.OutOfMemoryError):
    """CUDA out of memory within the optimizer step: some weights may be updated and others not."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One interface to micro-steps and updates for single process, DDP, FSDP2, HSDP and DeepSpeed ZeRO."""

    accelerator: Accelerator
    module: PackedCausalLM  # as built
    model: nn.Module  # as prepared by accelerate
    optimizer: Optimizer
    lr_scheduler: LRScheduler
    max_grad_norm: float | None
    num_micro_batches: int  # per step
    always_sync_gradients: bool  # in every micro-batch, where unsharded gradients do not fit into memory
    graphs: GraphedMicroSteps | None  # None: kernels are launched one by one
    defer_gradient_sync: bool  # all-reduce after the backward passes of a step, not during the last one
    in_backward: OptimizerInBackward | None  # None: weights are updated after the backward pass
    uses_loss_scaling: bool  # FP16: steps with overflowing gradients are skipped until the scale fits

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.accelerator.device

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self.accelerator.process_index

    @property
    def num_ranks(self) -> int:
        """The world size."""
        return self.accelerator.num_processes

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.accelerator.is_main_process

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed runs the optimizer."""
        return bool(self.accelerator.distributed_type == DistributedType.DEEPSPEED)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return float(self.lr_scheduler.get_last_lr()[0])

    def micro_step(self, batch: PackedBatch, num_trained: int, *, is_last: bool) -> Tensor:
        """Run forward and backward; return the summed loss divided by the step's `num_trained` tokens."""
        if self.graphs is not None:
            self.module.fused_lora.refresh()  # a graph replay does not, and weights may come from a checkpoint
            return self.graphs(batch, num_trained)
        with self._accumulate(is_last):
            loss: Tensor = self.model(batch) / num_trained
            if self.in_backward is None:
                self.accelerator.backward(loss * self._backward_scale)
            else:
                self._backward_and_update(loss, self.in_backward)
        return loss.detach()

    def _backward_and_update(self, loss: Tensor, optimizer: OptimizerInBackward) -> None:
        """Run the backward pass, which updates the weights; raise HalfUpdatedError if it runs out of memory."""
        try:
            with optimizer.enabled(loss):
                self.accelerator.backward(loss)
        except torch.OutOfMemoryError as error:
            raise HalfUpdatedError(str(error)) from error

    @property
    def _backward_scale(self) -> float:
        """Factor for the loss that turns gradient averages over ranks, and in DeepSpeed over micro-steps, into sums."""
        if self.defer_gradient_sync:
            return 1.0
        return self.num_ranks * (self.num_micro_batches if self.is_deepspeed else 1)

    @contextmanager
    def _accumulate(self, is_last: bool) -> Iterator[None]:
        """Synchronize gradients in the last micro-batch only, or in each one if unsharded gradients do not fit."""
        if self.is_deepspeed:  # DeepSpeed updates within the backward pass that accelerate marks as the last
            self.accelerator.sync_gradients = is_last
            yield
        else:
            is_synced = is_last or self.always_sync_gradients
            if is_synced and isinstance(self.model, FSDPModule):
                self.model.set_requires_all_reduce(is_last)  # HSDP: between nodes once per step
            with nullcontext() if is_synced else self.accelerator.no_sync(self.model):
                yield

    def update(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Clip gradients and step the optimizer, unless the loss or the gradient norm is non-finite.

        Returns the gradient norm before clipping and whether the step was skipped, which is the same on all ranks. Both
        stay on the device.
        """
        if self.in_backward is not None:  # the weights are updated
            unwrap_optimizer(self.optimizer)._opt_called = True  # type: ignore[attr-defined]  # else torch warns
            self.lr_scheduler.step()
            norm = self.in_backward.grad_norm
            return norm, (~torch.isfinite(norm + loss)).to(loss)
        if self.defer_gradient_sync:
            all_reduce_gradients(self.trained_parameters())
        limit = float("inf") if self.max_grad_norm is None else self.max_grad_norm
        norm = self._as_tensor(self.accelerator.clip_grad_norm_(self.trained_parameters(), limit))
        is_skipped = ~torch.isfinite(norm + loss)
        try:
            is_skipped = self._step(loss, is_skipped)
            self.module.fused_lora.refresh(force=True)  # not every optimizer increments a tensor's version counter
        except torch.OutOfMemoryError as error:
            raise HalfUpdatedError(str(error)) from error
        if not (self.uses_loss_scaling and self.accelerator.optimizer_step_was_skipped):
            self.lr_scheduler.step()
        self.optimizer.zero_grad(set_to_none=self.graphs is None)
        return norm, is_skipped.to(loss)

    def _step(self, loss: Tensor, is_nonfinite: Tensor) -> Tensor:
        """Step the optimizer unless `is_nonfinite`; return whether the step was skipped."""
        if self.is_deepspeed or self.uses_loss_scaling:  # these check for overflow themselves, with a host sync
            self.optimizer.step()
            return torch.full_like(loss, float(self.accelerator.optimizer_step_was_skipped))
        inner: Any = unwrap_optimizer(self.optimizer)
        # These optimizers read from a tensor on the device whether to skip the step, without a host sync.
        if inner.param_groups[0].get("fused") or isinstance(inner, ChunkedAdamW):
            inner.grad_scale, inner.found_inf = None, is_nonfinite.float()
            try:
                self.optimizer.step()
            finally:
                del inner.grad_scale, inner.found_inf
        elif bool(is_nonfinite):
            inner._opt_called = True  # else torch warns that the LR scheduler stepped before the optimizer
        else:
            self.optimizer.step()
        return is_nonfinite

    def _as_tensor(self, norm: Any) -> Tensor:
        if isinstance(norm, DTensor):
            return norm.full_tensor()
        if isinstance(norm, Tensor):
            return norm
        return torch.tensor(float("nan") if norm is None else float(norm), device=self.device)

    @property
    def peak_bytes(self) -> int:
        """Peak memory since the counters were reset, including CUDA graphs, which torch's counters do not show."""
        held = 0 if self.graphs is None else self.graphs.held_bytes
        return max(torch.cuda.max_memory_allocated(self.device), torch.cuda.memory_allocated(self.device) + held)

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are trained."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over all ranks."""
        summed: Tensor = self.accelerator.reduce(value, reduction="sum")
        return summed

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Put the model into evaluation mode, without gradients and without FP8 in layers that are trained in it."""
        self.model.eval()
        self.module.fused_lora.refresh()  # generation does not call this module
        try:
            with torch.no_grad(), use_unrounded_forward():
                yield
        finally:
            self.model.train()
