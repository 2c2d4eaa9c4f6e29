"""Linear layers that are trained with FP8 matmuls (kernels/fp8_trained_ops.py).

Layers that share an input, such as q_proj, k_proj and v_proj, are one matmul. Their weights stay separate parameters in
their own dtype, for the optimizer, checkpoints and sharding; they are rounded to FP8 in each pass. Blocks of known
families go further, see fp8_blocks.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher.plan.estimate.memory.recipe import SHARED_INPUTS
from launcher.training.kernels.fp8 import is_storable, quantize_rows
from launcher.training.kernels.fp8_trained_ops import linear, linear_backward
from launcher.training.model.fused_lora.linear import is_clipped
from launcher.training.model.fused_lora.reference import is_reference_forward


class _Fp8Matmul(torch.autograd.Function):
    """Autograd function from x [tokens, in] and weights [out, in] to one output per weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        return linear(x, list(weights)).split([len(weight) for weight in weights], dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_input_grad = ctx.needs_input_grad[0]
        x_grad, weights_grad = linear_backward(list(grads), x, weights, needs_input_grad)
        return x_grad if needs_input_grad else None, *weights_grad.split([len(weight) for weight in weights])


@dataclass(eq=False)
class Fp8Group:
    """Layers that share an input, and their outputs until each layer has fetched its own."""

    members: list[TrainedFp8Linear]
    compute_dtype: torch.dtype
    clones_last_output: bool  # saved for backward as a view, it would keep the other outputs alive
    cached_input: Tensor | None = None
    cached_outputs: tuple[Tensor, ...] = ()
    num_fetched: int = 0

    @property
    def weights(self) -> list[Tensor]:
        """The weights of all members."""
        return [member.weight for member in self.members]

    def apply(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of all members for their common input."""
        with torch.autocast(x.device.type, enabled=False):
            flat = x.flatten(0, -2).to(self.compute_dtype)
            outputs: tuple[Tensor, ...] = _Fp8Matmul.apply(flat, *self.weights)
            if self.clones_last_output:
                outputs = (*outputs[:-1], outputs[-1].clone())
            return tuple(
                y if member.bias is None else y + member.bias.to(y.dtype)
                for y, member in zip(outputs, self.members, strict=True)
            )

    def clear_cache(self) -> None:
        """Drop the cached outputs, which would keep the activations of their forward pass alive."""
        self.cached_outputs, self.cached_input, self.num_fetched = (), None, 0


class _UnroundedForward:
    is_active = False


def computes_unrounded() -> bool:
    """Return whether trained FP8 layers compute without FP8."""
    return _UnroundedForward.is_active


@contextmanager
def use_unrounded_forward() -> Iterator[None]:
    """Compute without FP8 inside the context, as the exported model does: for evaluations."""
    was_active, _UnroundedForward.is_active = _UnroundedForward.is_active, True
    try:
        yield
    finally:
        _UnroundedForward.is_active = was_active


def _round_weight(weight: Tensor) -> Tensor:
    """Return the weight after rounding to FP8, whose gradient passes to the weight unchanged."""
    with torch.no_grad():
        exact = weight.float()  # a kernel must not get a tensor whose dtype verify/upcast.py disguises
        rows = quantize_rows(exact)
        difference = rows.codes.float() * rows.scales[:, None] - exact
    return weight + difference


class TrainedFp8Linear(nn.Linear):
    """A linear layer that computes the outputs of all layers with the same input together, in FP8.

    `use_fp8_linears` sets the `__class__` of a layer to this one: the module object, its parameters and their names
    stay, and one compiled graph serves all decoder layers. The reference forward has the same weights, rounded to FP8;
    evaluations have those of the exported model.
    """

    fp8_group: Fp8Group
    fp8_index: int

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # nn.Linear's name
        """Return this layer's output; the first call with an input caches the outputs of all layers that share it."""
        x = input
        if computes_unrounded():
            return functional.linear(x, self.weight, self.bias)
        if is_reference_forward():
            return functional.linear(x, _round_weight(self.weight), self.bias)
        group = self.fp8_group
        if len(group.members) == 1:
            return group.apply(x)[0].unflatten(0, x.shape[:-1])
        if group.cached_input is not x:
            group.cached_outputs, group.cached_input, group.num_fetched = group.apply(x), x, 0
        output = group.cached_outputs[self.fp8_index]
        group.num_fetched += 1
        if group.num_fetched == len(group.members):
            group.clear_cache()
        return output.unflatten(0, x.shape[:-1])


def use_fp8_linears(layers: list[nn.Module], compute_dtype: torch.dtype, *, compiled: bool) -> list[Fp8Group]:
    """Run the trained linear layers of decoder layers in FP8, where their sizes allow it; return the groups."""
    groups: list[Fp8Group] = []
    for layer in layers:
        for parent in list(layer.modules()):
            linears: dict[str, Any] = {
                name: child
                for name, child in parent.named_children()
                if _is_usable(child) and not is_clipped(parent, name)
            }
            for names in SHARED_INPUTS:
                members = [linears[name] for name in names if name in linears]
                if len(members) > 1:
                    # Values are saved for backward. So are queries and keys, if a compiled norm follows.
                    clones_last = names[-1] == "v_proj" and not (compiled and hasattr(parent, "q_norm"))
                    groups.append(Fp8Group(members, compute_dtype, clones_last))
                    linears = {name: child for name, child in linears.items() if name not in names}
            groups += [Fp8Group([child], compute_dtype, clones_last_output=False) for child in linears.values()]
    for group in groups:
        for index, member in enumerate(group.members):
            member.__class__ = TrainedFp8Linear
            member.fp8_group, member.fp8_index = group, index
    return groups


def _is_usable(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or not module.weight.requires_grad:
        return False
    return is_storable(module.in_features, module.out_features)
