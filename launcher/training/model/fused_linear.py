"""One matmul for the trained linear layers that share an input: q_proj, k_proj and v_proj, or gate_proj and up_proj.

For full fine-tuning. Matmuls with few output features do not fill a GPU, least of all those of the weight gradients,
and without fusion the gradient of the input is a sum of several matmuls. The parameters stay separate: each pass copies
them, in the dtype of the matmul, into a temporary weight [out features of all layers, in features].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from launcher.plan.estimate.memory import SHARED_INPUTS
from launcher.training.model.fused_lora.reference import is_reference_forward
from launcher.training.model.shared_outputs import SharedOutputs


def _concat_weights(weights: list[Tensor], dtype: torch.dtype) -> Tensor:
    fused = weights[0].new_empty(sum(map(len, weights)), weights[0].shape[1], dtype=dtype)
    for weight, rows in zip(weights, fused.split([len(weight) for weight in weights]), strict=True):
        rows.copy_(weight)
    return fused


# Custom ops, because the compiler would keep the temporary weight from the forward to the backward pass.
@torch.library.custom_op("launcher::shared_input_linear", mutates_args=())
def _project(x: Tensor, weights: list[Tensor]) -> Tensor:
    return x @ _concat_weights(weights, x.dtype).t()


@_project.register_fake
def _(x: Tensor, weights: list[Tensor]) -> Tensor:
    return x.new_empty(len(x), sum(map(len, weights)))


@torch.library.custom_op("launcher::shared_input_linear_backward", mutates_args=())
def _project_backward(grad: Tensor, x: Tensor, weights: list[Tensor], needs_x_grad: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the concatenated weights."""
    x_grad = grad @ _concat_weights(weights, x.dtype) if needs_x_grad else x.new_empty(0)
    return x_grad, grad.t() @ x


@_project_backward.register_fake
def _(grad: Tensor, x: Tensor, _weights: list[Tensor], needs_x_grad: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x) if needs_x_grad else x.new_empty(0), x.new_empty(grad.shape[1], x.shape[1])


class _SharedInputMatmul(torch.autograd.Function):
    """Map x [tokens, in] to x W^T for each weight W [out, in]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        return _project(x, list(weights)).split([len(weight) for weight in weights], dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x_grad = ctx.needs_input_grad[0]
        x_grad, fused_grad = _project_backward(torch.cat(grads, dim=1), x, weights, needs_x_grad)
        weight_grads = fused_grad.split([len(weight) for weight in weights])
        cast = (grad.to(weight.dtype) for grad, weight in zip(weight_grads, weights, strict=True))
        return (x_grad if needs_x_grad else None, *cast)


@dataclass(eq=False)
class LinearGroup(SharedOutputs):
    """Layers with the same input."""

    members: list[Any]
    clones_last_output: bool  # saved for backward as a view, it would keep the other outputs alive

    def compute(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of all layers."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        with torch.autocast(device, enabled=False):
            weights = (member.weight for member in self.members)
            outputs = _SharedInputMatmul.apply(x.flatten(0, -2).to(dtype), *weights)
            if self.clones_last_output:
                outputs = (*outputs[:-1], outputs[-1].clone())
            biases = (member.bias for member in self.members)
            return tuple(
                out if bias is None else out + bias.to(dtype) for out, bias in zip(outputs, biases, strict=True)
            )


class FusedLinear(nn.Linear):
    """An nn.Linear that is computed together with the others of its group."""

    group: LinearGroup
    group_index: int

    def forward(self, x: Tensor) -> Tensor:
        """Return this layer's output."""
        if is_reference_forward():
            return super().forward(x)
        return self.group.fetch(self.group_index, x, self.group.compute, len(self.group.members))


def fuse_linear_layers(layers: list[nn.Module]) -> list[LinearGroup]:
    """Let trained nn.Linear layers that share an input run as one matmul; return the groups."""
    groups = []
    for layer in layers:
        for parent in layer.modules():
            for names in SHARED_INPUTS:
                members: list[Any] = [getattr(parent, name, None) for name in names]
                if all(type(member) is nn.Linear and member.weight.requires_grad for member in members):
                    # Values are saved for backward. So are queries and keys, if a norm follows.
                    clones_last = names[-1] == "v_proj" and not hasattr(parent, "q_norm")
                    groups.append(LinearGroup(members=members, clones_last_output=clones_last))
                    for index, member in enumerate(members):
                        member.__class__ = FusedLinear
                        member.group, member.group_index = groups[-1], index
    return groups
