"""The same passes as layer_kernels.py and row_kernels.py in plain torch, for devices without Triton; and the choice
between the two."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from launcher.training.dropping import Dropping, find_factors
from launcher.training.kernels import kernels_run_on

Norms = tuple[Tensor, Tensor]  # of queries and of keys
Rests = tuple[Tensor, Tensor]  # what is added to the scaled states, and room for its gradient


def keeps_states(scales: Tensor | None, norms: Norms | None) -> bool:
    """For the way back: a mere rotation is undone without what was rotated."""
    return scales is not None or norms is not None


def copies_values(scales: Tensor | None, norms: Norms | None) -> bool:
    """Scaled, they are others; and a piece of the states would keep all of them."""
    return scales is not None or not keeps_states(scales, norms)


def turn(
    states: Tensor,
    scales: Tensor | None,
    norms: Norms | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    rest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """states [tokens, queries + keys + values] -> queries and keys behind norm and rotation, [tokens, heads, size].

    Values too, where they would not do as a piece of the states.
    """
    num_tokens, size = len(states), cos.shape[1]
    query = states.new_empty(num_tokens, num_heads, size)
    key = states.new_empty(num_tokens, num_kv_heads, size)
    value = torch.empty_like(key) if copies_values(scales, norms) else None
    if kernels_run_on(states.device):
        from launcher.training import layer_kernels

        layer_kernels.turn(states, scales, norms, cos, sin, eps, (query, key, value), rest)
        return query, key, value
    heads = _heads(states, scales, rest, size)
    query.copy_(_turn(heads[:, :num_heads], norms and norms[0], cos, sin, eps))
    key.copy_(_turn(heads[:, num_heads : num_heads + num_kv_heads], norms and norms[1], cos, sin, eps))
    if value is not None:
        value.copy_(heads[:, num_heads + num_kv_heads :])
    return query, key, value


def turn_back(
    grads: tuple[Tensor, Tensor, Tensor],
    states: Tensor,
    scales: Tensor | None,
    norms: Norms | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    wide: Tensor,
    rests: Rests | None = None,
) -> Tensor | None:
    """Gradients of queries, keys and values -> of the states, into the first columns of `wide`; and of the scales."""
    if kernels_run_on(wide.device):
        from launcher.training import layer_kernels

        return layer_kernels.turn_back(grads, states, scales, norms, cos, sin, eps, wide, rests)
    query_grad, key_grad, value_grad = (grad.float() for grad in grads)
    num_heads, num_kv_heads = query_grad.shape[1], key_grad.shape[1]
    query_grad, key_grad = (_turn(grad, None, cos, -sin, eps) for grad in (query_grad, key_grad))
    if norms is not None:
        heads = _heads(states, scales, None if rests is None else rests[0], cos.shape[1])
        query_grad = norm_back(query_grad, heads[:, :num_heads], norms[0], eps)
        key_grad = norm_back(key_grad, heads[:, num_heads : num_heads + num_kv_heads], norms[1], eps)
    grad = torch.cat((query_grad, key_grad, value_grad), dim=1).flatten(1)
    if rests is not None:
        rests[1].copy_(grad)
    wide[:, : grad.shape[1]].copy_(_scaled(grad, scales))
    return None if scales is None else (grad * states.float()).sum(0)


def norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Into the first columns of `out`."""
    if kernels_run_on(out.device):
        from launcher.training import row_kernels

        row_kernels.norm(x, weight, eps, out)
        return
    wide = x.float()
    out[:, : x.shape[1]].copy_(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float())


def norm_and_drop(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    side: Tensor,
    dropping: Dropping,
    *,
    splits: bool,
    whole: Tensor | None = None,
) -> None:
    """What the norm makes of x into the first columns of `out`, and behind dropout into `side`. Split, behind dropout
    into `out`, what that lacks into `side`, and where it is wanted the `whole`."""
    if kernels_run_on(out.device):
        from launcher.training import row_kernels

        row_kernels.norm(x, weight, eps, out, dropping, side, whole, splits)
        return
    norm(x, weight, eps, out)
    given = out[:, : x.shape[1]]
    if whole is not None:
        whole.copy_(given)
    drop(given, out if splits else side, dropping, side if splits else None)


def drop(x: Tensor, out: Tensor, dropping: Dropping, rest: Tensor | None = None) -> None:
    """What stays of x into the first columns of `out`, which may be x; what it lacks into `rest`."""
    if kernels_run_on(out.device):
        from launcher.training import row_kernels

        row_kernels.drop(x, out, dropping, rest)
        return
    dropped = x.float() * find_factors(x.shape, dropping)
    if rest is not None:
        rest.copy_(x.float() - dropped)
    out[:, : x.shape[1]].copy_(dropped)


def mix(grad: Tensor, dropped_grad: Tensor, dropping: Dropping, *, splits: bool = False) -> None:
    """The gradient of what was dropped from, into `grad`: that of itself, or, split, of what `drop` set aside."""
    if kernels_run_on(grad.device):
        from launcher.training import row_kernels

        row_kernels.mix(grad, dropped_grad, dropping, splits=splits)
        return
    straight, dropped = grad.float(), dropped_grad.float()
    factors = find_factors(grad.shape, dropping)
    grad.copy_(straight + (dropped - straight if splits else dropped) * factors)


def pass_norm(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The gradient of x. Plain torch where it is compiled: the compiler joins it with the sum that follows."""
    if not torch.compiler.is_compiling() and kernels_run_on(x.device):
        from launcher.training import row_kernels

        found = torch.empty_like(x)
        row_kernels.norm_back(grad, x.contiguous(), weight, eps, found)
        return found
    return norm_back(grad.float(), x.float(), weight, eps).to(x.dtype)


def copy(x: Tensor, out: Tensor) -> None:
    """Into the first columns of `out`."""
    if kernels_run_on(out.device):
        from launcher.training import row_kernels

        row_kernels.copy(x, out)
        return
    out[:, : x.shape[1]].copy_(x)


def gate(states: Tensor, scales: Tensor | None, out: Tensor, rest: Tensor | None = None) -> None:
    """states [tokens, gates + ups] -> SiLU of the gates times the ups, into the first columns of `out`.

    What is added to the scaled states may be for the ups alone.
    """
    if kernels_run_on(out.device):
        from launcher.training import layer_kernels

        layer_kernels.gate(states, scales, out, rest)
        return
    out[:, : states.shape[1] // 2].copy_(_gate(_scaled(states, scales, rest)))


def gate_back(
    grad: Tensor, states: Tensor, scales: Tensor | None, wide: Tensor, rests: Rests | None = None
) -> Tensor | None:
    """The states' gradient goes into `wide`, what the gate let through into `grad`. That of the scales is returned."""
    if kernels_run_on(wide.device):
        from launcher.training import layer_kernels

        return layer_kernels.gate_back(grad, states, scales, wide, rests)
    gates, ups = _scaled(states, scales, None if rests is None else rests[0]).chunk(2, dim=1)
    delta, sigmoid = grad.float(), torch.sigmoid(gates)
    through = gates * sigmoid
    found = torch.cat((delta * ups * (sigmoid + through * (1 - sigmoid)), delta * through), dim=1)
    if rests is not None:
        rests[1].copy_(found[:, -rests[1].shape[1] :])
    wide[:, : states.shape[1]].copy_(_scaled(found, scales))
    grad.copy_(through * ups)
    return None if scales is None else (found * states.float()).sum(0)


def scale(y: Tensor, scales: Tensor, rest: Tensor | None, out: Tensor) -> None:
    """Every column of y by its own number, and the rest behind that."""
    if kernels_run_on(out.device):
        from launcher.training import row_kernels

        row_kernels.scale(y, scales, rest, out)
        return
    scaled = y.to(widened(y.dtype)) * scales
    out.copy_(scaled if rest is None else scaled + rest)


def scale_back(grad: Tensor, y: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """The gradient of y goes into `out`; that of the scales is returned."""
    if kernels_run_on(out.device):
        from launcher.training import row_kernels

        return row_kernels.scale_back(grad, y, scales, out)
    given = grad.to(widened(grad.dtype))
    out.copy_(given * scales)
    return (given * y).sum(0)


def widened(dtype: torch.dtype) -> torch.dtype:
    """What gradients of 16-bit products are added up in."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def take_apart(downs: Tensor, ups: Tensor, sizes: list[int], scale: float, rank: int) -> tuple[Tensor, Tensor]:
    """A block's gradients -> of each A, one below the other, and so of each B: those lie on the diagonal of `ups`."""
    count, dtype = rank * len(sizes), widened(downs.dtype)
    of_downs = downs.new_empty(count, downs.shape[1], dtype=dtype)
    of_ups = ups.new_empty(len(ups), rank, dtype=dtype)
    if kernels_run_on(downs.device):
        from launcher.training import block_kernels

        block_kernels.take_apart(downs, ups, sizes, scale, of_downs, of_ups)
        return of_downs, of_ups
    of_downs.copy_(downs[:count])
    rows = ups.split(sizes)
    torch.cat([one[:, index * rank : (index + 1) * rank].to(dtype) for index, one in enumerate(rows)], out=of_ups)
    return of_downs, of_ups.mul_(scale)


def _heads(states: Tensor, scales: Tensor | None, rest: Tensor | None, size: int) -> Tensor:
    return _scaled(states, scales, rest).unflatten(1, (-1, size))


def _scaled(states: Tensor, scales: Tensor | None, rest: Tensor | None = None) -> Tensor:
    """The rest may be that of the last columns alone."""
    found = states.float() if scales is None else states.float() * scales
    if rest is not None:
        found = torch.cat((found[:, : -rest.shape[1]], found[:, -rest.shape[1] :] + rest.float()), dim=1)
    return found


def _turn(heads: Tensor, norm: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    if norm is not None:
        heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * norm.float()
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return heads * cos.float()[:, None] + turned * sin.float()[:, None]


def _gate(states: Tensor) -> Tensor:
    gates, ups = states.chunk(2, dim=1)
    return functional.silu(gates) * ups


def norm_back(grad: Tensor, values: Tensor, norm: Tensor, eps: float) -> Tensor:
    """Of an RMS norm, in FP32."""
    inverse = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    straight, grad = values * inverse, grad * norm.float()
    return inverse * (grad - straight * (grad * straight).mean(-1, keepdim=True))
