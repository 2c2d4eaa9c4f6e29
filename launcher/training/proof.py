"""Before training: rows packed our way give what the library gives for each alone, or the run refuses.

Three things are computed on documents of the run's own data: packed by our way; each document alone by transformers'
own forward pass (its attention, its logits); and, as a control, packed with the borders taken away. The control says
how much mixing would show here, so that a difference which rounding explains is told from one which mixing explains,
even on a base whose weights are random.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from launcher.choices import Dtype
from launcher.corpus.packs import Pack, PackFile
from launcher.errors import RunFailedError
from launcher.plan.model import Plan
from launcher.training.batches import PackedBatch, Shape, collate
from launcher.training.layers import uncompiled
from launcher.training.loading import caps_scores
from launcher.training.model import TrainedModel

# Relative difference of the summed loss that rounding explains.
_LOSS_TOLERANCE: dict[Dtype, float] = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}
# The same of a document's hidden states: other kernels, other shapes of products, added up over a network. In BF16 on
# an H200 0.016 for 28 layers and 0.055 for 36 (random weights); taking the borders away changes 1.4.
_HIDDEN_NOISE: dict[Dtype, float] = {"fp32": 1e-4, "bf16": 0.15, "fp16": 0.05}
_MOST_DOCUMENTS = 8
_PACKS_LOOKED_AT = 64
# Above this the library's matrix of scores for one document would be large: its SDPA is asked instead.
_LONGEST_EAGER = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """Differences to the library's, relative."""

    num_documents: int
    loss: float  # of the summed loss
    hidden: float  # of the hidden states, in the document where it is largest
    hidden_alone: float  # of the first document's, which sees no other whatever the backend does
    mixing: float  # of the same where the borders are taken away, on average
    products: float | None = None  # of the gradients of adapted matrices; None: they are multiplied by PEFT


def prove_attention(plan: Plan, module: TrainedModel, model: nn.Module, file: PackFile, device: torch.device) -> Proof:
    """`module` is as built, `model` as prepared: all forward passes go through the latter, as in training."""
    documents = pick_documents(file, plan.batch.micro_batch_size * plan.batch.sequence_length)
    with evaluating(model), torch.no_grad(), uncompiled():
        packed = lay_out(documents, plan).to(device)
        loss, hidden = _forward(model, packed)
        _, mixed_hidden = _forward(model, _without_borders(packed))
        with _transformers_attention(module, max(len(document.input_ids) for document in documents)):
            alone = [_forward(model, lay_out([one], plan).to(device), is_reference=True) for one in documents]
    lengths = [len(document.input_ids) for document in documents]
    theirs = [states[:length] for (_, states), length in zip(alone, lengths, strict=True)]
    total = sum(float(loss) for loss, _ in alone)
    differences = _differences(hidden, theirs)
    proof = Proof(
        num_documents=len(documents),
        loss=abs(float(loss) - total) / max(abs(total), 1e-9),
        hidden=float(np.max(differences)),  # not-a-number stays one
        hidden_alone=differences[0],
        mixing=float(np.mean(_differences(mixed_hidden, theirs)[1:] or [0.0])),
    )
    _check(plan, proof)
    return proof


def rounds_like(plan: Plan) -> Dtype:
    """TF32 has FP16's ten bits."""
    is_rounded = plan.precision.use_tf32 and plan.hardware.gpu is not None
    return "fp16" if is_rounded and plan.precision.compute_dtype == "fp32" else plan.precision.compute_dtype


def _check(plan: Plan, proof: Proof) -> None:
    dtype = rounds_like(plan)
    allowed = _HIDDEN_NOISE[dtype]
    if proof.hidden <= allowed and proof.loss <= _LOSS_TOLERANCE[dtype]:  # false for not-a-number too
        return
    mixes = proof.num_documents > 1 and proof.mixing > 0 and proof.hidden_alone <= allowed
    what = "lets documents of a pack see each other" if mixes else "computes something else than the library"
    raise RunFailedError(
        f"the attention backend {plan.attention.backend} {what}: packed, the loss of {proof.num_documents} documents "
        f"differs by {proof.loss:.1e} (relative) and their hidden states by {proof.hidden:.1e}; rounding explains "
        f"{_LOSS_TOLERANCE[dtype]:.0e} and {allowed:.0e}; without any borders it would be {proof.mixing:.1e}",
        hint=way_out(plan),
    )


def way_out(plan: Plan) -> str:
    if plan.attention.backend in ("sdpa", "eager"):
        return "this base does something to its attention that no backend here knows: it cannot be trained packed"
    return "--set training.config.attention=sdpa takes another backend"


def pick_documents(file: PackFile, room: int) -> list[Pack]:
    """Of the packs looked at, from those with the most documents on: as many as there is room for, in tokens.

    A micro-batch lays packs end to end: its documents must stay apart even where each pack holds but one.
    """
    packs = [file[index] for index in range(min(_PACKS_LOOKED_AT, len(file)))]
    packs.sort(key=lambda pack: -len(pack.document_lengths))
    picked: list[Pack] = []
    for document in (document for pack in packs for document in _documents_of(pack)):
        if len(picked) < _MOST_DOCUMENTS and len(document.input_ids) <= room and document.trained.any():
            picked.append(document)
            room -= len(document.input_ids)
    return picked


def _documents_of(pack: Pack) -> Iterator[Pack]:
    ends = np.cumsum(pack.document_lengths)
    for index, (length, end) in enumerate(zip(pack.document_lengths.tolist(), ends.tolist(), strict=True)):
        piece = slice(end - length, end)
        yield Pack(
            pack.input_ids[piece],
            pack.trained[piece],
            pack.document_lengths[index : index + 1],
            pack.rows[index : index + 1],
        )


def lay_out(documents: list[Pack], plan: Plan) -> PackedBatch:
    """One slot, not filled up: the library shall see each document without padding."""
    num_tokens = sum(len(document.input_ids) for document in documents)
    shape = Shape(
        micro_batch_size=1, sequence_length=num_tokens, document_sizes=(len(documents),), is_packed=plan.batch.packed
    )
    return collate(documents, shape)


def _without_borders(batch: PackedBatch) -> PackedBatch:
    """One document of all: positions go on as they were, only attention reaches back further."""
    num_tokens = batch.input_ids.shape[1]
    cu_seqlens = batch.cu_seqlens.clone()
    cu_seqlens[1:] = num_tokens
    return replace(batch, cu_seqlens=cu_seqlens, max_length=num_tokens, document_lengths=(num_tokens,))


def _forward(model: nn.Module, batch: PackedBatch, *, is_reference: bool = False) -> tuple[Tensor, Tensor]:
    loss, hidden = model(batch, shows_hidden=True, is_reference=is_reference)
    return loss, hidden.float()


def _differences(packed: Tensor, alone: list[Tensor]) -> list[float]:
    pieces = packed.split([len(states) for states in alone])
    return [
        float((ours - theirs).norm() / theirs.norm().clamp(min=1e-9))
        for ours, theirs in zip(pieces, alone, strict=True)
    ]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Nothing is dropped."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def _transformers_attention(module: TrainedModel, longest: int) -> Iterator[None]:
    """The library's plainest: eager applies all that a family does to its scores, but holds them whole."""
    own = module.base.config._attn_implementation
    takes_eager = caps_scores(module.base.config) or longest <= _LONGEST_EAGER
    module.base.set_attn_implementation("eager" if takes_eager else "sdpa")
    try:
        yield
    finally:
        module.base.set_attn_implementation(own)
