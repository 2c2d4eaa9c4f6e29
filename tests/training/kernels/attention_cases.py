"""Compare our attention kernels with plain attention. On a CPU in interpreted_cases.py."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from launcher.training.data.collate import choose_batch_shape, collate
from launcher.training.kernels.varlen_attention import (
    AttentionInputs,
    ScoreOptions,
    Tile,
    Tiles,
    choose_tiles,
    compute_dkdv,
    compute_dq,
    compute_output,
)
from launcher.training.model.attention import BACKENDS, Backend
from launcher.training.model.padded_attention import attend_eager, build_group_metadata, make_grouped_kernel
from tests.training.builders import make_document, make_pack

SMALL = Tiles(forward=Tile(16, 8, 4, 2), dq=Tile(8, 16, 4, 2), dkdv=Tile(8, 16, 4, 2))
LONG_AND_SHORT = (10, 1, 4, 17, 7)  # documents that begin and end inside tiles
ONE = (35,)  # has tiles that need no mask


def check_all(device: str) -> None:
    torch.manual_seed(0)
    for lengths, num_heads, num_kv_heads in (
        (LONG_AND_SHORT, 2, 1),
        (LONG_AND_SHORT, 2, 2),
        (ONE, 3, 1),  # three query heads per KV head: tiles have unused rows
        ((17, 37), 2, 1),  # the last token of one document is in a tile of the other
    ):
        check(device, lengths, num_heads, num_kv_heads, ScoreOptions(sm_scale=0.3))
    check(device, (28, 11), 2, 1, ScoreOptions(sm_scale=0.3, softcap=2.0))
    check(device, (28, 11, 1), 2, 1, ScoreOptions(sm_scale=0.3, window=6))
    check(device, (28, 11, 1), 2, 1, ScoreOptions(sm_scale=0.06, softcap=2.0, window=6), head_dim=256)
    check(device, (28, 11, 1), 6, 2, ScoreOptions(sm_scale=0.3, window=6), has_sinks=True)
    check_operation(device)
    if device == "cuda":
        check(device, (700, 1, 300, 23), 8, 4, ScoreOptions(sm_scale=0.06, softcap=50.0), head_dim=256)
        check(device, (1000, 300), 4, 1, ScoreOptions(sm_scale=0.06, window=200), head_dim=256)
        check(device, (1000, 300), 8, 8, ScoreOptions(sm_scale=0.06), head_dim=256)
        check(device, (700, 1, 300, 23), 16, 8, ScoreOptions(sm_scale=0.09))
        check(device, (2048, 2000), 32, 8, ScoreOptions(sm_scale=0.09))
        check(device, (1000, 300), 14, 2, ScoreOptions(sm_scale=0.09, softcap=30.0, window=200))
        check(device, (1000, 300, 1), 64, 8, ScoreOptions(sm_scale=0.12, window=128), head_dim=64, has_sinks=True)
        check(device, (1000, 300, 1), 64, 8, ScoreOptions(sm_scale=0.12), head_dim=64, has_sinks=True)


def check(
    device: str,
    lengths: tuple[int, ...],
    num_heads: int,
    num_kv_heads: int,
    options: ScoreOptions,
    *,
    head_dim: int | None = None,
    has_sinks: bool = False,
) -> None:
    """BF16 on a GPU; the interpreter only supports FP32, and is exact to its rounding."""
    head_dim = head_dim or (128 if device == "cuda" else 16)
    dtype, allowed = (torch.bfloat16, 1e-2) if device == "cuda" else (torch.float32, 1e-6)
    sizes = torch.tensor(lengths)
    ends = sizes.cumsum(0)
    starts, ends = (bounds.repeat_interleave(sizes).int().to(device) for bounds in (ends - sizes, ends))
    counts = (num_heads, num_kv_heads, num_kv_heads)
    q, k, v = (draw(len(starts), count, head_dim).to(device, dtype).requires_grad_() for count in counts)
    do = draw(len(starts), num_heads, head_dim).to(device, dtype)
    sinks = torch.randn(num_heads, device=device) if has_sinks else None
    expected = attend_plainly(q.double(), k.double(), v.double(), starts, options, sinks)
    expected_grads = torch.autograd.grad(expected, (q, k, v), do.double())
    inputs = AttentionInputs(q.detach(), k.detach(), v.detach(), starts, ends, options, sinks)
    tiles = choose_tiles(inputs) if device == "cuda" else SMALL
    o, grads = run(inputs, do, tiles)
    for result, exact in zip((o, *grads), (expected, *expected_grads), strict=True):
        difference = float((result.double() - exact.double()).norm() / exact.double().norm())
        assert difference <= allowed, (lengths, num_heads, num_kv_heads, options, difference)
    if device == "cuda":
        again = run(inputs, do, tiles)
        assert all(torch.equal(one, other) for one, other in zip((o, *grads), (again[0], *again[1]), strict=True))


def check_operation(device: str) -> None:
    """As in training: through the backend and autograd, in 16 bits, with a model's tensor layout."""
    pack = make_pack([make_document(length, 1, index) for index, length in enumerate((25, 14))])
    batch = collate([pack], choose_batch_shape(np.array([3]), 1, 40, is_packed=True)).to(torch.device(device))
    ours = BACKENDS["triton"]
    plain = Backend(kernel=make_grouped_kernel(attend_eager), build_metadata=build_group_metadata)
    drawn = [torch.randn(1, 40, count, 64, device=device).to(torch.float16) for count in (2, 1, 1)]
    do = torch.randn(1, 40, 2, 64, device=device).to(torch.float16)
    for scaling, softcap, window, has_sinks in ((None, None, None, False), (0.2, 3.0, 7, False), (0.2, None, 7, True)):
        results = []
        drawn_sinks = [torch.tensor([0.5, -1.0], device=device)] if has_sinks else []
        for backend, dtype in ((ours, torch.float16), (plain, torch.float32)):
            heads = [one.to(dtype).transpose(1, 2).requires_grad_() for one in drawn]
            sinks = [one.clone().requires_grad_() for one in drawn_sinks]
            metadata = backend.build_metadata(batch) | ({"sinks": sinks[0]} if sinks else {})
            out = backend.kernel(heads[0], heads[1], heads[2], metadata, scaling, softcap, window)
            results.append((out, *torch.autograd.grad(out, (*heads, *sinks), do.to(dtype))))
        for one, other in zip(*results, strict=True):
            assert one.shape == other.shape
            difference = float((one.float() - other.float()).norm() / other.float().norm())
            assert difference <= 1e-2, (scaling, softcap, window, has_sinks, difference)
    metadata = ours.build_metadata(batch)
    q, k, v = (one[0].requires_grad_() for one in drawn)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    for one in (None, torch.zeros(2, device=device, requires_grad=True)):
        arguments = (q, k, v, metadata["doc_starts"], metadata["doc_ends"], 0.1, None, None, one)
        torch.library.opcheck(torch.ops.launcher.varlen_attention.default, arguments, test_utils=checks)


def draw(num_tokens: int, count: int, head_dim: int) -> Tensor:
    """A slice of a wider tensor, as when one matmul computes Q, K and V."""
    return torch.randn(num_tokens, count + 3, head_dim)[:, 1 : count + 1]


def run(inputs: AttentionInputs, do: Tensor, tiles: Tiles) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    o, lse = compute_output(inputs, tiles.forward)
    dq, delta = compute_dq(inputs, o, do, lse, tiles.dq)
    dk, dv = compute_dkdv(inputs, do, lse, delta, tiles.dkdv)
    return o, (dq, dk, dv)


def attend_plainly(
    q: Tensor, k: Tensor, v: Tensor, doc_starts: Tensor, options: ScoreOptions, sinks: Tensor | None
) -> Tensor:
    """Attention with the full matrix of scores."""
    group = q.shape[1] // k.shape[1]
    k, v = (one.repeat_interleave(group, dim=1) for one in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * options.sm_scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    position = torch.arange(len(doc_starts), device=doc_starts.device)
    visible = (position[None, :] >= doc_starts[:, None]) & (position[None, :] <= position[:, None])
    if options.window is not None:
        visible &= position[None, :] > position[:, None] - options.window
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(doc_starts), 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1)[..., : len(doc_starts)], v)
