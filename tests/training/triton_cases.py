"""The Triton kernels against plain torch. A program of its own: Triton decides at import whether it interprets."""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.nn import functional

from launcher.training import block_kernels, layer_kernels, layer_passes, loss_kernel, packed_kernels, row_kernels
from launcher.training.dropping import Dropping
from launcher.training.packed import unpack


def check_all(device: str) -> None:
    torch.manual_seed(0)
    check_rows(device)
    check_filling(device)
    for sizes, ranks in (([40, 24, 16], 16), ([700, 700], 16), ([130], 8)):
        check_parting(device, sizes, ranks)
    check_lengths(device, 12)
    check_lengths(device, 72)  # more than a tile
    for num_in, num_out, ranks in ((128, 384, 8), (2048, 24, 48), (72, 512, 24)):
        # interpreted, numbers are cut off to make them bf16
        for dtype in (torch.float32, torch.float16, *([torch.bfloat16] if device == "cuda" else [])):
            check_unpacking(device, num_in, num_out, ranks, dtype)
    for splits in (False, True):
        check_dropping(device, splits)
    for added in (False, True):
        check_scaling(device, added)
    for halves in (1, 2):
        check_gate(device, scaled=True, added=halves)
    for scaled, added in ((False, False), (True, False), (True, True)):
        if not added:
            check_gate(device, scaled)
        for normed in (False, True):
            check_heads(device, scaled, normed, added)
    for softcap in (None, 5.0):
        check_loss(device, softcap)


def check_rows(device: str) -> None:
    x, weight = torch.randn(37, 200), torch.randn(200)
    wanted = torch.zeros(37, 208)
    found = wanted.clone().to(device)
    layer_passes.norm(x, weight, 1e-5, wanted)
    row_kernels.norm(x.to(device), weight.to(device), 1e-5, found)
    same(found, wanted)
    row_kernels.copy(x.to(device), found)
    same(found[:, :200], x)
    grad = torch.randn(37, 200)
    found = torch.empty_like(x, device=device)
    row_kernels.norm_back(grad.to(device), x.to(device), weight.to(device), 1e-5, found)
    same(found, layer_passes.norm_back(grad, x, weight, 1e-5))


def check_dropping(device: str, splits: bool) -> None:
    """The same positions as torch's, to the last."""
    x, weight = torch.randn(37, 600), torch.randn(600)
    there, here = (Dropping(torch.tensor([7_654_321], dtype=torch.int32).to(to), 0.3) for to in ("cpu", device))
    wanted, wanted_side = torch.zeros(37, 608), torch.zeros(37, 600)
    found, side = wanted.clone().to(device), wanted_side.clone().to(device)
    wanted_whole, whole = (torch.zeros(37, 600, device=to) if splits else None for to in ("cpu", device))
    on_device = x.to(device)
    layer_passes.norm_and_drop(x, weight, 1e-5, wanted, wanted_side, there, splits=splits, whole=wanted_whole)
    row_kernels.norm(on_device, weight.to(device), 1e-5, found, here, side, whole, splits)
    same(found, wanted)
    same(side, wanted_side)
    same(whole, wanted_whole)
    assert torch.equal(side.cpu() == 0, wanted_side == 0)
    for ours, theirs in ((on_device, x), (found[:, :600], wanted[:, :600])):  # the second in its own place
        layer_passes.drop(theirs, wanted, there, wanted_side if splits else None)
        row_kernels.drop(ours, found, here, side if splits else None)
        same(found, wanted)
        same(side, wanted_side)
    grad, dropped = torch.randn(37, 600), torch.randn(37, 600)
    on_device = grad.clone().to(device)
    row_kernels.mix(on_device, dropped.to(device), here, splits=splits)
    layer_passes.mix(grad, dropped, there, splits=splits)
    same(on_device, grad)


def check_filling(device: str) -> None:
    matrices = [torch.randn(shape, device=device) for shape in ((3, 40), (40, 5), (700, 16))]
    places = [torch.zeros(2000, 80, device=device)[: len(one), 7 : 7 + one.shape[1]] for one in matrices]
    block_kernels.Filling(list(zip(matrices, places, (1.0, 2.0, 0.5), strict=True)))()
    for matrix, place, scale in zip(matrices, places, (1.0, 2.0, 0.5), strict=True):
        same(place, matrix.cpu() * scale)


def check_parting(device: str, sizes: list[int], ranks: int) -> None:
    rank = 5  # the last columns of a block may be filled up
    downs, ups = torch.randn(ranks, 300), torch.randn(sum(sizes), ranks)
    wanted = layer_passes.take_apart(downs, ups, sizes, 0.5, rank)
    found = tuple(torch.empty_like(one, device=device) for one in wanted)
    block_kernels.take_apart(downs.to(device), ups.to(device), sizes, 0.5, *found)
    for ours, theirs in zip(found, wanted, strict=True):
        same(ours, theirs)


def check_lengths(device: str, ranks: int) -> None:
    matrix = torch.randn(70 + ranks, 40 + ranks, device=device)
    weight, downs, ups = matrix[:70, :40], matrix[70:, :40], matrix[:70, 40:]
    found = torch.empty(70, device=device)
    block_kernels.measure(weight, downs, ups, weight.square().sum(1), found)
    same(found, (weight + ups @ downs).norm(dim=1).cpu())


def check_unpacking(device: str, num_in: int, num_out: int, ranks: int, dtype: torch.dtype) -> None:
    """To the bit: these are the base's weights."""
    num_weights, group, outer_group = num_in * num_out, 64, 8
    num_groups = num_weights // group
    stored = (
        torch.randint(0, 256, (num_weights // 2,), dtype=torch.uint8),
        torch.randn(16),
        torch.randint(0, 256, (num_groups,), dtype=torch.uint8),
        torch.randn(256),
        torch.randn(num_groups // outer_group),
        torch.randn(num_groups // outer_group),
        torch.randn(num_out, ranks).to(dtype),
        torch.randn(ranks, num_in + ranks).to(dtype),
    )
    found = torch.empty(num_out + ranks, num_in + ranks, dtype=dtype, device=device)
    packed_kernels.unpack_into(found, tuple(one.to(device) for one in stored))
    assert torch.equal(found.cpu(), unpack(*stored, None))


def check_scaling(device: str, added: bool) -> None:
    """Of a piece of a wider matrix."""
    y, rest = torch.randn(150, 700)[:, 40:640], torch.randn(150, 600)
    scales, grad = torch.rand(600) + 0.5, torch.randn(150, 600)
    on_device, on_scales = y.to(device), scales.to(device)
    wanted, found = torch.empty(150, 600), torch.empty(150, 600, device=device)
    layer_passes.scale(y, scales, rest if added else None, wanted)
    row_kernels.scale(on_device, on_scales, rest.to(device) if added else None, found)
    same(found, wanted)
    wanted_scales = layer_passes.scale_back(grad, y, scales, wanted)
    found_scales = row_kernels.scale_back(grad.to(device), on_device, on_scales, found)
    same(found, wanted)
    same(found_scales, wanted_scales)


def check_gate(device: str, scaled: bool, added: int = 0) -> None:
    """`added`: to neither half, to the second, to both."""
    num_tokens, width, ranks = 150, 200, 8
    states = torch.randn(num_tokens, 2 * width)
    scales = torch.rand(2 * width) + 0.5 if scaled else None
    wanted, found = torch.zeros(num_tokens, width + ranks), torch.zeros(num_tokens, width + ranks, device=device)
    rest, on_rest = _make_rests(states[:, : added * width], device) if added else (None, None)
    layer_passes.gate(states, scales, wanted, rest and rest[0])
    layer_kernels.gate(states.to(device), _to(scales, device), found, on_rest and on_rest[0])
    same(found, wanted)
    grad = torch.randn(num_tokens, width)
    on_device = grad.clone().to(device)
    wanted = torch.zeros(num_tokens, 2 * width + ranks)
    found = wanted.clone().to(device)
    wanted_scales = layer_passes.gate_back(grad, states, scales, wanted, rest)
    found_scales = layer_kernels.gate_back(on_device, states.to(device), _to(scales, device), found, on_rest)
    same(found, wanted)
    same(on_rest and on_rest[1], rest and rest[1])
    same(on_device, grad)
    same(found_scales, wanted_scales)


def check_heads(device: str, scaled: bool, normed: bool, added: bool) -> None:
    num_tokens, num_heads, num_kv_heads, size, ranks = 150, 4, 2, 32, 12
    count = num_heads + 2 * num_kv_heads
    states = torch.randn(num_tokens, count * size)
    scales = torch.rand(count * size) + 0.5 if scaled else None
    norms = (torch.randn(size), torch.randn(size)) if normed else None
    angles = torch.rand(num_tokens, size // 2).repeat(1, 2) * 3
    cos, sin = angles.cos(), angles.sin()
    given = states.to(device), _to(scales, device), _pair(norms, device), cos.to(device), sin.to(device), 1e-5
    rest, on_rest = _make_rests(states, device) if added else (None, None)
    wanted = layer_passes.turn(states, scales, norms, cos, sin, 1e-5, num_heads, num_kv_heads, rest and rest[0])
    found = tuple(None if one is None else torch.empty_like(one, device=device) for one in wanted)
    layer_kernels.turn(*given, found, on_rest and on_rest[0])  # type: ignore[arg-type]
    for ours, theirs in zip(found, wanted, strict=True):
        same(ours, theirs)
    shapes = (num_heads, num_kv_heads, num_kv_heads)
    grads = tuple(torch.randn(num_tokens, heads, size) for heads in shapes)
    wide = torch.zeros(num_tokens, count * size + ranks)
    on_device = wide.clone().to(device)
    wanted_scales = layer_passes.turn_back(grads, states, scales, norms, cos, sin, 1e-5, wide, rest)  # type: ignore[arg-type]
    found_scales = layer_kernels.turn_back(tuple(grad.to(device) for grad in grads), *given, on_device, on_rest)  # type: ignore[arg-type]
    same(on_device, wide)
    same(on_rest and on_rest[1], rest and rest[1])
    same(found_scales, wanted_scales)


def check_loss(device: str, softcap: float | None) -> None:
    logits = torch.randn(7, 1000) * 3
    targets = torch.randint(0, 1000, (7,))
    targets[3] = -1  # counts nothing
    leaf = logits.clone().requires_grad_()
    capped = leaf if softcap is None else torch.tanh(leaf / softcap) * softcap
    losses = functional.cross_entropy(capped, targets, ignore_index=-1, reduction="none")
    losses.sum().backward()
    on_device = logits.clone().to(device)
    same(loss_kernel.replace_logits(on_device, targets.to(device), softcap), losses.detach())
    same(on_device, leaf.grad)


def same(found: Tensor | None, wanted: Tensor | None) -> None:
    if wanted is None or found is None:
        assert found is wanted, "one of the two gives nothing"
        return
    difference = float((found.cpu() - wanted).norm() / wanted.norm())
    assert difference < 1e-5, difference


def _make_rests(states: Tensor, device: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """What is added, and room for its gradient; and both on the device."""
    rest = torch.randn(states.shape)
    return (rest, torch.zeros_like(rest)), (rest.to(device), torch.zeros_like(rest, device=device))


def _to(tensor: Tensor | None, device: str) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def _pair(norms: tuple[Tensor, Tensor] | None, device: str) -> tuple[Tensor, Tensor] | None:
    return None if norms is None else (norms[0].to(device), norms[1].to(device))


if __name__ == "__main__":
    check_all(sys.argv[1])
