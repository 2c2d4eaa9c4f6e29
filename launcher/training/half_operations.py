"""A half of a decoder layer, forward and backward, as operations that torch.compile passes on whole.

Norm, products and what lies between them: each writes straight into the tensor that the next product reads, LoRA's
columns beside it, and what can be computed again is not kept. Blocks are those of products.py; halves.py has autograd.

Behind LoRA's dropout an input x is d. LoRA: y = [x, dA'] [W, sB]'. DoRA drops from what the base does, too:
y = c [d, dA'] [W, sB]' + (x - d) W', the second product being the `rest`. What was dropped is found again by its seed.
A matrix without an adapter has no rest: it multiplies x.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from launcher.training.dropping import Dropping
from launcher.training.layer_passes import (
    Rests,
    copies_values,
    copy,
    drop,
    gate,
    gate_back,
    keeps_states,
    mix,
    norm,
    norm_and_drop,
    take_apart,
    turn,
    turn_back,
    widened,
)


def _pair(query_norm: Tensor | None, key_norm: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if query_norm is None or key_norm is None else (query_norm, key_norm)


def _dropping(seeds: Tensor | None, index: int, rate: float) -> Dropping | None:
    return None if seeds is None else Dropping(seeds[index : index + 1], rate)


def _multiply(
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    matrix: Tensor,
    dropping: Dropping | None,
    splits: bool,
    num_bare: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """x is what a norm makes of the residual stream: [x, dA'], its product with [W, sB]', and the rest.

    The first `num_bare` rows have no adapter, which matters only where DoRA drops.
    """
    num_in = residual.shape[1]
    num_out = len(matrix) - (matrix.shape[1] - num_in)
    wide = matrix.new_empty(len(residual), matrix.shape[1])
    x, downs = wide[:, :num_in], matrix[num_out:, :num_in].t()
    if dropping is None:
        norm(residual, norm_weight, eps, wide)
        torch.mm(x, downs, out=wide[:, num_in:])
        return wide, wide @ matrix[:num_out].t(), wide.new_empty(0)
    side = matrix.new_empty(len(residual), num_in)
    whole = torch.empty_like(side) if num_bare else None
    norm_and_drop(residual, norm_weight, eps, wide, side, dropping, splits=splits, whole=whole)
    torch.mm(x if splits else side, downs, out=wide[:, num_in:])
    rest = side @ matrix[num_bare:num_out, :num_in].t() if splits else wide.new_empty(0)
    if whole is None:
        return wide, wide @ matrix[:num_out].t(), rest
    states = matrix.new_empty(len(residual), num_out)
    torch.mm(whole, matrix[:num_bare, :num_in].t(), out=states[:, :num_bare])
    torch.mm(wide, matrix[num_bare:num_out].t(), out=states[:, num_bare:])
    return wide, states, rest


def _go_back(
    grad: Tensor,
    wide: Tensor,
    matrix: Tensor,
    num_in: int,
    dropping: Dropping | None,
    rest_grad: Tensor | None,
    wants_input: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """grad = [dy, room for dy sB]. Gradients of x, of all A, and of all B: those lie on the diagonal of the last.

    Off it B is zero: dy is read once for all matrices, not once for each.
    """
    if dropping is not None and rest_grad is not None:
        return _go_back_twice(grad, wide, matrix, num_in, dropping, rest_grad, wants_input)
    num_out = grad.shape[1] - (wide.shape[1] - num_in)
    given, narrow, x = grad[:, :num_out], grad[:, num_out:], wide[:, :num_in]
    x_grad = grad.new_empty(0)
    torch.mm(given, matrix[:num_out, num_in:], out=narrow)
    ups = given.t() @ wide[:, num_in:]
    if dropping is None:
        if wants_input:
            x_grad = grad @ matrix[:, :num_in]
        return x_grad, narrow.t() @ x, ups
    dropped = torch.empty_like(x, memory_format=torch.contiguous_format)
    drop(x, dropped, dropping)
    downs = narrow.t() @ dropped
    if wants_input:
        x_grad = given @ matrix[:num_out, :num_in]
        mix(x_grad, torch.mm(narrow, matrix[num_out:, :num_in], out=dropped), dropping)
    return x_grad, downs, ups


def _go_back_twice(
    grad: Tensor, wide: Tensor, matrix: Tensor, num_in: int, dropping: Dropping, rest_grad: Tensor, wants_input: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Where DoRA drops: a product for what was left, and one for the rest, which bare rows have no part in."""
    num_out = grad.shape[1] - (wide.shape[1] - num_in)
    num_bare = num_out - rest_grad.shape[1]
    given, narrow = grad[:, num_bare:num_out], grad[:, num_out:]
    torch.mm(given, matrix[num_bare:num_out, num_in:], out=narrow)
    ups = grad.new_zeros(num_out, narrow.shape[1])
    torch.mm(given.t(), wide[:, num_in:], out=ups[num_bare:])
    downs = narrow.t() @ wide[:, :num_in]
    if not wants_input:
        return grad.new_empty(0), downs, ups
    x_grad = rest_grad @ matrix[num_bare:num_out, :num_in]
    mix(x_grad, grad[:, num_bare:] @ matrix[num_bare:, :num_in], dropping, splits=True)
    if num_bare:
        x_grad.addmm_(grad[:, :num_bare], matrix[:num_bare, :num_in])
    return x_grad, downs, ups


@torch.library.custom_op("launcher::heads", mutates_args=())
def heads(
    residual: Tensor,
    norm_weight: Tensor,
    matrix: Tensor,
    scales: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    seeds: Tensor | None,
    rate: float,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    splits = seeds is not None and scales is not None
    wide, states, rest = _multiply(residual, norm_weight, eps, matrix, _dropping(seeds, 0, rate), splits)
    norms, added = _pair(query_norm, key_norm), rest if splits else None
    query, key, value = turn(states, scales, norms, cos, sin, eps, num_heads, num_kv_heads, added)
    kept = states if keeps_states(scales, norms) else states.new_empty(0)
    return wide, kept, rest, query, key, states.new_empty(0) if value is None else value


@heads.register_fake
def _(
    x: Tensor, _norm_weight: Tensor, matrix: Tensor, scales: Tensor | None, *more: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    query_norm, key_norm, cos, _sin, seeds, _rate, _eps, num_heads, num_kv_heads = more
    norms, num_tokens, size = _pair(query_norm, key_norm), len(x), cos.shape[1]
    key = matrix.new_empty(num_tokens, num_kv_heads, size)
    states = matrix.new_empty(num_tokens, (num_heads + 2 * num_kv_heads) * size)
    splits = seeds is not None and scales is not None
    return (
        matrix.new_empty(num_tokens, matrix.shape[1]),
        torch.empty_like(states) if keeps_states(scales, norms) else matrix.new_empty(0),
        torch.empty_like(states) if splits else matrix.new_empty(0),
        matrix.new_empty(num_tokens, num_heads, size),
        key,
        torch.empty_like(key) if copies_values(scales, norms) else matrix.new_empty(0),
    )


@torch.library.custom_op("launcher::heads_back", mutates_args=())
def heads_back(
    query_grad: Tensor,
    key_grad: Tensor,
    value_grad: Tensor,
    wide: Tensor,
    states: Tensor,
    rest: Tensor,
    matrix: Tensor,
    scales: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    seeds: Tensor | None,
    rate: float,
    eps: float,
    sizes: list[int],
    scale: float,
    rank: int,
    wants_input: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads, norms = (query_grad, key_grad, value_grad), _pair(query_norm, key_norm)
    grad, rests = wide.new_empty(len(wide), len(matrix)), _make_rests(rest)
    of_scales = turn_back(grads, states, scales, norms, cos, sin, eps, grad, rests)
    num_in = matrix.shape[1] - (len(matrix) - sum(sizes))
    rest_grad = None if rests is None else rests[1]
    x_grad, downs, ups = _go_back(grad, wide, matrix, num_in, _dropping(seeds, 0, rate), rest_grad, wants_input)
    trained = take_apart(downs, ups, sizes, scale, rank)
    return x_grad, *trained, wide.new_empty(0) if of_scales is None else of_scales


@heads_back.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide, _states, _rest, matrix, scales = arguments[3:8]
    sizes, _scale, rank, wants_input = arguments[-4:]
    num_in = matrix.shape[1] - (len(matrix) - sum(sizes))
    return (
        wide.new_empty(len(wide), num_in) if wants_input else wide.new_empty(0),
        *_empty_pair(wide, sizes, rank, num_in),
        wide.new_empty(0) if scales is None else torch.empty_like(scales),
    )


def _make_rests(rest: Tensor) -> Rests | None:
    return (rest, torch.empty_like(rest)) if rest.numel() else None


def _empty_pair(like: Tensor, sizes: list[int], rank: int, num_in: int) -> tuple[Tensor, Tensor]:
    """Of take_apart."""
    dtype = widened(like.dtype)
    return like.new_empty(rank * len(sizes), num_in, dtype=dtype), like.new_empty(sum(sizes), rank, dtype=dtype)


@torch.library.custom_op("launcher::mlp", mutates_args=())
def mlp(
    residual: Tensor,
    norm_weight: Tensor,
    gates: Tensor,
    down: Tensor,
    scales: Tensor | None,
    seeds: Tensor | None,
    rate: float,
    eps: float,
    bare_gate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The answer and its rest; what is kept: the gates' input, their states and the rest, LoRA's part of down."""
    splits = seeds is not None and scales is not None
    num_in = down.shape[1] - (len(down) - residual.shape[1])
    num_bare = num_in if splits and bare_gate else 0
    wide, states, rest = _multiply(residual, norm_weight, eps, gates, _dropping(seeds, 0, rate), splits, num_bare)
    num_out = len(down) - (down.shape[1] - num_in)
    through = states.new_empty(len(states), down.shape[1])
    gate(states, scales, through, rest if splits else None)
    x, y_rest, downs = through[:, :num_in], states.new_empty(0), down[num_out:, :num_in].t()
    dropping = _dropping(seeds, 1, rate)
    if dropping is None:
        torch.mm(x, downs, out=through[:, num_in:])
    else:
        side = states.new_empty(len(states), num_in)
        drop(x, x if splits else side, dropping, side if splits else None)
        torch.mm(x if splits else side, downs, out=through[:, num_in:])
        y_rest = side @ down[:num_out, :num_in].t() if splits else y_rest
    return through @ down[:num_out].t(), y_rest, wide, states, rest, through[:, num_in:].contiguous()


@mlp.register_fake
def _(
    residual: Tensor, _norm_weight: Tensor, gates: Tensor, down: Tensor, scales: Tensor | None, *more: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_tokens, num_in = residual.shape
    states = gates.new_empty(num_tokens, len(gates) - (gates.shape[1] - num_in))
    ranks = down.shape[1] - states.shape[1] // 2
    splits, bare_gate = more[0] is not None and scales is not None, more[-1]
    y = gates.new_empty(num_tokens, len(down) - ranks)
    num_rests = states.shape[1] // 2 if bare_gate else states.shape[1]
    return (
        y,
        torch.empty_like(y) if splits else gates.new_empty(0),
        gates.new_empty(num_tokens, gates.shape[1]),
        states,
        gates.new_empty(num_tokens, num_rests) if splits else gates.new_empty(0),
        gates.new_empty(num_tokens, ranks),
    )


@torch.library.custom_op("launcher::mlp_back", mutates_args=())
def mlp_back(
    y_grad: Tensor,
    y_rest_grad: Tensor,
    wide: Tensor,
    states: Tensor,
    rest: Tensor,
    narrow: Tensor,
    gates: Tensor,
    down: Tensor,
    scales: Tensor | None,
    seeds: Tensor | None,
    rate: float,
    lora_scales: list[float],
    ranks: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_tokens, num_out = y_grad.shape
    num_in = states.shape[1] // 2
    rests, dropping = _make_rests(rest), _dropping(seeds, 1, rate)
    through, of_narrow = _find_through_grad(y_grad, y_rest_grad, down, num_in, dropping)
    up = y_grad.t() @ narrow
    states_grad = states.new_empty(num_tokens, len(gates))
    of_scales = gate_back(through, states, scales, states_grad, rests)
    if dropping is not None:
        drop(through, through, dropping)  # each number is read before it is written, by the same thread
    last = take_apart(of_narrow.t() @ through, up, [num_out], lora_scales[1], ranks[1])
    del of_narrow, through
    num_gates_in = gates.shape[1] - (len(gates) - states.shape[1])
    rest_grad = None if rests is None else rests[1]
    x_grad, downs, ups = _go_back(states_grad, wide, gates, num_gates_in, _dropping(seeds, 0, rate), rest_grad)
    first = take_apart(downs, ups, [num_in, num_in], lora_scales[0], ranks[0])
    return x_grad, *first, *last, states.new_empty(0) if of_scales is None else of_scales


def _find_through_grad(
    y_grad: Tensor, y_rest_grad: Tensor, down: Tensor, num_in: int, dropping: Dropping | None
) -> tuple[Tensor, Tensor]:
    """The gradient of what the gate let through, and y_grad sB."""
    num_tokens, num_out = y_grad.shape
    if dropping is not None and not y_rest_grad.numel():
        narrow = y_grad @ down[:num_out, num_in:]
        through = y_grad @ down[:num_out, :num_in]
        mix(through, narrow @ down[num_out:, :num_in], dropping)
        return through, narrow
    grad = y_grad.new_empty(num_tokens, len(down))
    copy(y_grad, grad)
    torch.mm(y_grad, down[:num_out, num_in:], out=grad[:, num_out:])
    through = grad @ down[:, :num_in]
    if dropping is None:
        return through, grad[:, num_out:]
    straight = y_rest_grad @ down[:num_out, :num_in]
    mix(straight, through, dropping, splits=True)
    return straight, grad[:, num_out:]


@mlp_back.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    y_grad, _y_rest_grad, wide, states, _rest, _narrow, gates, _down, scales, _seeds, _rate, _scales, ranks = arguments
    num_in, middle = gates.shape[1] - (len(gates) - states.shape[1]), states.shape[1] // 2
    return (
        wide.new_empty(len(wide), num_in),
        *_empty_pair(wide, [middle, middle], ranks[0], num_in),
        *_empty_pair(wide, [y_grad.shape[1]], ranks[1], middle),
        wide.new_empty(0) if scales is None else torch.empty_like(scales),
    )


@torch.library.custom_op("launcher::last", mutates_args=())
def last(x: Tensor, matrix: Tensor, seeds: Tensor, rate: float, splits: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The attention's output by the last matrix: the answer, its rest, and of the input LoRA's part, which is kept."""
    num_in = x.shape[1]
    num_out = len(matrix) - (matrix.shape[1] - num_in)
    side, downs = torch.empty_like(x), matrix[num_out:, :num_in].t()
    if splits:
        wide = x.new_empty(len(x), matrix.shape[1])
        drop(x, wide, Dropping(seeds, rate), side)
        torch.mm(wide[:, :num_in], downs, out=wide[:, num_in:])
        rest = side @ matrix[:num_out, :num_in].t()
        return wide @ matrix[:num_out].t(), rest, wide[:, num_in:].contiguous()
    drop(x, side, Dropping(seeds, rate))
    narrow = side @ downs
    return torch.addmm(x @ matrix[:num_out, :num_in].t(), narrow, matrix[:num_out, num_in:].t()), x.new_empty(0), narrow


@last.register_fake
def _(x: Tensor, matrix: Tensor, _seeds: Tensor, _rate: float, splits: bool) -> tuple[Tensor, Tensor, Tensor]:
    ranks = matrix.shape[1] - x.shape[1]
    y = x.new_empty(len(x), len(matrix) - ranks)
    return y, torch.empty_like(y) if splits else x.new_empty(0), x.new_empty(len(x), ranks)


@torch.library.custom_op("launcher::last_back", mutates_args=())
def last_back(
    y_grad: Tensor,
    y_rest_grad: Tensor,
    x: Tensor,
    narrow: Tensor,
    matrix: Tensor,
    seeds: Tensor,
    rate: float,
    scale: float,
    rank: int,
) -> tuple[Tensor, Tensor, Tensor]:
    dropping, dropped = Dropping(seeds, rate), torch.empty_like(x)
    x_grad, of_narrow = _find_through_grad(y_grad, y_rest_grad, matrix, x.shape[1], dropping)
    drop(x, dropped, dropping)
    down, up = take_apart(of_narrow.t() @ dropped, y_grad.t() @ narrow, [y_grad.shape[1]], scale, rank)
    return x_grad, down, up


@last_back.register_fake
def _(y_grad: Tensor, _rest: Tensor, x: Tensor, *more: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), *_empty_pair(x, [y_grad.shape[1]], more[-1], x.shape[1])
