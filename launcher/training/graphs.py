"""A whole micro-step as one CUDA graph: nothing waits for the host, however small the micro-batch.

The forward and backward pass are recorded once and then replayed. What a replay reads lies at fixed addresses: batches
are copied there, gradients are added up there. The memory of a graph stays its own, so there is never more than one:
its sizes grow to the largest batch met, and smaller ones are filled up to them with what counts nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher.errors import first_line, say
from launcher.memory import count_loss_chunk
from launcher.training.batches import PackedBatch

_PADDING = -1  # a target that counts nothing
_SPARE = 1.1  # trained positions that there is room for, to those of the batch that is recorded
_SMALL_BYTES = 512 * 2**20  # gradients that may lie in memory twice

# (batch, how many tokens the step trains) -> its share of the loss; gradients are added up
MicroStep = Callable[[PackedBatch, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Sizes:
    num_tokens: int
    num_borders: int
    num_trained: int

    def hold(self, other: Sizes) -> bool:
        """Tokens are never filled up: a micro-batch of packed sequences always has as many."""
        fits = other.num_borders <= self.num_borders and other.num_trained <= self.num_trained
        return fits and other.num_tokens == self.num_tokens


@dataclass(frozen=True, kw_only=True)
class _Recorded:
    sizes: Sizes
    graph: torch.cuda.CUDAGraph
    batch: PackedBatch
    num_trained: Tensor
    loss: Tensor


class GraphedMicroSteps:
    def __init__(self, micro_step: MicroStep, parameters: list[nn.Parameter], vocab_size: int) -> None:
        self._micro_step = micro_step
        self._parameters = parameters
        self._chunk = count_loss_chunk(vocab_size)
        self._recorded: _Recorded | None = None
        self._grads: dict[int, Tensor] = {}
        self._gave_up = False
        self.held_bytes = 0  # that replays use, unseen by torch's counters

    def __call__(self, batch: PackedBatch, num_trained: int) -> Tensor:
        self._keep_gradients()
        recorded = self._find(batch, num_trained)
        if recorded is None:
            return self._micro_step(batch, torch.full((), float(num_trained), device=batch.input_ids.device))
        for ours, given in zip(_tensors(recorded.batch), _tensors(fill_up(batch, recorded.sizes)), strict=True):
            ours.copy_(given, non_blocking=True)
        recorded.num_trained.fill_(num_trained)
        recorded.graph.replay()
        return recorded.loss.clone()  # the next replay writes over it

    def _find(self, batch: PackedBatch, num_trained: int) -> _Recorded | None:
        if self._gave_up:
            return None
        needed = measure(batch)
        if self._recorded is None or not self._recorded.sizes.hold(needed):
            sizes = grow(needed, None if self._recorded is None else self._recorded.sizes, self._chunk)
            self._release()
            try:
                self._recorded = self._record(fill_up(batch, sizes), num_trained, sizes)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a kernel that cannot be recorded raises whatever it likes
                self._give_up(error)
        return self._recorded

    @property
    def is_active(self) -> bool:
        return not self._gave_up

    def _give_up(self, error: Exception) -> None:
        self._gave_up = True
        say(f"no CUDA graph, kernels are launched one by one: {first_line(error)}")

    def _release(self) -> None:
        """Its memory first: the next one needs as much before it is recorded."""
        if self._recorded is not None:
            self._recorded.graph.reset()
            self._recorded, self.held_bytes = None, 0
            gc.collect()
            torch.cuda.empty_cache()

    def _keep_gradients(self) -> None:
        """At their addresses for good: graphs add to them. Whoever takes one away means zero."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None and parameter.grad is self._grads.get(index):
                continue
            if index in self._grads:
                self._grads[index].zero_()
            else:
                self._grads[index] = torch.zeros_like(parameter)
            parameter.grad = self._grads[index]

    def _record(self, batch: PackedBatch, num_trained: int, sizes: Sizes) -> _Recorded:
        """Gradients are as they were afterwards: recording computes nothing, and its warm-up is taken back."""
        device = batch.input_ids.device
        ours = batch.map(torch.clone)
        count = torch.full((), float(num_trained), device=device)
        stream, outside = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(outside)
        try:
            with torch.cuda.stream(stream), torch.random.fork_rng(devices=[device]):
                for parameter in self._parameters:
                    parameter.grad = None
                # These make kernels, handles and workspaces, which a recording must not.
                self._micro_step(ours, count)
                made = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
                torch._foreach_add_(made[:1], made[:1])
            outside.wait_stream(stream)
            self._put_gradients_back()
            graph = torch.cuda.CUDAGraph()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            # Other threads pin memory meanwhile, which a recording for all threads would forbid them.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                loss = self._add_up(ours, count)
        finally:  # a recording that fails may leave its own stream behind
            torch.cuda.set_stream(outside)
            self._put_gradients_back()
        self.held_bytes = torch.cuda.max_memory_allocated(device) - before
        return _Recorded(sizes=sizes, graph=graph, batch=ours, num_trained=count, loss=loss)

    def _add_up(self, batch: PackedBatch, num_trained: Tensor) -> Tensor:
        """Autograd adds gradients one by one as they come. Hundreds of small ones are made apart and added at once."""
        kept = [self._grads[index] for index in range(len(self._parameters))]
        if sum(grad.nbytes for grad in kept) > _SMALL_BYTES:
            return self._micro_step(batch, num_trained)
        for parameter in self._parameters:
            parameter.grad = None
        loss = self._micro_step(batch, num_trained)
        made = [(total, one.grad) for total, one in zip(kept, self._parameters, strict=True) if one.grad is not None]
        if made:
            torch._foreach_add_(*map(list, zip(*made, strict=True)))
        self._put_gradients_back()
        return loss

    def _put_gradients_back(self) -> None:
        for index, parameter in enumerate(self._parameters):
            parameter.grad = self._grads[index]


def measure(batch: PackedBatch) -> Sizes:
    return Sizes(batch.input_ids.shape[1], len(batch.cu_seqlens), len(batch.targets))


def grow(needed: Sizes, before: Sizes | None, chunk: int) -> Sizes:
    """Room for a batch, for those before it, and for some that have a little more; never for more than all tokens."""
    least = max(int(_SPARE * needed.num_trained), 1, 0 if before is None else before.num_trained)
    borders = max(needed.num_borders, 0 if before is None else before.num_borders)
    # Whole chunks of the loss: what a position's logits are then does not depend on how much room there is.
    return Sizes(needed.num_tokens, borders, min(-(-least // chunk) * chunk, needed.num_tokens))


def fill_up(batch: PackedBatch, sizes: Sizes) -> PackedBatch:
    """Empty documents behind the last one, and trained positions whose target counts nothing."""
    borders = sizes.num_borders - len(batch.cu_seqlens)
    trained = sizes.num_trained - len(batch.targets)
    return replace(
        batch,
        cu_seqlens=functional.pad(batch.cu_seqlens, (0, borders), value=batch.input_ids.shape[1]),
        trained_positions=functional.pad(batch.trained_positions, (0, trained)),
        targets=functional.pad(batch.targets, (0, trained), value=_PADDING),
    )


def _tensors(batch: PackedBatch) -> tuple[Tensor, ...]:
    return (batch.input_ids, batch.position_ids, batch.cu_seqlens, batch.trained_positions, batch.targets)
