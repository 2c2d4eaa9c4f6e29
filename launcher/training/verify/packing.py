"""Check before training that packed documents give the same result as transformers gives for each document alone.

Three results are computed on documents of the run's data: packed, as trained; each document alone, by transformers'
forward pass; and, as a control, packed without document boundaries. The control shows how large the error would be if
documents saw each other. This separates rounding from leakage, even on a base with random weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from launcher.core.choices import Dtype
from launcher.core.errors import RunFailedError
from launcher.corpus.pack_file import Pack, PackFile
from launcher.plan.model import Plan
from launcher.training.data.collate import BatchShape, PackedBatch, collate
from launcher.training.model.base_model import has_attention_softcap
from launcher.training.model.compile_checkpoint import compile_disabled
from launcher.training.model.packed_lm import PackedCausalLM

# Relative difference of the summed loss that rounding can cause.
_LOSS_TOLERANCE: dict[Dtype, float] = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}
# The same for a document's hidden states: other kernels and matmul shapes, accumulated over a network. In BF16 on an
# H200: 0.016 for 28 layers and 0.055 for 36 (random weights); without boundaries 1.4.
_HIDDEN_TOLERANCE: dict[Dtype, float] = {"fp32": 1e-4, "bf16": 0.15, "fp16": 0.05}
_MAX_DOCUMENTS = 8
_MAX_PACKS = 64
# For longer documents, transformers' eager scores would need too much memory: its SDPA is the reference instead.
_MAX_EAGER_LENGTH = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingCheck:
    """Relative differences from transformers."""

    num_documents: int
    loss: float  # of the summed loss
    hidden: float  # of the hidden states, in the document where it is largest
    hidden_first: float  # of the first document's, which cannot see another one
    without_boundaries: float  # of the hidden states without document boundaries, on average
    lora_grads: float | None = None  # of the adapters' gradients, from PEFT's; None: PEFT computes them


def check_packing(
    plan: Plan, module: PackedCausalLM, model: nn.Module, file: PackFile, device: torch.device
) -> PackingCheck:
    """Compare packed documents with each alone, and raise RunFailedError if they differ.

    `module` is as built, `model` as prepared by accelerate: all forward passes go through it, as in training.
    """
    documents = select_documents(file, plan.batch.micro_batch_size * plan.batch.sequence_length)
    lengths = [len(document.input_ids) for document in documents]
    with eval_mode(model), torch.no_grad(), compile_disabled():
        packed = collate_documents(documents, plan).to(device)
        loss, hidden = _forward(model, packed)
        _, leaking_hidden = _forward(model, _without_boundaries(packed))
        with _transformers_attention(module, max(lengths)):
            alone = [
                _forward(model, collate_documents([document], plan).to(device), is_reference=True)
                for document in documents
            ]
    reference = [states[:length] for (_, states), length in zip(alone, lengths, strict=True)]
    total = sum(float(loss) for loss, _ in alone)
    differences = _differences(hidden, reference)
    check = PackingCheck(
        num_documents=len(documents),
        loss=abs(float(loss) - total) / max(abs(total), 1e-9),
        hidden=float(np.max(differences)),  # keeps NaN
        hidden_first=differences[0],
        without_boundaries=float(np.mean(_differences(leaking_hidden, reference)[1:] or [0.0])),
    )
    _raise_if_different(plan, check)
    return check


def rounding_dtype(plan: Plan) -> Dtype:
    """Return the dtype whose rounding applies: TF32 has the ten mantissa bits of FP16."""
    is_tf32 = plan.precision.use_tf32 and plan.hardware.gpu is not None
    return "fp16" if is_tf32 and plan.precision.compute_dtype == "fp32" else plan.precision.compute_dtype


def _raise_if_different(plan: Plan, check: PackingCheck) -> None:
    dtype = rounding_dtype(plan)
    allowed = _HIDDEN_TOLERANCE[dtype]
    if check.hidden <= allowed and check.loss <= _LOSS_TOLERANCE[dtype]:  # false for NaN too
        return
    leaks = check.num_documents > 1 and check.without_boundaries > 0 and check.hidden_first <= allowed
    fault = "lets packed documents see each other" if leaks else "gives other results than transformers"
    raise RunFailedError(
        f"the attention backend {plan.attention.backend} {fault}: packed, the loss of {check.num_documents} documents "
        f"differs by {check.loss:.1e} (relative) and their hidden states by {check.hidden:.1e}; rounding can "
        f"cause at most {_LOSS_TOLERANCE[dtype]:.0e} and {allowed:.0e}; without document boundaries: "
        f"{check.without_boundaries:.1e}",
        hint=suggest_backend(plan),
    )


def suggest_backend(plan: Plan) -> str:
    """Return a hint: which backend to try instead."""
    if plan.attention.backend in ("sdpa", "eager"):
        return "no backend supports this base model's attention; it cannot be trained on packed documents"
    return "try another backend: --set training.config.attention=sdpa"


def select_documents(file: PackFile, max_tokens: int) -> list[Pack]:
    """Select trained documents, from the packs with the most documents first, up to a number of tokens.

    A micro-batch concatenates packs, so its documents must stay apart even if each pack holds only one.
    """
    packs = [file[index] for index in range(min(_MAX_PACKS, len(file)))]
    packs.sort(key=lambda pack: -len(pack.document_lengths))
    selected: list[Pack] = []
    for document in (document for pack in packs for document in _split_documents(pack)):
        if len(selected) < _MAX_DOCUMENTS and len(document.input_ids) <= max_tokens and document.trained.any():
            selected.append(document)
            max_tokens -= len(document.input_ids)
    return selected


def _split_documents(pack: Pack) -> Iterator[Pack]:
    ends = np.cumsum(pack.document_lengths)
    for index, (length, end) in enumerate(zip(pack.document_lengths.tolist(), ends.tolist(), strict=True)):
        piece = slice(end - length, end)
        yield Pack(
            pack.input_ids[piece],
            pack.trained[piece],
            pack.document_lengths[index : index + 1],
            pack.rows[index : index + 1],
        )


def collate_documents(documents: list[Pack], plan: Plan) -> PackedBatch:
    """Collate documents into one batch without padding."""
    num_tokens = sum(len(document.input_ids) for document in documents)
    shape = BatchShape(
        micro_batch_size=1, sequence_length=num_tokens, document_sizes=(len(documents),), is_packed=plan.batch.packed
    )
    return collate(documents, shape)


def _without_boundaries(batch: PackedBatch) -> PackedBatch:
    """The same tokens as one document; only attention sees further back, positions stay."""
    num_tokens = batch.input_ids.shape[1]
    cu_seqlens = batch.cu_seqlens.clone()
    cu_seqlens[1:] = num_tokens
    return replace(batch, cu_seqlens=cu_seqlens, max_length=num_tokens, document_lengths=(num_tokens,))


def _forward(model: nn.Module, batch: PackedBatch, *, is_reference: bool = False) -> tuple[Tensor, Tensor]:
    loss, hidden = model(batch, return_hidden=True, is_reference=is_reference)
    return loss, hidden.float()


def _differences(packed: Tensor, alone: list[Tensor]) -> list[float]:
    pieces = packed.split([len(states) for states in alone])
    return [
        float((ours - reference).norm() / reference.norm().clamp(min=1e-9))
        for ours, reference in zip(pieces, alone, strict=True)
    ]


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode, without dropout, and back."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def _transformers_attention(module: PackedCausalLM, max_length: int) -> Iterator[None]:
    """Uses transformers' eager attention, which supports every family but materializes all scores; else its SDPA."""
    own = module.base.config._attn_implementation
    takes_eager = has_attention_softcap(module.base.config) or max_length <= _MAX_EAGER_LENGTH
    module.base.set_attn_implementation("eager" if takes_eager else "sdpa")
    try:
        yield
    finally:
        module.base.set_attn_implementation(own)
