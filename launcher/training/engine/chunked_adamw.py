"""AdamW for full fine-tuning in little memory: BF16 weights, 8-bit moments, moments in CPU memory, updates in backward.

Each tensor is updated in chunks, in FP32. BF16 weights are written back with stochastic rounding, without FP32 master
weights. Moments are FP32 or, by the kernels of bitsandbytes, 8-bit; they can be kept in pinned CPU memory, from which
each chunk is copied to the device and back ("paged" in the names of optimizers). Only one chunk at a time needs
temporary memory.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from launcher.core.choices import UPDATE_CHUNK
from launcher.core.errors import RunFailedError
from launcher.core.units import format_gib
from launcher.training.kernels.stochastic_rounding import make_rounding_key, round_stochastically

_BLOCK_SIZE = 256  # elements that share a quantization scale
_MIN_QUANTIZED = 4096  # elements; smaller tensors have FP32 moments, as in bitsandbytes
_MIN_ON_HOST = 100_000  # elements; smaller tensors have their moments on the device, as in bitsandbytes
_MOMENTS = ("state1", "state2")  # bitsandbytes' names
_SCALES = ("absmax1", "absmax2")


class ChunkedAdamW(Optimizer):
    """AdamW that updates one tensor after the other, in chunks."""

    found_inf: Tensor | None = None  # set for one step: whether it is skipped, as in torch's fused optimizers

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        seed: int,
        bits: int = 32,
        on_host: bool = False,
        full_precision: Sequence[nn.Parameter] = (),
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.seed, self.bits, self.on_host = seed, bits, on_host
        self.full_precision = {id(weight) for weight in full_precision}  # tensors whose moments are never quantized
        pairs = [(weight, group) for group in self.param_groups for weight in group["params"]]
        self._places = {id(weight): (index, group) for index, (weight, group) in enumerate(pairs)}
        self._codes: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    is_skipped = torch.zeros((), device=weight.device) if self.found_inf is None else self.found_inf
                    self.update(weight, is_skipped)
        return None

    @torch.no_grad()
    def update(self, weight: nn.Parameter, is_skipped: Tensor) -> None:
        """Update one weight by its gradient, unless `is_skipped` is true, a tensor that is not copied to the CPU."""
        assert weight.grad is not None
        state = self.state[weight] or self._create_state(weight)
        state["step"] += 1
        index, group = self._places[id(weight)]
        key = make_rounding_key(self.seed, state["step"], index)
        flat, grad = weight.detach().view(-1), weight.grad.reshape(-1)
        for start in range(0, flat.numel(), UPDATE_CHUNK):
            chunk = slice(start, start + UPDATE_CHUNK)
            old = flat[chunk]
            new = old.to(torch.float32, copy=True)
            with _changed(_slice_state(state, start), weight.device, is_skipped) as moments:
                if state["state1"].dtype == torch.uint8:
                    self._run_8bit(new, grad[chunk].float(), moments, group, state["step"])
                else:
                    _run_fp32(new, grad[chunk].float(), moments, group, state["step"])
            if old.dtype == torch.bfloat16:
                new = round_stochastically(new, key, start)
            old.copy_(torch.where(is_skipped.bool(), old, new))

    def _run_8bit(
        self, weight: Tensor, grad: Tensor, moments: dict[str, Tensor], group: dict[str, Any], step: int
    ) -> None:
        from bitsandbytes import functional

        if self._codes is None:
            maps = functional.create_dynamic_map(signed=True), functional.create_dynamic_map(signed=False)
            self._codes = maps[0].to(weight.device), maps[1].to(weight.device)
        functional.optimizer_update_8bit_blockwise(
            "adam",
            grad,
            weight,
            moments["state1"],
            moments["state2"],
            *group["betas"],
            0.0,
            0.0,
            group["eps"],
            step,
            float(group["lr"]),
            *self._codes,
            moments["absmax1"],
            moments["absmax2"],
            group["weight_decay"],
        )

    def _create_state(self, weight: nn.Parameter) -> dict[str, Any]:
        numel = weight.numel()
        is_quantized = self.bits == 8 and numel >= _MIN_QUANTIZED and id(weight) not in self.full_precision
        dtype = torch.uint8 if is_quantized else torch.float32
        state: dict[str, Any] = {"step": 0}
        for name in _MOMENTS:
            state[name] = self._allocate(weight, dtype)
        for name in _SCALES if is_quantized else ():
            state[name] = torch.zeros(ceil(numel / _BLOCK_SIZE), device=weight.device)
        self.state[weight] = state
        return state

    def _allocate(self, weight: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """Return a moment of zeros: in pinned CPU memory if `on_host` and the weight is large, else on its device."""
        if self.on_host and weight.is_cuda and weight.numel() >= _MIN_ON_HOST:
            return _allocate_pinned(weight.numel() * dtype.itemsize).view(dtype)
        return torch.zeros(weight.numel(), dtype=dtype, device=weight.device)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states as they are; torch's own method would cast them to the dtype of the weights."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for index, saved in state_dict["state"].items():
            state = self._create_state(weights[index])
            for name, value in saved.items():
                if isinstance(value, Tensor):
                    state[name].copy_(value)
                else:
                    state[name] = int(value)


def _run_fp32(weight: Tensor, grad: Tensor, moments: dict[str, Tensor], group: dict[str, Any], step: int) -> None:
    """Update one chunk with FP32 moments, in the order of torch's AdamW."""
    (beta1, beta2), lr = group["betas"], float(group["lr"])
    exp_avg, exp_avg_sq = moments["state1"], moments["state2"]
    weight.mul_(1 - lr * group["weight_decay"])
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = (exp_avg_sq.sqrt() / sqrt(1 - beta2**step)).add_(group["eps"])
    weight.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))


def _slice_state(state: dict[str, Any], start: int) -> dict[str, Tensor]:
    """Return views of a chunk's moments and scales."""
    views = {name: state[name][start : start + UPDATE_CHUNK] for name in _MOMENTS}
    first, count = start // _BLOCK_SIZE, UPDATE_CHUNK // _BLOCK_SIZE
    return views | {name: state[name][first : first + count] for name in _SCALES if name in state}


@contextmanager
def _changed(stored: dict[str, Tensor], device: torch.device, is_skipped: Tensor) -> Iterator[dict[str, Tensor]]:
    """Yield copies of `stored` on the device; after the context, write them back unless the step is skipped."""
    before = {name: tensor.to(device, non_blocking=True) for name, tensor in stored.items()}
    after = {name: tensor.clone() for name, tensor in before.items()}
    yield after
    for name, tensor in stored.items():
        tensor.copy_(torch.where(is_skipped.bool(), before[name], after[name]), non_blocking=True)


def _allocate_pinned(num_bytes: int) -> Tensor:
    """Return pinned CPU memory, zeroed. torch's own allocator would round its size up to a power of two."""
    memory = mmap.mmap(-1, num_bytes)  # shared: a fork by the data loader must not make private copies of its pages
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    if error := int(cudart.cudaHostRegister(tensor.data_ptr(), num_bytes, 0)):
        raise RunFailedError(
            f"{format_gib(num_bytes)} of CPU memory cannot be pinned for the optimizer's moments (CUDA error {error})",
            hint="free CPU memory, or keep the moments on the GPU by --set training.config.optim=adamw_bnb_8bit",
        )
    weakref.finalize(memory, cudart.cudaHostUnregister, tensor.data_ptr()).atexit = False
    return tensor


class OptimizerInBackward:
    """Updates each weight within the backward pass, as soon as its gradient is complete, and frees the gradient.

    A step whose loss is non-finite changes nothing. A weight whose gradient is non-finite is not changed; weights that
    were updated before it stay updated.
    """

    def __init__(self, optimizer: ChunkedAdamW) -> None:
        self.optimizer = optimizer
        self._is_active = False
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.register_post_accumulate_grad_hook(self._update)

    @contextmanager
    def enabled(self, loss: Tensor) -> Iterator[None]:
        """Update weights in the backward pass of `loss`. Outside of this context, gradients are only freed."""
        self._is_skipped = ~torch.isfinite(loss.detach())
        self._sum_of_squares = torch.zeros((), device=loss.device)
        self._is_active = True
        try:
            yield
        finally:
            self._is_active = False

    @property
    def grad_norm(self) -> Tensor:
        """The norm of all gradients of the last step."""
        return self._sum_of_squares.sqrt()

    def _update(self, weight: nn.Parameter) -> None:
        assert weight.grad is not None
        if self._is_active:
            squares = torch.linalg.vector_norm(weight.grad, dtype=torch.float32).square()
            self._sum_of_squares += squares
            self.optimizer.update(weight, self._is_skipped | ~torch.isfinite(squares))
        weight.grad = None
