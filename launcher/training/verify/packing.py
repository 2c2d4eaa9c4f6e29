"""Check before training that packed documents give the same result as transformers gives for each document alone.

Three results are computed on documents of the run's data: packed, as trained; each document alone, by transformers'
forward pass; and, as a control, packed without document boundaries. The control shows how large the error would be if
documents saw each other. This separates rounding from leakage, even on a base with random weights.

Rounding errors depend on the base: activations of some pretrained models are so large that transformers' own results in
BF16 are far from FP32. Where the difference is larger than usual, both are compared with FP32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from launcher.base_models.families import FAMILIES
from launcher.core.choices import Dtype
from launcher.core.errors import InputError, RunFailedError, first_line
from launcher.core.log import get_logger
from launcher.corpus.pack_file import Pack, PackFile
from launcher.plan.model import Plan
from launcher.training.data.collate import BatchShape, PackedBatch, collate
from launcher.training.model.base_model import needs_eager_attention
from launcher.training.model.compile_checkpoint import compile_disabled
from launcher.training.model.packed_lm import PackedCausalLM
from launcher.training.verify.upcast import Upcast

log = get_logger(__name__)

# Relative difference of the summed loss that rounding can cause; more if the hidden states differ by more.
_LOSS_TOLERANCE: dict[Dtype, float] = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}
# The same for a document's hidden states: other kernels and matmul shapes, accumulated over a network. In BF16 on an
# H200: 0.016 for 28 layers and 0.055 for 36 (random weights); without boundaries 1.4.
_HIDDEN_TOLERANCE: dict[Dtype, float] = {"fp32": 1e-4, "bf16": 0.15, "fp16": 0.05}
# The same two with a base in FP8, whose inputs have three bits of mantissa. The reference has the same weights in BF16.
_FP8_LOSS_TOLERANCE, _FP8_HIDDEN_TOLERANCE = 5e-2, 0.5
_MAX_RATIO = 1.5  # of the distance from FP32, ours to transformers'
_ROUNDING: dict[Dtype, float] = {"fp32": 2.0**-23, "bf16": 2.0**-8, "fp16": 2.0**-11}
_MAX_DOCUMENTS = 8
_MAX_PACKS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingCheck:
    """Relative differences between results for packed documents and those of transformers."""

    num_documents: int
    loss: float  # of the summed loss
    hidden: float  # of the hidden states, in the document where it is largest
    hidden_first: float  # of the first document's, which cannot see another one
    without_boundaries: float  # of the hidden states without document boundaries, on average
    leaks: bool  # the hidden states depend on tokens of earlier documents
    routing: float = 0.0  # of the hidden states, if rounding selects other experts: measured for mixtures of experts
    lora_grads: float | None = None  # of the adapters' gradients, from FP32 or PEFT's; None: PEFT computes them
    fp8_grads: float | None = None  # of the gradients of trained FP8 layers, from FP32


def check_packing(
    plan: Plan, module: PackedCausalLM, model: nn.Module, file: PackFile, device: torch.device
) -> PackingCheck:
    """Compare packed documents with each one alone; raise RunFailedError if rounding cannot explain the difference.

    `model` is `module` as prepared by accelerate. Forward passes go through `model`, as in training.
    """
    documents = select_documents(file, _count_checked_tokens(plan))
    lengths = [len(document.input_ids) for document in documents]
    with eval_mode(model), torch.no_grad(), compile_disabled():
        packed = collate_documents(documents, plan).to(device)
        loss, hidden = _forward(model, packed)
        _, leaking_hidden = _forward(model, _without_boundaries(packed))
        _, other_hidden = _forward(model, _with_other_first(packed, lengths[0]))
        with _transformers_attention(module):
            alone = _forward_alone(model, documents, plan, device)
            rounded = _forward_rounded(plan, module, model, documents, device) if _is_mixture(module) else []
    reference = _cut((states for _, states in alone), lengths)
    total = sum(float(loss) for loss, _ in alone)
    differences = _differences(hidden, reference)
    check = PackingCheck(
        num_documents=len(documents),
        loss=abs(float(loss) - total) / max(abs(total), 1e-9),
        hidden=float(np.max(differences)),  # keeps NaN
        hidden_first=differences[0],
        without_boundaries=float(np.mean(_differences(leaking_hidden, reference)[1:] or [0.0])),
        leaks=not torch.equal(other_hidden[lengths[0] :], hidden[lengths[0] :]),
        routing=max(_differences(torch.cat(rounded), reference)) if rounded else 0.0,
    )
    if not _is_rounding(plan, check) and (
        check.leaks or not _is_as_exact(plan, loss, hidden, reference, _try_exact(plan, module, documents, device))
    ):
        _raise_different(plan, check)
    return check


def _cut(states: Iterable[Tensor], lengths: list[int]) -> list[Tensor]:
    """Return each document's hidden states without padding."""
    return [one[:length] for one, length in zip(states, lengths, strict=True)]


_Results = list[tuple[Tensor, Tensor]]  # loss and hidden states of each document


def _try_exact(plan: Plan, module: PackedCausalLM, documents: list[Pack], device: torch.device) -> _Results:
    """Return transformers' loss and hidden states of each document in FP32; empty if this is not possible.

    It is empty for a base in FP8, too: transformers' results in BF16 do not show the rounding error of FP8.
    """
    is_sharded = plan.strategy not in ("single", "ddp")
    if is_sharded or plan.precision.compute_dtype == "fp32" or plan.quantization or plan.precision.uses_fp8:
        return []
    try:
        with eval_mode(module), torch.no_grad(), compile_disabled(), _transformers_attention(module), Upcast():
            return _forward_alone(module, documents, plan, device)
    except Exception as error:  # a family or a package that cannot run in FP32
        log.info(f"cannot compare with FP32 ({type(error).__name__}: {first_line(error)})")
        return []


def _is_as_exact(plan: Plan, loss: Tensor, packed: Tensor, alone: list[Tensor], results: _Results) -> bool:
    """Return whether our results are at most 1.5 times as far from FP32 as transformers'; false for NaN."""
    if not results:
        return False
    exact = _cut((states for _, states in results), [len(states) for states in alone])
    total = sum(float(one) for one, _ in results)
    ours, theirs = (float(np.max(_differences(states, exact))) for states in (packed, torch.cat(alone)))
    allowed_loss = max(_LOSS_TOLERANCE[rounding_dtype(plan)], ours)
    return ours <= _MAX_RATIO * theirs and abs(float(loss) - total) <= allowed_loss * abs(total)


def _count_checked_tokens(plan: Plan) -> int:
    """Return how many tokens are compared: two micro-batches, or two sequences with eager attention.

    Without document boundaries, eager attention holds the scores of all pairs of tokens.
    """
    micro_batch_size = 1 if plan.attention.backend == "eager" else plan.batch.micro_batch_size
    return 2 * micro_batch_size * plan.batch.sequence_length


def _is_mixture(module: PackedCausalLM) -> bool:
    family = FAMILIES.get(str(module.base.config.model_type))
    return family is not None and family.experts is not None


def _forward_rounded(
    plan: Plan, module: PackedCausalLM, model: nn.Module, documents: list[Pack], device: torch.device
) -> list[Tensor]:
    """Return the hidden states of each document alone, after changing its embeddings by one rounding error.

    In a mixture of experts this can select other experts, which changes a token by far more than rounding does.
    """
    epsilon = _ROUNDING[rounding_dtype(plan)]

    def change(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        signs = torch.arange(output.numel(), device=output.device).remainder(2).mul(2).sub(1).view_as(output)
        return (output * (1 + epsilon * signs)).to(output.dtype)

    hook = module.base.get_input_embeddings().register_forward_hook(change)
    try:
        alone = _forward_alone(model, documents, plan, device)
    finally:
        hook.remove()
    return _cut((states for _, states in alone), [len(one.input_ids) for one in documents])


def rounding_dtype(plan: Plan) -> Dtype:
    """Return the dtype whose rounding error results have: the compute dtype, or FP16 for TF32, with as many bits."""
    is_tf32 = plan.precision.use_tf32 and plan.hardware.gpu is not None
    return "fp16" if is_tf32 and plan.precision.compute_dtype == "fp32" else plan.precision.compute_dtype


def _count_allowed(plan: Plan, check: PackingCheck) -> tuple[float, float]:
    """Return the relative differences of hidden states and of the loss that rounding can cause."""
    dtype = rounding_dtype(plan)
    hidden = max(_HIDDEN_TOLERANCE[dtype], min(2 * check.routing, check.without_boundaries / 2))
    loss = _LOSS_TOLERANCE[dtype]
    if plan.precision.uses_fp8:
        hidden = max(hidden, min(_FP8_HIDDEN_TOLERANCE, check.without_boundaries / 2))
        loss = _FP8_LOSS_TOLERANCE
    return hidden, max(loss, check.hidden)


def _is_rounding(plan: Plan, check: PackingCheck) -> bool:
    """Return whether rounding explains the differences; false for NaN."""
    hidden, loss = _count_allowed(plan, check)
    return check.hidden <= hidden and check.loss <= loss


def _raise_different(plan: Plan, check: PackingCheck) -> NoReturn:
    allowed, allowed_loss = _count_allowed(plan, check)
    if check.hidden <= allowed and not check.leaks:
        raise RunFailedError(
            f"{plan.base.name}: hidden states equal those of transformers, but the loss of {check.num_documents} "
            f"documents differs by {check.loss:.1e} (relative): the model does not compute its logits from the LM "
            "head with logit_scale, logits_scaling and final_logit_softcapping of config.json",
            hint="remove those keys from config.json if the model ignores them; otherwise it is not supported",
        )
    leaks = check.hidden_first <= allowed and check.leaks
    fault = "lets packed documents see each other" if leaks else "gives other results than transformers"
    raise RunFailedError(
        f"the attention backend {plan.attention.backend} {fault}: packed, the loss of {check.num_documents} documents "
        f"differs by {check.loss:.1e} (relative) and their hidden states by {check.hidden:.1e}; rounding can "
        f"cause at most {allowed_loss:g} and {allowed:.2g}; without document boundaries hidden states differ by "
        f"{check.without_boundaries:.1e}",
        hint=suggest_backend(plan),
    )


def suggest_backend(plan: Plan) -> str:
    """Return a hint that names another attention backend to try, or says that there is none for the base."""
    if plan.attention.backend in ("sdpa", "eager"):
        return "no backend supports this base model's attention; it cannot be trained on packed documents"
    return "try another backend: --set training.config.attention=sdpa"


def select_documents(file: PackFile, max_tokens: int) -> list[Pack]:
    """Select documents with targets, up to `max_tokens`: half the longest, half from packs with the most documents.

    A micro-batch concatenates packs, so its documents must stay apart even if each pack holds only one. Sliding
    windows and scaled positions have an effect above a length only, so long documents must be among them.
    """
    longest = np.argsort(-file.column("sum_squares"), kind="stable")[:_MAX_PACKS].tolist()
    first = sorted(range(min(_MAX_PACKS, len(file))), key=lambda index: -len(file[index].document_lengths))
    by_length = sorted(_list_trained(file, longest), key=lambda one: -len(one[1].input_ids))
    long = _fill(by_length, _MAX_DOCUMENTS // 2, max_tokens // 2)
    room = max_tokens - sum(len(document.input_ids) for document in long.values())
    others = ((key, document) for key, document in _list_trained(file, first) if key not in long)
    return [*_fill(others, _MAX_DOCUMENTS - len(long), room).values(), *long.values()]


_Key = tuple[int, int]  # number of a pack, and of a document in it


def _list_trained(file: PackFile, indices: list[int]) -> Iterator[tuple[_Key, Pack]]:
    for index in indices:
        for number, document in enumerate(_split_documents(file[index])):
            if document.trained.any():
                yield (index, number), document


def _fill(documents: Iterable[tuple[_Key, Pack]], max_documents: int, max_tokens: int) -> dict[_Key, Pack]:
    selected: dict[_Key, Pack] = {}
    for key, document in documents:
        if len(selected) < max_documents and len(document.input_ids) <= max_tokens:
            selected[key] = document
            max_tokens -= len(document.input_ids)
    return selected


def check_rope(plan: Plan, module: PackedCausalLM, files: Iterable[PackFile]) -> None:
    """Raise InputError if longrope is used and documents on both sides of its length limit could share a batch.

    transformers chooses its short or long factors by the longest document of a batch, for all documents in it.
    """
    config: Any = module.base.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    borders = [border for border in _list_longrope_borders(config, rope) if border < plan.batch.sequence_length]
    if not borders:
        return
    lengths = np.concatenate([pack.document_lengths for file in files for pack in file])
    border = next((border for border in borders if lengths.min() <= border < lengths.max()), None)
    if border is not None:
        raise InputError(
            f"{plan.base.name} has other position embeddings (longrope) for documents of more than {border} tokens. "
            f"transformers uses one kind for a whole micro-batch, and the data has documents of {lengths.min()} to "
            f"{lengths.max()} tokens: short ones would be trained with the long kind",
            hint=f"--set training.config.max_seq_length={border}",
        )


def _list_longrope_borders(config: Any, rope: dict[str, Any]) -> list[int]:
    """Return the lengths above which longrope uses its long factors, one per kind of layer; empty without longrope."""
    if rope.get("rope_type") == "longrope":
        return [int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)]
    nested = (value for value in rope.values() if isinstance(value, dict))
    return [border for one in nested for border in _list_longrope_borders(config, one)]


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
    """Return the batch with all documents merged into one, so that attention sees earlier documents; positions stay."""
    num_tokens = batch.input_ids.shape[1]
    cu_seqlens = batch.cu_seqlens.clone()
    cu_seqlens[1:] = num_tokens
    return replace(batch, cu_seqlens=cu_seqlens, max_length=num_tokens, document_lengths=(num_tokens,))


def _with_other_first(batch: PackedBatch, length: int) -> PackedBatch:
    """Return the batch with other tokens in its first document, which must not change the other documents."""
    input_ids = batch.input_ids.clone()
    input_ids[:, :length] = input_ids[:, :length].flip(1)
    return replace(batch, input_ids=input_ids)


def _forward(model: nn.Module, batch: PackedBatch, *, is_reference: bool = False) -> tuple[Tensor, Tensor]:
    loss, hidden = model(batch, return_hidden=True, is_reference=is_reference)
    return loss, hidden.float()


def _forward_alone(model: nn.Module, documents: list[Pack], plan: Plan, device: torch.device) -> _Results:
    """Return loss and hidden states of each document, computed by transformers without packing."""
    batches = (collate_documents([document], plan).to(device) for document in documents)
    return [_forward(model, batch, is_reference=True) for batch in batches]


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
def _transformers_attention(module: PackedCausalLM) -> Iterator[None]:
    """Use transformers' SDPA, or its eager attention for families without SDPA.

    Eager attention rounds all scores to 16 bits. Those of Qwen2.5 are so large that its results are far from FP32.
    """
    own = module.base.config._attn_implementation
    takes_eager = needs_eager_attention(module.base.config) or not module.base._supports_sdpa
    module.base.set_attn_implementation("eager" if takes_eager else "sdpa")
    try:
        yield
    finally:
        module.base.set_attn_implementation(own)
