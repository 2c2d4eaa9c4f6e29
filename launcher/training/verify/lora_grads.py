"""Check before training that fused LoRA layers have the gradients of PEFT's; if not, PEFT's layers are used.

In 16 bits both are compared with the same computation in FP32: ours may be at most 1.5 times as far from it as PEFT's.
In FP32, for quantized bases and where FP32 does not fit, ours are compared with PEFT's. With FP8 there is no fallback:
gradients too far from FP32 end the run. In full fine-tuning the weights of the middle and the last layer are compared.

The gradients of the loss depend on every forward and backward kernel. B of a new adapter is zero, which would hide
LoRA's contribution and the gradients of A: during the check B has random values, which are removed afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from launcher.core.choices import Dtype
from launcher.core.errors import RunFailedError, first_line
from launcher.core.log import get_logger
from launcher.corpus.pack_file import PackFile
from launcher.plan.model import Plan
from launcher.training.data.collate import PackedBatch
from launcher.training.kernels.seeded_dropout import SeededDropout
from launcher.training.model.attention import BACKENDS, register_backend
from launcher.training.model.compile_checkpoint import checkpointing_disabled, compile_disabled
from launcher.training.model.fp8_linear import TrainedFp8Linear
from launcher.training.model.fused_lora.linear import FusedLoraModel, unfuse
from launcher.training.model.fused_lora.reference import use_reference_forward
from launcher.training.model.fused_lora.weights import ADAPTER_NAME
from launcher.training.model.packed_lm import PackedCausalLM
from launcher.training.verify.packing import collate_documents, eval_mode, rounding_dtype, select_documents
from launcher.training.verify.upcast import Upcast

log = get_logger(__name__)

# Largest relative difference of the gradients of one kind of matrix, over all layers. Rounding differences grow with
# depth: in bf16 on a CPU to 0.02 for 4 layers and 0.036 for 36 (random weights).
_TOLERANCES: dict[Dtype, float] = {"fp32": 1e-3, "bf16": 0.25, "fp16": 0.1}
# Of a base in FP8: distance from FP32 with the same, rounded weights. SmolLM2-135M, emulated: 0.19 to 0.24, and 0.8 to
# 1.0 without LoRA's term in the forward pass. Random weights amplify rounding: 0.18 for 28 layers (0.6B, H200), 0.58
# for 36 (8B).
_FP8_TOLERANCE = 0.4
_FP8_TOLERANCE_RANDOM = 0.75
_FP8_TOLERANCE_NORMS = 0.75  # of the weights of QK-norms, whose gradients are sums over tokens and heads
_HEAD_NORMS = ("q_norm", "k_norm")
_MAX_RATIO = 1.5  # of the distance from FP32, ours to PEFT's
_MIN_ALLOWED = 2e-3  # half the rounding error of BF16
_FP32_BYTES_PER_WEIGHT = 5  # copies of the weights are saved for the backward pass
_NUM_TOKENS = {"cpu": 64, "cuda": 512}  # on a GPU more than a tile of any kernel
# Size of s B A during the check, relative to the base's weights. A quarter would destroy a pretrained base (SmolLM2:
# loss 7.7 instead of 1.7) and amplify rounding errors; a fiftieth would hide a missing LoRA term among them.
_LORA_SHARE = 0.1
_DROPOUT_SEED = 1_234_567
_Grads = dict[str, list[Tensor]]  # by kind of matrix, such as "q_proj.lora_A"
_SAMPLED_ROWS = 64  # rows of a matrix from which the standard deviation of its weights is estimated


def check_lora_grads(plan: Plan, module: PackedCausalLM, file: PackFile, device: torch.device) -> float | None:
    """Return the largest relative error of LoRA gradients; None if no layer is fused, also after a failed check."""
    if not module.fused_lora.weights:
        return None
    batch = _select_batch(plan, file, device)
    tolerance = _TOLERANCES[rounding_dtype(plan)]
    with _random_lora_b(module.fused_lora), eval_mode(module), _seeded_dropout(module.fused_lora), compile_disabled():
        with use_reference_forward():
            reference = _compute_grads(module, batch)
        try:
            fused = _compute_grads(module, batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # such as a kernel that Triton cannot compile for this GPU
            problem = f"fail on this machine: {type(error).__name__}: {first_line(error)}"
        else:
            exact = _try_exact_grads(plan, module, batch)
            if plan.precision.fp8_base:
                return _check_fp8(plan, _largest_difference(fused, reference if exact is None else exact))
            if exact is None:
                difference, allowed = _largest_difference(fused, reference), tolerance
                problem = f"have different gradients than PEFT's: relative difference {difference:.1e}"
            else:
                difference = _largest_difference(fused, exact)
                allowed = max(_MIN_ALLOWED, _MAX_RATIO * _largest_difference(reference, exact))
                problem = f"have gradients that differ from FP32 by {difference:.1e}, more than PEFT's"
            if difference <= allowed:  # false for NaN
                return difference
            problem += f" (allowed: {allowed:.1e})"
    unfuse(module.fused_lora)
    log.warning(
        f"fused LoRA layers {problem}. Using PEFT's own layers, which are slower and need more memory. "
        "Please report this with your GPU and package versions"
    )
    return None


def check_fp8_grads(plan: Plan, module: PackedCausalLM, file: PackFile, device: torch.device) -> float | None:
    """Return the largest relative error of gradients of trained FP8 layers; None if there are none.

    Sharded weights are not checked: their gradients exist only after a reduction.
    """
    if not module.fp8_groups or plan.strategy not in ("single", "ddp"):
        return None
    batch = _select_batch(plan, file, device)
    with eval_mode(module), compile_disabled():
        grads = _compute_grads(module, batch)
        exact = _try_exact_grads(plan, module, batch)
        if exact is None:
            with use_reference_forward():
                exact = _compute_grads(module, batch)
    norms = [{kind: one[kind] for kind in _HEAD_NORMS if kind in one} for one in (grads, exact)]
    matrices = [{kind: one[kind] for kind in one if kind not in _HEAD_NORMS} for one in (grads, exact)]
    return _check_fp8(plan, _largest_difference(*matrices), _largest_difference(*norms) if norms[1] else 0.0)


def _select_batch(plan: Plan, file: PackFile, device: torch.device) -> PackedBatch:
    """Return the shortest of the checked documents, up to the number of tokens that the device checks quickly."""
    num_tokens = _NUM_TOKENS.get(device.type, 512)
    documents = sorted(
        select_documents(file, max(num_tokens, plan.batch.sequence_length)),
        key=lambda document: len(document.input_ids),
    )
    while len(documents) > 1 and sum(len(document.input_ids) for document in documents) > num_tokens:
        documents.pop()
    return collate_documents(documents, plan).to(device)


def _check_fp8(plan: Plan, difference: float, norms: float = 0.0) -> float:
    """Return the difference from FP32; raise RunFailedError if it, or that of the QK-norms' weights, is too large."""
    allowed = _FP8_TOLERANCE_RANDOM if plan.random_weights else _FP8_TOLERANCE
    if difference <= allowed and norms <= _FP8_TOLERANCE_NORMS:  # false for NaN
        return difference
    if difference <= allowed:
        difference, allowed = norms, _FP8_TOLERANCE_NORMS
    raise RunFailedError(
        f"with FP8, gradients differ from FP32 by {difference:.1e} (relative), more than {allowed:g}",
        hint="this base needs more precision: --precision bf16",
    )


def _largest_difference(grads: _Grads, reference: _Grads) -> float:
    if not reference or grads.keys() != reference.keys():
        return float("nan")
    return float(np.max([_relative_difference(grads[kind], reference[kind]) for kind in reference]))  # keeps NaN


def _try_exact_grads(plan: Plan, module: PackedCausalLM, batch: PackedBatch) -> _Grads | None:
    """Return PEFT's gradients in FP32; None if training uses FP32, the base is quantized, or FP32 is impossible."""
    if rounding_dtype(plan) == "fp32" or plan.precision.compute_dtype == "fp32" or plan.quantization is not None:
        return None
    needed = _FP32_BYTES_PER_WEIGHT * plan.base.num_parameters
    if batch.input_ids.is_cuda and torch.cuda.mem_get_info(batch.input_ids.device)[0] < needed:
        return None
    try:
        # Autograd recomputes without the mode Upcast, that is in 16 bits.
        with use_reference_forward(), _plain_kernels(module), checkpointing_disabled(), Upcast():
            return _compute_grads(module, batch)
    except Exception as error:  # a family or a package that cannot run in FP32
        log.info(f"gradients are compared with PEFT's only: FP32 fails ({type(error).__name__}: {first_line(error)})")
        return None


@contextmanager
def _plain_kernels(module: PackedCausalLM) -> Iterator[None]:
    """Use eager attention and the loss in plain torch, which compute in any dtype."""
    backend, loss_kernel, attention = module.backend, module.loss_kernel, module.base.config._attn_implementation
    module.backend, module.loss_kernel = BACKENDS["eager"], "chunked"
    module.base.set_attn_implementation(register_backend("eager", BACKENDS["eager"]))
    try:
        yield
    finally:
        module.backend, module.loss_kernel = backend, loss_kernel
        module.base.set_attn_implementation(attention)


def _compute_grads(module: PackedCausalLM, batch: PackedBatch) -> _Grads:
    """Return checked gradients by kind of matrix, such as "q_proj.lora_A", without accumulating into .grad."""
    names, parameters = zip(*_list_checked(module), strict=True)
    with torch.enable_grad():
        loss: Any = module(batch)
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    kinds: _Grads = {}
    for name, grad in zip(names, grads, strict=True):
        if grad is not None:
            kinds.setdefault(name, []).append(grad.float())
    return kinds


def _list_checked(module: PackedCausalLM) -> list[tuple[str, Tensor]]:
    """Return kind and parameter of LoRA's matrices; or of FP8 weights and QK-norms in the middle and the last layer.

    In the first layer 16 bits alone can be far from FP32: 33 % for Qwen2.5-Coder-1.5B, whose scores reach thousands
    (FP8: 54 %; at most 18 % in the middle and last layer; emulated by benchmarks/fp8_gradients.py).
    """
    if not module.fp8_groups:
        trained = ((name, one) for name, one in module.named_parameters() if one.requires_grad and ".lora_" in name)
        return [(".".join(name.split(".")[-4:-2]), parameter) for name, parameter in trained]
    layers = module.layers
    chosen = [layers[index] for index in sorted({len(layers) // 2, len(layers) - 1})]
    return [
        (name.rpartition(".")[2], module.weight)
        for layer in chosen
        for name, module in layer.named_modules()
        if isinstance(module, TrainedFp8Linear) or name.rpartition(".")[2] in _HEAD_NORMS
    ]


def _relative_difference(grads: list[Tensor], reference: list[Tensor]) -> float:
    error = sum(float((one - other).square().sum()) for one, other in zip(grads, reference, strict=True))
    total = sum(float(other.square().sum()) for other in reference)
    return float((error / max(total, 1e-30)) ** 0.5)


@contextmanager
def _random_lora_b(model: FusedLoraModel) -> Iterator[None]:
    """Fill B with random values, vary DoRA's magnitudes, and restore both afterwards."""
    generator = torch.Generator().manual_seed(0)
    originals: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for weights in model.weights:
            base = weights.materialize()[: weights.out_features, : weights.in_features]
            stds = [_estimate_std(rows[:_SAMPLED_ROWS]) for rows in base.split(list(weights.shape.out_features))]
            del base  # a temporary tensor with an NF4 base
            for index, member in zip(weights.shape.adapted, weights.adapted_members, strict=True):
                lora_a, lora_b = (getattr(member, name)[ADAPTER_NAME].weight for name in ("lora_A", "lora_B"))
                scale = weights.shape.lora_scale * _estimate_std(lora_a) * len(lora_a) ** 0.5
                originals.append((lora_b, lora_b.clone()))
                lora_b.copy_(stds[index] * _LORA_SHARE / scale * torch.randn(lora_b.shape, generator=generator))
                if weights.dora is not None:
                    magnitude = member.lora_magnitude_vector[ADAPTER_NAME].weight
                    originals.append((magnitude, magnitude.clone()))
                    magnitude.mul_((1 + 0.1 * torch.randn(magnitude.shape, generator=generator)).to(magnitude))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, original in originals:
                parameter.copy_(original)
        model.refresh(force=True)


@contextmanager
def _seeded_dropout(model: FusedLoraModel) -> Iterator[None]:
    """Use one fixed dropout mask for all adapters: else PEFT would draw one per matrix, fused layers one per input."""
    members = [member for weights in model.weights if weights.dropout for member in weights.adapted_members]
    originals = [(member, member.lora_dropout[ADAPTER_NAME], member.training) for member in members]
    for member, dropout, _ in originals:
        member.lora_dropout[ADAPTER_NAME], member.training = SeededDropout(dropout.p, _DROPOUT_SEED), True
    try:
        yield
    finally:
        for member, dropout, was_training in originals:
            member.lora_dropout[ADAPTER_NAME], member.training = dropout, was_training


def _estimate_std(values: Tensor) -> float:
    return float(values.float().std()) or 1.0
