"""Estimate of step time from shapes and a GPU's data sheet: matmuls, memory traffic and kernel launches.

A two-term roofline: matmuls run at a fraction of the GPU's peak, element-wise ops at a fraction of its memory
bandwidth. The coefficients are fitted to runs on one H200 (benchmarks/results/speed_h200.json). Estimates for other
GPUs are scaled by their data sheets, and the plan says so.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from launcher.base_models.shapes import ModelShape
from launcher.core.choices import DTYPE_BYTES, NF4_BYTES, AdapterKind, Checkpointing, Dtype, Offload, Quantization
from launcher.core.units import TERA
from launcher.hardware.model import Gpu

# Fraction of the stated peak that large BF16 matmuls reach; 788 of 989 TFLOPS for one 8,192-cubed matmul on an H200.
_MATMUL_EFFICIENCY = 0.80
# FP8 matmuls with LoRA's term, relative to BF16: 1.4 to 2.0 on an H200, by shape. The highest, because the kernels
# around them move fewer bytes, too. Within 5 % of three trainings (0.6B with 16 and 2 sequences, 8B; 2026-11-19), and
# within 1 % of two full ones (0.6B, 1.7B).
_FP8_SPEEDUP = 2.0
# Fraction of the stated memory bandwidth that element-wise kernels reach.
_BANDWIDTH_EFFICIENCY = 0.8
# Bytes moved per token, layer and feature (in + out of every matrix), forward and backward, in 16-bit precision.
_TRAFFIC_COMPILED = 30.0
_TRAFFIC_COMPILED_FULL = 23.0  # without an adapter
_TRAFFIC_FUSED = 20.5  # attention and MLP blocks are fused ops; 19 (0.6B) to 23 (8B) with our own attention
_TRAFFIC_FUSED_EAGER = 22.0  # 21.5 (0.6B) to 24.5 (8B)
_TRAFFIC_EAGER = 84.0
# DoRA computes the row norms of each adapted matrix every step and scales its output.
_DORA_TRAFFIC = 1.25
_DORA_TRAFFIC_FUSED = {True: 1.13, False: 1.39}  # compiled, eager
# Dropout inside fused ops: its outputs are written, read and recomputed; DoRA (True) adds a second matmul. Counted;
# later measurements agree within 8 %.
_DROPOUT_TRAFFIC_FUSED = {False: 1.18, True: 1.35}
# With bitsandbytes, matrix by matrix. Fused layers use our own NF4 kernel: see estimate_dequantize_seconds.
_QUANTIZED_TRAFFIC = 1.08
# Host time to launch one layer's kernels, forward and backward: the minimum time of a micro-step of any size.
_HOST_SECONDS_PER_LAYER_COMPILED = 0.0048
_HOST_SECONDS_PER_LAYER_FUSED = 0.0042
_HOST_SECONDS_PER_LAYER_FUSED_EAGER = 0.0055  # assumed: only CUDA graphs were measured
_HOST_SECONDS_PER_LAYER_EAGER = 0.0088
# DoRA and quantized matrices launch more kernels per layer, a model without an adapter fewer.
_HOST_EXTRA = 1.35
_HOST_DEQUANTIZATION = 1.15  # eight more launches per layer; assumed
_HOST_FULL = 0.68
# Launch time that recomputation adds: a forward pass and its bookkeeping. In eager mode, selective checkpointing
# decides for every op whether to save its output.
_HOST_RECOMPUTED = 0.65
_HOST_SELECTIVE_EAGER = 2.2
# Fixed cost of a micro-step: batch copy, kernel tails, its part of the optimizer step. Measured with CUDA graphs on an
# H200: 29.2 ms for 4,096 tokens, 108.1 for 16,384 and 214.6 for 32,768, which gives 2.7 ms.
MICRO_STEP_SECONDS = 0.003
# The forward pass's fraction of a micro-step: the larger part of launching, the smaller part of computing. A GPU can
# therefore idle although it needs more time in total than the host: 190 ms instead of 161 for 12 x 2,048 tokens.
_FORWARD_OF_LAUNCHING = 0.62
_FORWARD_OF_COMPUTING = 0.35
# Recomputed work, as a fraction of one forward pass.
_RECOMPUTED: dict[Checkpointing, float] = {"none": 0.0, "selective": 0.04, "full": 1.0}
# Bandwidth between GPU and CPU memory that DeepSpeed's offloading reaches with PCIe 4.0 x16.
_HOST_LINK_GB_PER_SECOND = 16.0
# Share of the nominal bandwidth that copies of moments reach, with the gaps between chunks. From one run on an H200
# (2026-11-18): 8B with paged moments, 2,721 tokens/s.
_HOST_COPY_EFFICIENCY = 0.7
# Bytes that an update of FP32 weights moves per weight on the GPU: norm and clipping of gradients (12), moments and
# weights (28), zeroed gradients (4), casts (8). Counted.
_UPDATE_BYTES = 52
# Bytes that training/engine/chunked_adamw.py moves per weight on the GPU: FP32 copies, moments, rounding. Counted.
_CHUNKED_UPDATE_BYTES = 64
# Parameters per second that AdamW updates on a CPU: memory-bound, about 28 bytes per parameter. Assumed.
_HOST_ADAM_PER_SECOND = 1.0e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Settings that determine the computation per token."""

    shape: ModelShape
    adapter: AdapterKind
    quantization: Quantization
    compute_dtype: Dtype
    compiled: bool
    checkpointing: Checkpointing
    document_tokens: float  # mean document length, to which attention is limited
    repeated_modules: tuple[str, ...] = ()  # matrices with a second matmul: DoRA's, with dropout
    fused: bool = False  # attention and MLP blocks are fused ops (fuses_mlp in memory/recipe.py)
    has_dropout: bool = False  # the adapter has dropout
    fp8_base: bool = False  # matmuls of the frozen base in FP8
    fp8_layers: bool = False  # matmuls of trained layers in FP8, except for the weights' gradients
    trained_share: float = 1.0  # of the tokens: only these pass through the head


def compute_flops_per_token(workload: Workload) -> float:
    """Return the model FLOPs per token: 4 N with a frozen base (no weight gradients), 6 N for full fine-tuning.

    N is the number of weights in matrices. Recomputation is not counted. Only trained positions pass through the head,
    so only their fraction counts. The adapter's own matmuls are omitted: 2.5 % of a 0.6B base at rank 16, 0.9 % of 8B.
    """
    shape = workload.shape
    head = _get_flops_per_weight(workload) * workload.trained_share * shape.vocab_size * shape.hidden_size
    attention = 6 * shape.num_layers * shape.num_heads * shape.head_dim * workload.document_tokens
    return _count_layer_flops(workload) + head + attention


def _get_flops_per_weight(workload: Workload) -> int:
    return 6 if workload.adapter == "full" else 4


def _count_layer_flops(workload: Workload, names: Collection[str] | None = None) -> float:
    """Return the FLOPs per token of all matrices in all layers, or of the named ones."""
    linears = [linear for linear in workload.shape.linears if names is None or linear.name in names]
    experts = workload.shape.experts if names is None else None
    per_layer = sum(linear.in_features * linear.out_features for linear in linears)
    per_layer += 0 if experts is None else experts.active_weights
    return float(_get_flops_per_weight(workload) * workload.shape.num_layers * per_layer)


def estimate_seconds_per_token(gpu: Gpu, workload: Workload) -> float | None:
    """Estimate the seconds per token on one GPU that never idles; None if its peak is unknown."""
    peak = get_peak_tflops(gpu, workload.compute_dtype)
    if peak is None:
        return None
    recomputed = _RECOMPUTED[workload.checkpointing]
    forward_share = 1 / 3 if workload.adapter == "full" else 1 / 2
    flops = compute_flops_per_token(workload) + _count_layer_flops(workload, workload.repeated_modules)
    if workload.fp8_base or workload.fp8_layers:
        layers = _count_layer_flops(workload) + _count_layer_flops(workload, workload.repeated_modules)
        in_fp8 = 2 / 3 if workload.fp8_layers else 1.0  # the rest is the gradients of weights
        flops -= layers * in_fp8 * (1 - 1 / _FP8_SPEEDUP)
    matmul_seconds = flops * (1 + recomputed * forward_share) / (peak * TERA * _MATMUL_EFFICIENCY)
    traffic_bytes = _count_traffic_bytes(workload) * (1 + recomputed / 3)
    return matmul_seconds + traffic_bytes / (gpu.memory_gb_per_second * 1e9 * _BANDWIDTH_EFFICIENCY)


def estimate_launch_seconds(workload: Workload) -> float:
    """Estimate how long the host takes to launch the kernels of a micro-step, which is its minimum time."""
    per_layer = _HOST_SECONDS_PER_LAYER_COMPILED if workload.compiled else _HOST_SECONDS_PER_LAYER_EAGER
    if _uses_fused_layers(workload):
        per_layer = _HOST_SECONDS_PER_LAYER_FUSED if workload.compiled else _HOST_SECONDS_PER_LAYER_FUSED_EAGER
    dequantizes = _dequantizes_nf4(workload)
    extra = _HOST_EXTRA if workload.adapter == "dora" or (workload.quantization != "none" and not dequantizes) else 1.0
    extra *= _HOST_DEQUANTIZATION if dequantizes else 1.0
    if workload.adapter == "full":
        extra = _HOST_FULL
    if workload.checkpointing == "selective" and not workload.compiled:
        extra *= _HOST_SELECTIVE_EAGER
    elif workload.checkpointing == "full":
        extra *= 1 + _HOST_RECOMPUTED
    return workload.shape.num_layers * per_layer * extra


def overlap_launch(compute: float, launching: float) -> float:
    """Return the time of a micro-step whose kernels the host launches while the GPU computes."""
    forward = max(_FORWARD_OF_COMPUTING * compute, _FORWARD_OF_LAUNCHING * launching)
    return forward + max((1 - _FORWARD_OF_COMPUTING) * compute, (1 - _FORWARD_OF_LAUNCHING) * launching)


def _uses_fused_layers(workload: Workload) -> bool:
    return workload.fused and workload.checkpointing != "selective"


def _dequantizes_nf4(workload: Workload) -> bool:
    return workload.quantization == "int4" and _uses_fused_layers(workload)


def estimate_dequantize_seconds(gpu: Gpu, workload: Workload) -> float:
    """Estimate the time per micro-step to dequantize all NF4 weights, once per pass through a layer."""
    if not _dequantizes_nf4(workload):
        return 0.0
    shape = workload.shape
    weights = shape.num_layers * sum(linear.in_features * linear.out_features for linear in shape.linears)
    num_passes = 2 + _RECOMPUTED[workload.checkpointing]
    moved = weights * num_passes * (NF4_BYTES + DTYPE_BYTES[workload.compute_dtype])
    return moved / (gpu.memory_gb_per_second * 1e9 * _BANDWIDTH_EFFICIENCY)


def _count_traffic_bytes(workload: Workload) -> float:
    features = sum(linear.in_features + linear.out_features for linear in workload.shape.linears)
    if (experts := workload.shape.experts) is not None:
        features += experts.num_active * (2 * experts.hidden_size + 3 * experts.intermediate_size)
    is_fused = _uses_fused_layers(workload)
    compiled = _TRAFFIC_COMPILED_FULL if workload.adapter == "full" else _TRAFFIC_COMPILED
    per_feature = compiled if workload.compiled else _TRAFFIC_EAGER
    if is_fused:
        per_feature = _TRAFFIC_FUSED if workload.compiled else _TRAFFIC_FUSED_EAGER
        per_feature *= _DROPOUT_TRAFFIC_FUSED[bool(workload.repeated_modules)] if workload.has_dropout else 1.0
    if workload.compute_dtype == "fp32":
        per_feature *= 2
    if workload.adapter == "dora":
        per_feature *= _DORA_TRAFFIC_FUSED[workload.compiled] if is_fused else _DORA_TRAFFIC
    if workload.quantization != "none" and not _dequantizes_nf4(workload):
        per_feature *= _QUANTIZED_TRAFFIC
    return features * per_feature * workload.shape.num_layers


def get_peak_tflops(gpu: Gpu, dtype: Dtype) -> float | None:
    """Return the data sheet's peak for dense matmuls; None if the catalogue does not have the GPU."""
    if dtype == "bf16":
        return gpu.bf16_tflops
    if dtype == "fp16":
        return gpu.fp16_tflops
    # TF32 runs at half the 16-bit rate; plain FP32 is far slower.
    return None if gpu.fp16_tflops is None else gpu.fp16_tflops / (2 if gpu.has_tf32 else 8)


def estimate_offload_seconds(
    offload: Offload, num_micro_steps: int, weight_bytes: float, gradient_bytes: float
) -> float:
    """Estimate the time per step that offload adds (PCIe transfers without overlap, AdamW on the CPU); not measured."""
    if offload == "none":
        return 0.0
    # Four bytes per trained parameter and micro-step: the gradient in FP32, or, because DeepSpeed accumulates on the
    # GPU, the 16-bit sum in both directions. Updated weights are copied back once, in 16 bits.
    moved = gradient_bytes * num_micro_steps + gradient_bytes / 2
    if offload == "optimizer_and_parameters":
        moved += 2 * weight_bytes * num_micro_steps
    num_parameters = gradient_bytes / 4
    return moved / (_HOST_LINK_GB_PER_SECOND * 1e9) + num_parameters / _HOST_ADAM_PER_SECOND


def estimate_update_seconds(gpu: Gpu, num_trained: float) -> float:
    """Estimate the time of a weight update in FP32 by the GPU."""
    return num_trained * _UPDATE_BYTES / (gpu.memory_gb_per_second * 1e9 * _BANDWIDTH_EFFICIENCY)


def estimate_chunked_update_seconds(gpu: Gpu, num_trained: float, paged_bytes: float) -> float:
    """Estimate the time of a chunked weight update; moments in CPU memory are copied both ways, without overlap."""
    update = num_trained * _CHUNKED_UPDATE_BYTES / (gpu.memory_gb_per_second * 1e9 * _BANDWIDTH_EFFICIENCY)
    return update + 2 * paged_bytes / (gpu.host_link_gb_per_second * 1e9 * _HOST_COPY_EFFICIENCY)
