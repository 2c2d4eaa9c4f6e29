"""Before training: our products and joined halves have the gradients of PEFT's and transformers', or theirs are used.

Gradients of the loss depend on every forward and backward kernel in between. A fresh adapter's B is zero, which would
hide all that LoRA adds, and half of its gradients: for the proof it is filled with random numbers, and put back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from launcher.choices import Dtype
from launcher.corpus.packs import PackFile
from launcher.errors import first_line, say
from launcher.plan.model import Plan
from launcher.training.batches import PackedBatch
from launcher.training.dropping import DropBySeed
from launcher.training.layers import uncompiled
from launcher.training.model import TrainedModel
from launcher.training.products import Products, by_the_library, give_back
from launcher.training.proof import evaluating, lay_out, pick_documents, rounds_like

# Of the gradients of one kind of matrix, over all layers. Two ways of rounding drift apart over a network: in BF16 on a
# CPU by 0.02 for 4 layers and 0.036 for 36 (random weights).
_ALLOWED: dict[Dtype, float] = {"fp32": 1e-3, "bf16": 0.25, "fp16": 0.1}
_TOKENS = {"cpu": 64, "cuda": 512}  # that are looked at; on a GPU more than a tile of any kernel
_SHARE = 0.25  # of the base's own weights that LoRA's product is made as large as
_SEED = 1_234_567  # of dropout
_ROWS = 64  # of a matrix, to see how large its numbers are


def prove_products(plan: Plan, module: TrainedModel, file: PackFile, device: torch.device) -> float | None:
    """The largest relative difference of a gradient; None: nothing is ours, or it is no longer."""
    if not module.products.blocks:
        return None
    tokens = _TOKENS.get(device.type, 512)
    documents = sorted(
        pick_documents(file, max(tokens, plan.batch.sequence_length)), key=lambda one: len(one.input_ids)
    )
    while len(documents) > 1 and sum(len(one.input_ids) for one in documents) > tokens:
        documents.pop()
    batch = lay_out(documents, plan).to(device)
    allowed = _ALLOWED[rounds_like(plan)]
    with _woken(module.products), evaluating(module), _dropping(module.products), uncompiled():
        with by_the_library():
            theirs = _find_gradients(module, batch)
        try:
            ours = _find_gradients(module, batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # such as a kernel that Triton cannot compile for this GPU
            why = f"do not run here: {type(error).__name__}: {first_line(error)}"
        else:
            difference = max(_difference(ours[kind], theirs[kind]) for kind in theirs)
            if difference <= allowed:  # false for not-a-number
                return difference
            why = (
                f"have other gradients here than PEFT's: they differ by {difference:.1e}, and rounding explains "
                f"{allowed:.0e}"
            )
    give_back(module.products)
    say(
        f"warning: our products of adapted matrices {why}. PEFT's own are used, which is slower and takes more memory. "
        "Please report it, with the GPU and the versions"
    )
    return None


def _find_gradients(module: TrainedModel, batch: PackedBatch) -> dict[str, list[Tensor]]:
    """By kind: which matrix of a layer, and what of its adapter. Nothing is added up anywhere."""
    names, trained = zip(*((name, one) for name, one in module.named_parameters() if one.requires_grad), strict=True)
    with torch.enable_grad():
        loss: Any = module(batch)
        grads = torch.autograd.grad(loss, trained)
    kinds: dict[str, list[Tensor]] = {}
    for name, grad in zip(names, grads, strict=True):
        kinds.setdefault(".".join(name.split(".")[-4:-2]), []).append(grad.float())
    return kinds


def _difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    apart = sum(float((one - other).square().sum()) for one, other in zip(ours, theirs, strict=True))
    whole = sum(float(other.square().sum()) for other in theirs)
    return float((apart / max(whole, 1e-30)) ** 0.5)


@contextmanager
def _woken(products: Products) -> Iterator[None]:
    generator = torch.Generator().manual_seed(0)
    kept: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for block in products.blocks:
            rows = block.matrix()[: block.num_out, : block.num_in].split(list(block.sizes))
            sizes = [_spread(one[:_ROWS]) for one in rows]
            del rows
            for member, size in zip(block.trained, (sizes[index] for index in block.adapted), strict=True):
                down, up = (getattr(member, name)["default"].weight for name in ("lora_A", "lora_B"))
                spread = size * _SHARE / (block.scale * _spread(down) * len(down) ** 0.5)
                kept.append((up, up.clone()))
                up.copy_(spread * torch.randn(up.shape, generator=generator))
                if block.lengths is not None:
                    magnitude = member.lora_magnitude_vector["default"].weight
                    kept.append((magnitude, magnitude.clone()))
                    magnitude.mul_((1 + 0.1 * torch.randn(magnitude.shape, generator=generator)).to(magnitude))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, before in kept:
                parameter.copy_(before)
        products.refresh(anyway=True)


@contextmanager
def _dropping(products: Products) -> Iterator[None]:
    """Where the adapters drop: alike on both ways, and as if trained. PEFT draws for each matrix, we for each input."""
    members = [member for block in products.blocks if block.dropout for member in block.trained]
    kept = [(member, member.lora_dropout["default"], member.training) for member in members]
    for member, dropout, _ in kept:
        member.lora_dropout["default"], member.training = DropBySeed(dropout.p, _SEED), True
    try:
        yield
    finally:
        for member, dropout, was_training in kept:
            member.lora_dropout["default"], member.training = dropout, was_training


def _spread(numbers: Tensor) -> float:
    return float(numbers.float().std()) or 1.0
