"""Before training: the gradients of the attention backend are those of plain attention, or the run refuses.

Backward kernels are other code than forward ones, and can be wrong alone: one of a well-known library was, on an H200.
Random heads of the base's own shape, documents of a few lengths, some of them beyond the kernels' tiles.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from launcher.choices import Dtype
from launcher.corpus.packs import Pack
from launcher.errors import RunFailedError
from launcher.plan.model import Plan
from launcher.training.attention import Backend
from launcher.training.batches import PackedBatch, Shape, collate
from launcher.training.grouped import attend_eager, describe_groups, in_groups
from launcher.training.loading import DTYPES
from launcher.training.model import TrainedModel
from launcher.training.proof import rounds_like, way_out

_LENGTHS = (200, 1, 64, 33, 130)
# Of a gradient, relative to plain attention in fp32.
_ALLOWED: dict[Dtype, float] = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 1e-2}


_WINDOW = 50  # tokens, at most: a base's own may be longer than these documents
Variant = tuple[float | None, float | None, int | None]  # scaling, softcap, window


def find_variants(module: TrainedModel) -> list[Variant]:
    """What the base's layers do to their scores. Each is another branch of a kernel."""
    names = ("scaling", "attn_logit_softcapping", "sliding_window")
    attentions = [getattr(layer, "self_attn", None) for layer in module.layers]
    found = ([getattr(attention, name, None) for name in names] for attention in attentions)
    shortened = ((scaling, cap, None if window is None else min(window, _WINDOW)) for scaling, cap, window in found)
    return list(dict.fromkeys(shortened))


def prove_gradients(plan: Plan, backend: Backend, device: torch.device, variants: Sequence[Variant]) -> float:
    """The largest relative difference of a gradient: of queries, keys or values."""
    batch = _make_batch().to(device)
    dtype = DTYPES[plan.precision.compute_dtype]
    generator = torch.Generator().manual_seed(0)
    counts = plan.base.num_heads, plan.base.num_kv_heads, plan.base.num_kv_heads
    shapes = [(1, count, sum(_LENGTHS), plan.base.head_dim) for count in counts]
    heads = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    direction = torch.randn((1, sum(_LENGTHS), *shapes[0][1::2]), generator=generator).to(device)
    plain = Backend(kernel=in_groups(attend_eager), describe=describe_groups)
    difference = 0.0
    for variant in variants:
        ours = _find_gradients(backend, batch, heads, direction, variant)
        theirs = _find_gradients(plain, batch, [one.float() for one in heads], direction, variant)
        pairs = zip(ours, theirs, strict=True)
        found = [difference, *(float((one.float() - other).norm() / other.norm()) for one, other in pairs)]
        difference = float(np.max(found))  # not-a-number stays one
    allowed = _ALLOWED[rounds_like(plan)]
    if not difference <= allowed:  # not-a-number neither
        raise RunFailedError(
            f"the attention backend {plan.attention.backend} has wrong gradients: they differ from those of plain "
            f"attention by {difference:.1e}, and rounding explains {allowed:.0e}",
            hint=way_out(plan),
        )
    return difference


def _find_gradients(
    backend: Backend, batch: PackedBatch, heads: list[Tensor], direction: Tensor, variant: Variant
) -> list[Tensor]:
    with torch.enable_grad():
        query, key, value = leaves = [one.detach().requires_grad_() for one in heads]
        out = backend.kernel(query, key, value, backend.describe(batch), *variant)
        (out.float() * direction).sum().backward()
    return [leaf.grad if leaf.grad is not None else torch.full_like(leaf, float("nan")) for leaf in leaves]


def _make_batch() -> PackedBatch:
    total = sum(_LENGTHS)
    lengths = np.array(_LENGTHS, dtype=np.int32)
    zeros = np.zeros(total, dtype=np.int32)
    pack = Pack(zeros, np.ones(total, dtype=np.uint8), lengths, np.zeros(len(_LENGTHS), dtype=np.int64))
    shape = Shape(micro_batch_size=1, sequence_length=total, document_sizes=(len(_LENGTHS),), is_packed=True)
    return collate([pack], shape)
