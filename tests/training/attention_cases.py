"""Our own attention against plain attention. A program of its own: Triton decides at import whether it interprets."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from launcher.training.attention import BACKENDS, Backend
from launcher.training.attention_tiles import (
    Heads,
    Scores,
    Tile,
    Tiles,
    attend,
    find_key_gradients,
    find_query_gradients,
)
from launcher.training.batches import collate, make_shape
from launcher.training.document_attention import choose_tiles
from launcher.training.grouped import attend_eager, describe_groups, in_groups
from tests.training.builders import make_document, make_pack

SMALL = Tiles(forward=Tile(16, 8, 4, 2), queries=Tile(8, 16, 4, 2), keys=Tile(8, 16, 4, 2))
LONG_AND_SHORT = (10, 1, 4, 17, 7)  # documents that begin and end inside tiles
ONE = (35,)  # whose tiles are seen in whole


def check_all(device: str) -> None:
    torch.manual_seed(0)
    for lengths, num_heads, num_kv_heads in (
        (LONG_AND_SHORT, 2, 1),
        (LONG_AND_SHORT, 2, 2),
        (ONE, 6, 2),  # three share a key: a tile has rows that are nobody's
        ((17, 37), 4, 1),  # the last token of one in the tile of the other
    ):
        check(device, lengths, num_heads, num_kv_heads, Scores(scale=0.3))
    check(device, (40, 15), 4, 2, Scores(scale=0.3, softcap=2.0))
    check(device, (40, 15, 1), 4, 2, Scores(scale=0.3, window=6))
    check_operation(device)
    if device == "cuda":
        check(device, (700, 1, 300, 23), 16, 8, Scores(scale=0.09))
        check(device, (2048, 2000), 32, 8, Scores(scale=0.09))
        check(device, (1000, 300), 14, 2, Scores(scale=0.09, softcap=30.0, window=200))


def check(device: str, lengths: tuple[int, ...], num_heads: int, num_kv_heads: int, scores: Scores) -> None:
    """BF16 on a GPU; the interpreter knows FP32 alone, and is exact to its rounding."""
    size, dtype, allowed = (128, torch.bfloat16, 1e-2) if device == "cuda" else (16, torch.float32, 1e-6)
    sizes = torch.tensor(lengths)
    ends = sizes.cumsum(0)
    starts, ends = (one.repeat_interleave(sizes).int().to(device) for one in (ends - sizes, ends))
    counts = (num_heads, num_kv_heads, num_kv_heads)
    query, key, value = (draw(len(starts), count, size).to(device, dtype).requires_grad_() for count in counts)
    given = draw(len(starts), num_heads, size).to(device, dtype)
    wanted = attend_plainly(query.double(), key.double(), value.double(), starts, scores)
    wanted_grads = torch.autograd.grad(wanted, (query, key, value), given.double())
    heads = Heads(query.detach(), key.detach(), value.detach(), starts, ends, scores)
    tiles = choose_tiles(heads) if device == "cuda" else SMALL
    out, grads = run(heads, given, tiles)
    for found, exact in zip((out, *grads), (wanted, *wanted_grads), strict=True):
        difference = float((found.double() - exact.double()).norm() / exact.double().norm())
        assert difference <= allowed, (lengths, num_heads, num_kv_heads, scores, difference)
    if device == "cuda":
        again = run(heads, given, tiles)
        assert all(torch.equal(one, other) for one, other in zip((out, *grads), (again[0], *again[1]), strict=True))


def check_operation(device: str) -> None:
    """As training calls it: by its backend, through autograd, in 16 bits, in the shape of a model's heads."""
    pack = make_pack([make_document(length, 1, index) for index, length in enumerate((25, 14))])
    batch = collate([pack], make_shape(np.array([3]), 1, 40, is_packed=True)).to(torch.device(device))
    ours, plain = BACKENDS["triton"], Backend(kernel=in_groups(attend_eager), describe=describe_groups)
    drawn = [torch.randn(1, 40, count, 64, device=device).to(torch.float16) for count in (2, 1, 1)]
    given = torch.randn(1, 40, 2, 64, device=device).to(torch.float16)
    for scaling, softcap, window in ((None, None, None), (0.2, 3.0, 7)):
        found = []
        for backend, dtype in ((ours, torch.float16), (plain, torch.float32)):
            query, key, value = heads = [one.to(dtype).transpose(1, 2).requires_grad_() for one in drawn]
            out = backend.kernel(query, key, value, backend.describe(batch), scaling, softcap, window)
            found.append((out, *torch.autograd.grad(out, heads, given.to(dtype))))
        for one, other in zip(*found, strict=True):
            assert one.shape == other.shape
            difference = float((one.float() - other.float()).norm() / other.float().norm())
            assert difference <= 1e-2, (scaling, softcap, window, difference)
    documents = ours.describe(batch)
    query, key, value = (one[0].requires_grad_() for one in drawn)
    arguments = (query, key, value, documents["starts"], documents["ends"], 0.1, None, None)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.launcher.document_attention.default, arguments, test_utils=checks)


def draw(num_tokens: int, count: int, size: int) -> Tensor:
    """Other heads lie beside them, as in a product that makes all three."""
    return torch.randn(num_tokens, count + 3, size)[:, 1 : count + 1]


def run(heads: Heads, given: Tensor, tiles: Tiles) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    out, log_sums = attend(heads, tiles.forward)
    of_queries, alongs = find_query_gradients(heads, out, given, log_sums, tiles.queries)
    of_keys, of_values = find_key_gradients(heads, given, log_sums, alongs, tiles.keys)
    return out, (of_queries, of_keys, of_values)


def attend_plainly(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scores: Scores) -> Tensor:
    """All tokens by all tokens."""
    group = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(group, dim=1) for one in (key, value))
    found = torch.einsum("qhd,khd->hqk", query, key) * scores.scale
    if scores.softcap is not None:
        found = scores.softcap * torch.tanh(found / scores.softcap)
    place = torch.arange(len(starts), device=starts.device)
    seen = (place[None, :] >= starts[:, None]) & (place[None, :] <= place[:, None])
    if scores.window is not None:
        seen &= place[None, :] > place[:, None] - scores.window
    return torch.einsum("hqk,khd->qhd", found.masked_fill(~seen, float("-inf")).softmax(dim=-1), value)


if __name__ == "__main__":
    check_all("cpu")
