"""A complete micro-step as one CUDA graph, so that small micro-batches do not wait for kernel launches.

The forward and backward pass are captured once and then replayed. A replay reads and writes fixed addresses: batches
are copied there, and gradients accumulate there. A graph keeps its memory, so there is never more than one: its sizes
grow to the largest batch so far, and smaller batches are padded to them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher.core.errors import first_line
from launcher.core.log import get_logger
from launcher.training.data.collate import PackedBatch

log = get_logger(__name__)

_PADDING = -1  # a target that the loss ignores
_HEADROOM = 1.1  # trained positions that fit, relative to those of the captured batch
_SMALL_BYTES = 512 * 2**20  # gradients that may exist twice

# (batch, number of tokens trained in the step) -> its part of the loss; accumulates gradients
MicroStep = Callable[[PackedBatch, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that a graph is captured for."""

    num_tokens: int
    num_cu_seqlens: int
    num_trained: int

    def covers(self, other: Sizes) -> bool:
        """Whether a batch of the sizes `other` can be padded to these sizes; the number of tokens must be equal."""
        fits = other.num_cu_seqlens <= self.num_cu_seqlens and other.num_trained <= self.num_trained
        return fits and other.num_tokens == self.num_tokens


@dataclass(frozen=True, kw_only=True)
class _CapturedGraph:
    sizes: Sizes
    graph: torch.cuda.CUDAGraph
    batch: PackedBatch
    num_trained: Tensor
    loss: Tensor


class GraphedMicroSteps:
    """Runs micro-steps by replaying a CUDA graph, or directly if capturing fails."""

    def __init__(self, micro_step: MicroStep, parameters: list[nn.Parameter], loss_chunk: int) -> None:
        self._micro_step = micro_step
        self._parameters = parameters
        self._chunk = loss_chunk
        self._captured: _CapturedGraph | None = None
        self._grads: dict[int, Tensor] = {}
        self._gave_up = False
        self.held_bytes = 0  # used by replays; torch's counters do not show them

    def __call__(self, batch: PackedBatch, num_trained: int) -> Tensor:
        """Run one micro-step, accumulate its gradients, and return its part of the loss."""
        self._keep_gradients()
        captured = self._get_graph(batch, num_trained)
        if captured is None:
            return self._micro_step(batch, torch.full((), float(num_trained), device=batch.input_ids.device))
        for buffer, value in zip(_tensors(captured.batch), _tensors(pad_to(batch, captured.sizes)), strict=True):
            buffer.copy_(value, non_blocking=True)
        captured.num_trained.fill_(num_trained)
        captured.graph.replay()
        return captured.loss.clone()  # the next replay overwrites it

    def _get_graph(self, batch: PackedBatch, num_trained: int) -> _CapturedGraph | None:
        if self._gave_up:
            return None
        needed = measure(batch)
        if self._captured is None or not self._captured.sizes.covers(needed):
            sizes = grow(needed, None if self._captured is None else self._captured.sizes, self._chunk)
            self._release()
            try:
                self._captured = self._capture(pad_to(batch, sizes), num_trained, sizes)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a kernel that cannot be captured may raise anything
                self._gave_up = True
                log.warning(f"cannot capture a CUDA graph, launching kernels one by one: {first_line(error)}")
        return self._captured

    @property
    def is_active(self) -> bool:
        """Whether micro-steps run as a graph."""
        return not self._gave_up

    def _release(self) -> None:
        """Free the memory of the current graph before the next one, which needs as much, is captured.

        Synchronizes first, because the last replay may still run: torch, before it unmaps memory, waits only for the
        stream on which the graph was captured.
        """
        if self._captured is not None:
            torch.cuda.synchronize(self._captured.loss.device)
            self._captured.graph.reset()
            self._captured, self.held_bytes = None, 0
            gc.collect()
            torch.cuda.empty_cache()

    def _keep_gradients(self) -> None:
        """Keep gradient buffers at fixed addresses, because replays accumulate into them. A grad of None means zero."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None and parameter.grad is self._grads.get(index):
                continue
            if index in self._grads:
                self._grads[index].zero_()
            else:
                self._grads[index] = torch.zeros_like(parameter)
            parameter.grad = self._grads[index]

    def _capture(self, batch: PackedBatch, num_trained: int, sizes: Sizes) -> _CapturedGraph:
        """Capture a graph. Gradients stay unchanged: capturing computes nothing, and its warm-up pass is undone."""
        device = batch.input_ids.device
        buffers = batch.map(torch.clone)
        count = torch.full((), float(num_trained), device=device)
        # Blocks cached for the current stream cannot be used by the other. torch would count freeing them as a retry.
        torch.cuda.empty_cache()
        stream, outer = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(outer)
        try:
            with torch.cuda.stream(stream), torch.random.fork_rng(devices=[device]):
                for parameter in self._parameters:
                    parameter.grad = None
                # This compiles kernels and allocates handles and workspaces, which must not happen during capture.
                self._micro_step(buffers, count)
                grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
                torch._foreach_add_(grads[:1], grads[:1])
            outer.wait_stream(stream)
            self._restore_gradients()
            graph = torch.cuda.CUDAGraph()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            # Other threads pin memory meanwhile, which a global capture mode would forbid.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                loss = self._accumulate(buffers, count)
        finally:  # a failed capture may leave its stream current
            torch.cuda.set_stream(outer)
            self._restore_gradients()
        self.held_bytes = torch.cuda.max_memory_allocated(device) - before
        return _CapturedGraph(sizes=sizes, graph=graph, batch=buffers, num_trained=count, loss=loss)

    def _accumulate(self, batch: PackedBatch, num_trained: Tensor) -> Tensor:
        """Run a micro-step and add its gradients in one kernel if they are small; autograd adds them one by one."""
        totals = [self._grads[index] for index in range(len(self._parameters))]
        if sum(grad.nbytes for grad in totals) > _SMALL_BYTES:
            return self._micro_step(batch, num_trained)
        for parameter in self._parameters:
            parameter.grad = None
        loss = self._micro_step(batch, num_trained)
        pairs = [(total, p.grad) for total, p in zip(totals, self._parameters, strict=True) if p.grad is not None]
        if pairs:
            torch._foreach_add_(*map(list, zip(*pairs, strict=True)))
        self._restore_gradients()
        return loss

    def _restore_gradients(self) -> None:
        for index, parameter in enumerate(self._parameters):
            parameter.grad = self._grads[index]


def measure(batch: PackedBatch) -> Sizes:
    """Return the sizes of a batch."""
    return Sizes(batch.input_ids.shape[1], len(batch.cu_seqlens), len(batch.targets))


def grow(needed: Sizes, before: Sizes | None, chunk: int) -> Sizes:
    """Return sizes that fit this batch and all earlier ones, with headroom for trained positions, up to all tokens."""
    least = max(int(_HEADROOM * needed.num_trained), 1, 0 if before is None else before.num_trained)
    num_cu_seqlens = max(needed.num_cu_seqlens, 0 if before is None else before.num_cu_seqlens)
    # Full chunks of the loss, so that a position's logits do not depend on the headroom.
    return Sizes(needed.num_tokens, num_cu_seqlens, min(-(-least // chunk) * chunk, needed.num_tokens))


def pad_to(batch: PackedBatch, sizes: Sizes) -> PackedBatch:
    """Return the batch padded with empty documents and with trained positions whose target is ignored."""
    extra = sizes.num_cu_seqlens - len(batch.cu_seqlens)
    trained = sizes.num_trained - len(batch.targets)
    return replace(
        batch,
        cu_seqlens=functional.pad(batch.cu_seqlens, (0, extra), value=batch.input_ids.shape[1]),
        trained_positions=functional.pad(batch.trained_positions, (0, trained)),
        targets=functional.pad(batch.targets, (0, trained), value=_PADDING),
    )


def _tensors(batch: PackedBatch) -> tuple[Tensor, ...]:
    return (batch.input_ids, batch.position_ids, batch.cu_seqlens, batch.trained_positions, batch.targets)
