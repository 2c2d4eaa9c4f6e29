"""Estimates step time from shapes and a GPU's data sheet: matrix products, memory traffic, the host.

A two-term roofline: products run at a share of the GPU's peak, everything element-wise at a share of its memory
bandwidth. The few coefficients are fitted to runs on one H200 (benchmarks/results/speed_h200.json); on other GPUs the
result is scaled by their data sheets, and the plan says so.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from launcher.choices import DTYPE_BYTES, NF4_BYTES, AdapterKind, Checkpointing, Dtype, Offload, Quantization
from launcher.hardware import Gpu
from launcher.shapes import ModelShape
from launcher.units import TERA

# Share of the stated peak that large BF16 products reach; 788 of 989 TFLOPS for one 8,192-cubed product on an H200.
_PRODUCT_EFFICIENCY = 0.80
# Share of the stated memory bandwidth that element-wise kernels reach.
_BANDWIDTH_EFFICIENCY = 0.8
# Bytes moved per token, layer and feature (in + out of every matrix), forward and backward, in 16-bit precision.
_TRAFFIC_COMPILED = 30.0
_TRAFFIC_JOINED = 20.5  # halves of layers are one operation each; 19 (0.6B) to 23 (8B) with our own attention
_TRAFFIC_JOINED_EAGER = 27.0  # sums and the norms' way back by themselves
_TRAFFIC_EAGER = 84.0
# DoRA measures the rows of each adapted matrix every step and scales its output.
_DORA_TRAFFIC = 1.25
_DORA_TRAFFIC_JOINED = 1.13
# Dropout inside joined halves: inputs behind it are written, read, and made again; DoRA adds a second product. Counted;
# what was measured since is within 8 %.
_DROPPED_TRAFFIC_JOINED = {False: 1.18, True: 1.35}
# By bitsandbytes, matrix by matrix. Blocks are unpacked by a kernel of ours instead: see unpacking_seconds.
_QUANTIZED_TRAFFIC = 1.08
# Host time to launch one layer's kernels, forward and backward: the floor of a micro-step whatever its size.
_HOST_SECONDS_PER_LAYER_COMPILED = 0.0048
_HOST_SECONDS_PER_LAYER_JOINED = 0.0042
_HOST_SECONDS_PER_LAYER_JOINED_EAGER = 0.0055  # assumed: measured were graphs
_HOST_SECONDS_PER_LAYER_EAGER = 0.0088
# DoRA and quantised matrices launch more kernels a layer, a model without an adapter fewer.
_HOST_EXTRA = 1.35
_HOST_UNPACKING = 1.15  # eight more launches a layer; assumed
_HOST_FULL = 0.68
# Of launching, what recomputing adds: a forward pass, and the bookkeeping around it. Eager, selective checkpointing
# asks for every operation whether its result is kept.
_HOST_RECOMPUTED = 0.65
_HOST_SELECTIVE_EAGER = 2.2
# What any micro-step costs beside: batch copy, tails of kernels, its share of an update. 29.2 ms for 4,096 tokens,
# 108.1 for 16,384 and 214.6 for 32,768, as CUDA graphs on an H200, leave 2.7 ms.
MICRO_STEP_SECONDS = 0.003
# Of a micro-step, the forward pass: to launch it takes the host longer than the backward pass, to run it the GPU less.
# So a GPU that takes longer on the whole may wait all the same: 190 ms in place of 161 for 12 x 2,048 tokens.
_FORWARD_OF_LAUNCHING = 0.62
_FORWARD_OF_COMPUTING = 0.35
# Recomputed forward work, as a share of one forward pass.
_RECOMPUTED: dict[Checkpointing, float] = {"none": 0.0, "selective": 0.04, "full": 1.0}
# What a GPU reads from and writes to CPU memory: PCIe 4.0 x16, pinned, as DeepSpeed reaches it.
_HOST_LINK_GB_PER_SECOND = 16.0
# Parameters that AdamW on a CPU updates in a second: bound by its memory, about 28 bytes a parameter. Assumed.
_HOST_ADAM_PER_SECOND = 1.0e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is computed for each token."""

    shape: ModelShape
    adapter: AdapterKind
    quantization: Quantization
    compute_dtype: Dtype
    compiled: bool
    checkpointing: Checkpointing
    document_tokens: float  # mean length over which attention reaches
    repeated: tuple[str, ...] = ()  # matrices that are multiplied by twice: DoRA's, with dropout
    joined: bool = False  # halves of layers are one operation each (memory.joins_mlp)
    drops: bool = False  # the adapter has dropout


def flops_per_token(workload: Workload, trained_share: float = 1.0) -> float:
    """Useful work: a frozen base needs 4 N (no weight gradients), full fine-tuning 6 N. Recomputing is not counted.

    N are the matrices. Only trained positions pass through the head, so the others' share of its products is not
    counted either; nor are an adapter's own products: 2.5 % of a 0.6B base at rank 16, 0.9 % of an 8B one.
    """
    shape = workload.shape
    head = _flops_per_weight(workload) * trained_share * shape.vocab_size * shape.hidden_size
    attention = 6 * shape.num_layers * shape.num_heads * shape.head_dim * workload.document_tokens
    return _layer_flops(workload) + head + attention


def _flops_per_weight(workload: Workload) -> int:
    return 6 if workload.adapter == "full" else 4


def _layer_flops(workload: Workload, names: Collection[str] | None = None) -> float:
    """Of the matrices of all layers, or of some, for a token."""
    linears = [linear for linear in workload.shape.linears if names is None or linear.name in names]
    weights = workload.shape.num_layers * sum(linear.in_features * linear.out_features for linear in linears)
    return float(_flops_per_weight(workload) * weights)


def seconds_per_token(gpu: Gpu, workload: Workload) -> float | None:
    """Of one GPU that is kept busy; None where its peak is unknown."""
    peak = peak_tflops(gpu, workload.compute_dtype)
    if peak is None:
        return None
    recomputed = _RECOMPUTED[workload.checkpointing]
    forward_share = 1 / 3 if workload.adapter == "full" else 1 / 2
    flops = flops_per_token(workload) + _layer_flops(workload, workload.repeated)
    products = flops * (1 + recomputed * forward_share) / (peak * TERA * _PRODUCT_EFFICIENCY)
    traffic = _traffic_bytes(workload) * (1 + recomputed / 3)
    return products + traffic / (gpu.memory_gb_per_second * 1e9 * _BANDWIDTH_EFFICIENCY)


def host_seconds(workload: Workload) -> float:
    """The least that a micro-step takes, because the host has to launch it."""
    per_layer = _HOST_SECONDS_PER_LAYER_COMPILED if workload.compiled else _HOST_SECONDS_PER_LAYER_EAGER
    if _is_joined(workload):
        per_layer = _HOST_SECONDS_PER_LAYER_JOINED if workload.compiled else _HOST_SECONDS_PER_LAYER_JOINED_EAGER
    unpacks = _unpacks(workload)
    extra = _HOST_EXTRA if workload.adapter == "dora" or (workload.quantization != "none" and not unpacks) else 1.0
    extra *= _HOST_UNPACKING if unpacks else 1.0
    if workload.adapter == "full":
        extra = _HOST_FULL
    if workload.checkpointing == "selective" and not workload.compiled:
        extra *= _HOST_SELECTIVE_EAGER
    elif workload.checkpointing == "full":
        extra *= 1 + _HOST_RECOMPUTED
    return workload.shape.num_layers * per_layer * extra


def launched_seconds(compute: float, launching: float) -> float:
    """Of a micro-step that the host launches while the GPU computes."""
    forward = max(_FORWARD_OF_COMPUTING * compute, _FORWARD_OF_LAUNCHING * launching)
    return forward + max((1 - _FORWARD_OF_COMPUTING) * compute, (1 - _FORWARD_OF_LAUNCHING) * launching)


def _is_joined(workload: Workload) -> bool:
    return workload.joined and workload.checkpointing != "selective"


def _unpacks(workload: Workload) -> bool:
    return workload.quantization == "int4" and _is_joined(workload)


def unpacking_seconds(gpu: Gpu, workload: Workload) -> float:
    """Of a micro-step whatever its size: blocks of NF4 matrices are written whole, for each pass through a layer."""
    if not _unpacks(workload):
        return 0.0
    shape = workload.shape
    weights = shape.num_layers * sum(linear.in_features * linear.out_features for linear in shape.linears)
    num_passes = 2 + _RECOMPUTED[workload.checkpointing]
    moved = weights * num_passes * (NF4_BYTES + DTYPE_BYTES[workload.compute_dtype])
    return moved / (gpu.memory_gb_per_second * 1e9 * _BANDWIDTH_EFFICIENCY)


def _traffic_bytes(workload: Workload) -> float:
    features = sum(linear.in_features + linear.out_features for linear in workload.shape.linears)
    is_joined = _is_joined(workload)
    per_feature = _TRAFFIC_COMPILED if workload.compiled else _TRAFFIC_EAGER
    if is_joined:
        per_feature = _TRAFFIC_JOINED if workload.compiled else _TRAFFIC_JOINED_EAGER
        per_feature *= _DROPPED_TRAFFIC_JOINED[bool(workload.repeated)] if workload.drops else 1.0
    if workload.compute_dtype == "fp32":
        per_feature *= 2
    if workload.adapter == "dora":
        per_feature *= _DORA_TRAFFIC_JOINED if is_joined else _DORA_TRAFFIC
    if workload.quantization != "none" and not _unpacks(workload):
        per_feature *= _QUANTIZED_TRAFFIC
    return features * per_feature * workload.shape.num_layers


def peak_tflops(gpu: Gpu, dtype: Dtype) -> float | None:
    """Of dense products, by the data sheet; None for a GPU that the catalogue does not know."""
    if dtype == "bf16":
        return gpu.bf16_tflops
    if dtype == "fp16":
        return gpu.fp16_tflops
    # TF32 runs at half the 16-bit rate; without it FP32 is far slower still.
    return None if gpu.fp16_tflops is None else gpu.fp16_tflops / (2 if gpu.has_tf32 else 8)


def offload_seconds(offload: Offload, num_micro_steps: int, weight_bytes: float, gradient_bytes: float) -> float:
    """Of one step: state in CPU memory crosses the GPU's PCIe link, and little of that is hidden. Never measured."""
    if offload == "none":
        return 0.0
    # Four bytes a trained parameter for every micro-step: its one sum in FP32, or, as DeepSpeed adds up on the GPU, the
    # sum so far in 16 bits there and back. Weights come back once, in 16 bits.
    moved = gradient_bytes * num_micro_steps + gradient_bytes / 2
    if offload == "optimizer_and_parameters":
        moved += 2 * weight_bytes * num_micro_steps
    num_parameters = gradient_bytes / 4
    return moved / (_HOST_LINK_GB_PER_SECOND * 1e9) + num_parameters / _HOST_ADAM_PER_SECOND
