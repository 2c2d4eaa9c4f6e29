"""LoRA linear layers whose adapter is part of the base's own matmul, for all layers that share an input.

PEFT multiplies an input by W, by A, by B, and adds: each output is written and read several times, and q_proj, k_proj
and v_proj each do so for the same input. Here the layers that share an input have one fused weight (weights.py), so
that their outputs, and the gradient of their input, are one matmul that is a few columns wider.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

from launcher.plan.estimate.memory.recipe import SHARED_INPUTS
from launcher.training.kernels.availability import supports_triton
from launcher.training.kernels.fp8 import fp8_input_grad, fp8_linear
from launcher.training.kernels.fused_layer_autograd import LoraBlockShape
from launcher.training.kernels.nf4 import StoredWeights, is_fp8, materialize
from launcher.training.model.fused_lora.dora import apply_magnitude
from launcher.training.model.fused_lora.reference import is_reference_forward
from launcher.training.model.fused_lora.weights import (
    ADAPTER_NAME,
    DoraNorms,
    FusedLoraWeights,
    LoraPart,
    PlainLinear,
    build_fused_weights,
    can_store,
    get_fusion_key,
    is_fusable,
    update_row_norms,
)


@torch.library.custom_op("launcher::matmul", mutates_args=())
def _opaque_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices, hidden from the compiler, which would turn matmul + sum into addmm and its extra copy."""
    return left @ right


@_opaque_matmul.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


class _FusedLoraMatmul(torch.autograd.Function):
    """Autograd function from x [tokens, in] to one output per matrix of a fused weight.

    It returns gradients for x, A and B, not for the weight. With dropout, `dropped` is dropout(x), the input of A.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dropped: Tensor | None, stored: StoredWeights, shape: LoraBlockShape, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        in_features, out_features = x.shape[1], sum(shape.out_features)
        lora_input = x if dropped is None else dropped
        if is_fp8(stored):
            codes, scales, _, scaled_b, lora_a = stored
            x_lora = lora_input @ lora_a.t()
            outputs = fp8_linear(x, codes, scales, x_lora, scaled_b)
        else:
            weight = materialize(stored)
            lora_a = weight[out_features:, :in_features]
            if out_features >= 2 * in_features and dropped is None:
                # A wider input costs less than outputs that are written, read and written again.
                x_ext = torch.cat((x, x @ lora_a.t()), dim=1)
                lora_input, x_lora = x_ext[:, :in_features], x_ext[:, in_features:]
                outputs = x_ext @ weight[:out_features].t()
            else:
                x_lora = lora_input @ lora_a.t()
                outputs = x @ weight[:out_features, :in_features].t()
                scaled_b = weight[:out_features, in_features:]
                is_compiled = torch.compiler.is_compiling()
                outputs = (
                    outputs + _opaque_matmul(x_lora, scaled_b.t())
                    if is_compiled
                    else torch.addmm(outputs, x_lora, scaled_b.t())
                )
        ctx.save_for_backward(lora_input, x_lora, *stored)
        ctx.shape, ctx.has_dropout = shape, dropped is not None
        ctx.dtypes = tuple(parameter.dtype for parameter in parameters)
        return outputs.split(list(shape.out_features), dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, x_lora, *stored = ctx.saved_tensors
        in_features, out_features, rank = x.shape[1], sum(ctx.shape.out_features), ctx.shape.rank
        if is_fp8(tuple(stored)):
            codes, scales, _, scaled_b, lora_a = stored
        else:
            codes, weight = None, materialize(tuple(stored), grads[0])
            scaled_b, lora_a = weight[:out_features, in_features:], weight[out_features:, :in_features]
        grads_lora, b_grads, row = [], [], 0
        for index, grad in enumerate(grads):
            ranks = slice(index * rank, (index + 1) * rank)
            grads_lora.append(grad @ scaled_b[row : row + grad.shape[1], ranks])
            b_grads.append((grad.t() @ x_lora[:, ranks]) * ctx.shape.lora_scale)
            row += grad.shape[1]
        num_padding = x_lora.shape[1] - rank * len(grads)
        padding = [grads[0].new_zeros(len(x), num_padding)] if num_padding else []
        grad_lora = torch.cat((*grads_lora, *padding), dim=1)
        x_grad: Tensor | None = None
        dropped_grad = grad_lora @ lora_a if ctx.has_dropout else None
        if not ctx.needs_input_grad[0]:
            pass
        elif codes is not None:
            grad_output = torch.cat(grads, dim=1) if len(grads) > 1 else grads[0].contiguous()
            lora = (None, None) if ctx.has_dropout else (grad_lora, lora_a)
            x_grad = fp8_input_grad(grad_output, codes, scales, *lora)
        elif ctx.has_dropout:
            x_grad = torch.cat(grads, dim=1) @ weight[:out_features, :in_features]
        else:
            x_grad = torch.cat((*grads, grad_lora), dim=1) @ weight[:, :in_features]
        a_grads = (grad_lora[:, : rank * len(grads)].t() @ x).split(rank, dim=0)
        lora_grads = [
            *(a_grads[index] for index in ctx.shape.adapted),
            *(b_grads[index] for index in ctx.shape.adapted),
        ]
        cast = (grad.to(dtype) for grad, dtype in zip(lora_grads, ctx.dtypes, strict=True))
        return (x_grad, dropped_grad, None, None, *cast)


class _BaseMatmul(torch.autograd.Function):
    """Autograd function from x [tokens, in] to x W^T, without the adapter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stored: StoredWeights, out_features: int) -> Tensor:
        ctx.save_for_backward(*stored)
        ctx.in_features = x.shape[1]
        if is_fp8(stored):
            return fp8_linear(x, stored[0], stored[1], None, None)
        return x @ materialize(stored)[:out_features, : x.shape[1]].t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        grad, stored = grads[0].contiguous(), ctx.saved_tensors
        if is_fp8(stored):
            return fp8_input_grad(grad, stored[0], stored[1], None, None), None, None
        return grad @ materialize(stored, grad)[: grad.shape[1], : ctx.in_features], None, None


def apply_fused_linear(weights: FusedLoraWeights, x: Tensor) -> tuple[Tensor, ...]:
    """Return the outputs of all linear layers of a fused weight for their common input x."""
    flat = x.flatten(0, -2).to(weights.dtype)
    dropped: Tensor | None = None
    if weights.dropout and weights.first_adapted.training:
        dropped = weights.first_adapted.lora_dropout[ADAPTER_NAME](flat)
    with torch.autocast(x.device.type, enabled=False):
        if weights.dora is None:
            outputs = _matmul(weights, flat, dropped)
        elif dropped is None:
            outputs = _apply_magnitudes(weights, _matmul(weights, flat, None), weights.dora)
        else:
            outputs = _apply_dora_with_dropout(weights, flat, dropped, weights.dora)
    if weights.clones_last_output:
        outputs = (*outputs[:-1], outputs[-1].clone())
    biases = (member.base_layer.bias for member in weights.members)
    return tuple(out if bias is None else out + bias for out, bias in zip(outputs, biases, strict=True))


def _matmul(weights: FusedLoraWeights, x: Tensor, dropped: Tensor | None) -> tuple[Tensor, ...]:
    outputs: tuple[Tensor, ...] = _FusedLoraMatmul.apply(
        x, dropped, weights.stored, weights.shape, *weights.lora_parameters()
    )
    return outputs


def _apply_magnitudes(
    weights: FusedLoraWeights,
    outputs: tuple[Tensor, ...],
    dora: DoraNorms,
    corrections: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, ...]:
    """Apply DoRA's magnitudes to the outputs of adapted layers; outputs of layers without an adapter are unchanged."""
    row_norms, scaled = dora.row_norms.split(list(weights.shape.out_features)), list(outputs)
    for index in weights.shape.adapted:
        correction = None if corrections is None else corrections[index]
        scaled[index] = apply_magnitude(outputs[index], weights.members[index], row_norms[index], correction)
    return tuple(scaled)


def _apply_dora_with_dropout(
    weights: FusedLoraWeights, x: Tensor, dropped: Tensor, dora: DoraNorms
) -> tuple[Tensor, ...]:
    """Apply DoRA whose dropout also affects the base output.

    PEFT computes W x + (c - 1) W d + c s B A d, with d = dropout(x) and c = m / ||W + s B A||. That equals
    W (x - d) + c (W + s B A) d: two matmuls, whose inputs sum to x.
    """
    corrections = _BaseMatmul.apply(x - dropped, weights.stored, weights.out_features)
    corrections = corrections.split(list(weights.shape.out_features), dim=1)
    return _apply_magnitudes(weights, _matmul(weights, dropped, None), dora, corrections)


class FusedLoraLinear(nn.Module):
    """Mixin for PEFT's LoRA layers that computes the outputs of all layers with the same input together.

    `fuse_lora_layers` sets the `__class__` of a PEFT layer to a subclass of (this mixin, its own class), and `unfuse`
    sets it back. The module object, its parameters and their names stay, so PEFT, state dicts and checkpoints see the
    layer they know; super().forward is PEFT's own forward. A class, rather than a replaced `forward` attribute, lets
    one compiled graph serve all decoder layers.
    """

    fused_weights: FusedLoraWeights
    fused_index: int

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return this layer's output; the first call with an input caches the outputs of all layers that share it."""
        lora: Any = self
        if is_reference_forward() or lora.disable_adapters or lora.merged or args or kwargs:
            result: Tensor = super().forward(x, *args, **kwargs)
            return result
        weights = self.fused_weights
        if weights.cached_input is not x:
            weights.cached_outputs, weights.cached_input, weights.num_fetched = apply_fused_linear(weights, x), x, 0
        output = weights.cached_outputs[self.fused_index]
        weights.num_fetched += 1
        if weights.num_fetched == len(weights.shape.adapted):
            weights.clear_cache()
        return output.unflatten(0, x.shape[:-1])


@cache
def _add_mixin(peft_class: Any) -> Any:
    return type(f"Fused{peft_class.__name__}", (FusedLoraLinear, peft_class), {})


@dataclass(eq=False)
class FusedLoraModel:
    """All fused weights of a model."""

    weights: list[FusedLoraWeights] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)
    _lora_copy: Any = None  # one Triton launch for all copies, where the device can

    @cached_property
    def _copies(self) -> list[LoraPart]:
        return [copy for weights in self.weights for copy in weights.list_copies()]

    def refresh(self, *, force: bool = False) -> None:
        """Copy A and B into the fused weights if they have changed since the last call."""
        copies = self._copies
        versions = [copy.source._version for copy in copies]
        if versions == self._versions and not force:
            return
        device = copies[0].source.device if copies else torch.device("cpu")
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            if supports_triton(device) and len({copy.source.dtype for copy in copies}) == 1:
                self._copy_with_triton(copies)
            else:
                for source, target, scale, divisors in copies:
                    target.copy_(source * scale if divisors is None else source * scale / divisors[:, None])
            for weights in self.weights:
                if weights.dora is not None:
                    update_row_norms(weights, weights.dora)
        self._versions = versions

    def _copy_with_triton(self, copies: list[LoraPart]) -> None:
        from launcher.training.kernels.fused_lora_triton import LoraCopy

        if self._lora_copy is None or self._lora_copy.addresses != [copy.source.data_ptr() for copy in copies]:
            self._lora_copy = LoraCopy(copies)
        self._lora_copy()


def unfuse(model: FusedLoraModel) -> None:
    """Give every layer PEFT's own class again. Base weights remain views of the fused weights."""
    for weights in model.weights:
        for member in weights.adapted_members:
            member.__class__ = type(member).__bases__[1]
            del member.fused_weights, member.fused_index
        weights.clear_cache()
    model.weights.clear()
    model.__dict__.pop("_copies", None)
    model._versions, model._lora_copy = [], None


def fuse_lora_layers(
    layers: list[nn.Module],
    dtype: torch.dtype,
    *,
    compiled: bool = False,
    include_plain: Collection[nn.Module] = (),
    in_fp8: bool = False,
) -> FusedLoraModel:
    """Build fused weights for all LoRA and DoRA layers that can be fused; the other layers keep PEFT's forward.

    `include_plain` are parent modules; in them, a layer without an adapter joins the fused weight of the adapted layers
    that have the same input. `in_fp8` stores the base's weights in FP8.
    """
    model = FusedLoraModel()
    for layer in layers:
        for parent in list(layer.modules()):
            members: dict[str, Any] = {
                name: child
                for name, child in parent.named_children()
                if is_fusable(child, dtype) and not is_clipped(parent, name)
            }
            for names in SHARED_INPUTS:
                group = _select_group(parent, names, members, dtype, with_plain=parent in include_plain)
                if len(group) > 1:
                    # Values are saved for backward. So are queries and keys, if a compiled norm follows.
                    clones_last = names[-1] == "v_proj" and not (compiled and hasattr(parent, "q_norm"))
                    model.weights.append(_fuse(group, clones_last_output=clones_last, in_fp8=in_fp8))
                    members = {name: member for name, member in members.items() if name not in names}
            model.weights += [_fuse([member], in_fp8=in_fp8) for member in members.values()]
    return model


def is_clipped(parent: Any, name: str) -> bool:
    """Return whether OLMo's clip_qkv clips this layer's output in place, which autograd forbids on views."""
    is_clipping = getattr(getattr(parent, "config", None), "clip_qkv", None) is not None
    return is_clipping and name in ("q_proj", "k_proj", "v_proj")


def _select_group(
    parent: Any, names: tuple[str, ...], fusable: dict[str, Any], dtype: torch.dtype, *, with_plain: bool
) -> list[Any]:
    """Return the layers among `names` that can share a fused weight; empty if none is adapted or they differ."""
    adapted = [fusable[name] for name in names if name in fusable]
    if len({get_fusion_key(member) for member in adapted}) != 1:
        return []
    if not with_plain:
        return adapted
    base_class = type(adapted[0].base_layer)
    others = [getattr(parent, name) for name in names if name not in fusable]
    can_join = all(
        type(other) is base_class and can_store(other, dtype) and not other.weight.requires_grad for other in others
    )
    return [fusable.get(name) or PlainLinear(getattr(parent, name)) for name in names] if can_join else adapted


def _fuse(members: list[Any], *, clones_last_output: bool = False, in_fp8: bool) -> FusedLoraWeights:
    weights = build_fused_weights(members, clones_last_output=clones_last_output, in_fp8=in_fp8)
    for index in weights.shape.adapted:
        member = members[index]
        member.__class__ = _add_mixin(member.__class__)
        member.fused_weights, member.fused_index = weights, index
    return weights
