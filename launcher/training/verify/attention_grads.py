"""Check before training that an attention backend's gradients equal those of plain attention.

Backward kernels are separate code and can be wrong on their own: one of a well-known library was, on an H200. The
check uses random heads of the base's shape and documents of several lengths, some longer than the kernels' tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from launcher.core.choices import Dtype
from launcher.core.errors import RunFailedError
from launcher.plan.model import Plan
from launcher.training.data.collate import PackedBatch, collate_lengths
from launcher.training.model.attention import Backend
from launcher.training.model.base_model import DTYPES
from launcher.training.model.packed_lm import PackedCausalLM
from launcher.training.model.padded_attention import attend_eager, build_group_metadata, make_grouped_kernel
from launcher.training.verify.packing import rounding_dtype, suggest_backend

_LENGTHS = (200, 1, 64, 33, 130)
# Relative difference of a gradient from plain attention in FP32.
_TOLERANCE: dict[Dtype, float] = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 1e-2}
_MAX_WINDOW = 50  # tokens, because a base's own window may be longer than these documents

Variant = tuple[float | None, float | None, int | None]  # sm_scale, softcap, window


def collect_variants(module: PackedCausalLM) -> list[Variant]:
    """Return the distinct (scale, softcap, window) of the base's layers, which may use other branches of a kernel.

    Mistral and Phi-3 pass the window of their config; other families have one, or None, per layer.
    """
    config: Any = module.base.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    defaults = {"scaling": None, "attn_logit_softcapping": None, "sliding_window": window}
    attentions = [getattr(layer, "self_attn", None) for layer in module.layers]
    options = ([getattr(attention, name, default) for name, default in defaults.items()] for attention in attentions)
    variants = ((scale, cap, None if window is None else min(window, _MAX_WINDOW)) for scale, cap, window in options)
    return list(dict.fromkeys(variants))


def check_attention_grads(plan: Plan, backend: Backend, device: torch.device, variants: Sequence[Variant]) -> float:
    """Return the largest relative error of dQ, dK and dV; raise RunFailedError if rounding cannot explain it."""
    batch = collate_lengths(_LENGTHS).to(device)
    dtype = DTYPES[plan.precision.compute_dtype]
    generator = torch.Generator().manual_seed(0)
    counts = plan.base.num_heads, plan.base.num_kv_heads, plan.base.num_kv_heads
    shapes = [(1, count, sum(_LENGTHS), plan.base.head_dim) for count in counts]
    heads = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    do = torch.randn((1, sum(_LENGTHS), *shapes[0][1::2]), generator=generator).to(device)
    plain = Backend(kernel=make_grouped_kernel(attend_eager), build_metadata=build_group_metadata)
    difference = 0.0
    for variant in variants:
        grads = _compute_grads(backend, batch, heads, do, variant)
        reference = _compute_grads(plain, batch, [tensor.float() for tensor in heads], do, variant)
        pairs = zip(grads, reference, strict=True)
        differences = (float((grad.float() - exact).norm() / exact.norm()) for grad, exact in pairs)
        difference = float(np.max([difference, *differences]))  # keeps NaN
    allowed = _TOLERANCE[rounding_dtype(plan)]
    if not difference <= allowed:  # true for NaN too
        raise RunFailedError(
            f"the attention backend {plan.attention.backend} computes wrong gradients: they differ from plain "
            f"attention by {difference:.1e}; rounding can cause at most {allowed:.0e}",
            hint=suggest_backend(plan),
        )
    return difference


def _compute_grads(
    backend: Backend, batch: PackedBatch, heads: list[Tensor], do: Tensor, variant: Variant
) -> list[Tensor]:
    with torch.enable_grad():
        query, key, value = leaves = [tensor.detach().requires_grad_() for tensor in heads]
        out = backend.kernel(query, key, value, backend.build_metadata(batch), *variant)
        (out.float() * do).sum().backward()
    return [leaf.grad if leaf.grad is not None else torch.full_like(leaf, float("nan")) for leaf in leaves]
