"""Memory that does not depend on the batch size: weights, adapter, gradients, optimizer state and their buffers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from launcher.base_models.shapes import ModelShape
from launcher.core.choices import (
    DEEPSPEED_STRATEGIES,
    DTYPE_BYTES,
    EIGHT_BIT_OPTIMIZERS,
    NF4_BYTES,
    SHARDED_STRATEGIES,
    UPDATE_CHUNK,
    ZERO_BUCKET_ELEMENTS,
    ZERO_LIVE_ELEMENTS,
    accumulates_in_fp32,
)
from launcher.plan.estimate.memory.recipe import (
    Recipe,
    count_fused_ranks,
    count_fused_weights,
    count_saved,
    count_trainable,
    count_trained_embeddings,
    fuses_lora,
    get_trainable_bytes,
    group_targets,
    has_buckets,
    is_mixed,
    is_mixed_full,
    select_targets,
    trains_head,
)

_FP8_SCALE_BYTES = 4  # one scale per output of a matrix
_BNB_BLOCK = 256  # parameters per fp32 scale of each 8-bit moment


@dataclass(frozen=True, kw_only=True, slots=True)
class Static:
    """Bytes that do not depend on the batch size."""

    weights: float
    adapter: float
    gradients: float
    optimizer: float
    working_set: float
    update: float  # temporary tensors of an update in chunks
    host: float


def estimate_static(shape: ModelShape, recipe: Recipe) -> Static:
    """Estimate the bytes that do not depend on the batch size."""
    trainable = count_trainable(
        shape,
        recipe.adapter,
        recipe.rank,
        recipe.target_modules,
        target_parameters=recipe.target_parameters,
        modules_to_save=recipe.modules_to_save,
    )
    is_zero = recipe.strategy in DEEPSPEED_STRATEGIES
    is_sharded = recipe.strategy in SHARDED_STRATEGIES
    ranks = recipe.num_ranks
    weights = _count_weight_bytes(shape, recipe) / (ranks if is_sharded else 1)
    adapter = 0.0 if recipe.adapter == "full" else float(trainable * get_trainable_bytes(recipe))
    adapter /= ranks if is_sharded else 1
    adapter += _count_border_bytes(shape, recipe)
    gradients = float(trainable * _get_gradient_bytes(recipe))
    if recipe.optimizer_in_bwd:  # those of one layer; the head's are counted with the loss
        gradients = float(shape.layer_parameters * _get_gradient_bytes(recipe))
    if has_buckets(recipe):
        gradients *= 2
    elif is_sharded or recipe.strategy == "zero2":
        gradients /= ranks
    optimizer = _count_optimizer_bytes(shape, recipe, trainable) / (ranks if is_sharded or is_zero else 1)
    working_set = _count_gathered_bytes(shape, recipe) + _count_bucket_bytes(recipe)
    host = 0.0
    if recipe.optimizer == "paged_adamw_8bit":
        host, optimizer = optimizer, 0.0
    if recipe.offload != "none":
        host, optimizer = optimizer + _count_host_gradient_bytes(recipe, trainable), 0.0
        gradients = 0.0  # moved to the CPU bucket by bucket
    if recipe.offload == "optimizer_and_parameters":
        host += weights + adapter
        weights, adapter = 0.0, 0.0
    return Static(
        weights=weights,
        adapter=adapter,
        gradients=gradients,
        optimizer=optimizer,
        working_set=working_set + _count_autocast_bytes(shape, recipe, trainable),
        update=_count_update_bytes(recipe, trainable),
        host=host,
    )


def _get_gradient_bytes(recipe: Recipe) -> int:
    """Return the bytes of an accumulated gradient: in the trained weight's dtype, or FP32 in ZeRO-2 and ZeRO-3."""
    is_zero = recipe.strategy in DEEPSPEED_STRATEGIES
    return 4 if is_zero and accumulates_in_fp32(recipe.strategy, recipe.offload) else get_trainable_bytes(recipe)


def _count_weight_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Count the bytes of the base weights. Only linear layers are quantized; embeddings, head and norms are not."""
    base = DTYPE_BYTES[recipe.base_dtype]
    if recipe.adapter == "full":
        base = get_trainable_bytes(recipe)
    linears = shape.num_layers * sum(linear.in_features * linear.out_features for linear in shape.linears)
    if recipe.fp8_base:
        outputs = shape.num_layers * sum(linear.out_features for linear in shape.linears)
        return float((shape.num_parameters - linears) * base + linears + _FP8_SCALE_BYTES * outputs)
    if recipe.quantization == "none":
        return float(shape.num_parameters * base)
    return (shape.num_parameters - linears) * base + linears * NF4_BYTES


def _count_optimizer_bytes(shape: ModelShape, recipe: Recipe, trainable: int) -> float:
    """Count the bytes of the optimizer state: two moments (none for SGD), and with ZeRO FP32 master weights."""
    is_zero = recipe.strategy in DEEPSPEED_STRATEGIES
    master = 4 * trainable if is_zero and recipe.compute_dtype != "fp32" else 0
    if recipe.optimizer == "sgd":
        return float(master)
    if recipe.optimizer in EIGHT_BIT_OPTIMIZERS:
        blocks = 2 * 4 / _BNB_BLOCK
        embeddings = count_trained_embeddings(shape, recipe)  # their moments are FP32
        quantized = (trainable - embeddings) * (2 + blocks)
        return master + quantized + 8 * embeddings + _count_small_bytes(shape, recipe)
    return float(master + 8 * trainable)


def _count_update_bytes(recipe: Recipe, trainable: int) -> float:
    """Count the temporary bytes of a chunked weight update: an FP32 weight and gradient, and copies of the moments."""
    if recipe.trainable_dtype != "bf16" and not recipe.optimizer_in_bwd and recipe.optimizer != "paged_adamw_8bit":
        return 0.0
    per_element = 16 if recipe.optimizer in EIGHT_BIT_OPTIMIZERS else 28
    return float(per_element * min(UPDATE_CHUNK, trainable))


def _count_small_bytes(shape: ModelShape, recipe: Recipe) -> int:
    """Count the extra bytes of tensors below 4,096 elements, such as norms: bitsandbytes has FP32 moments for them."""
    if recipe.adapter == "full":
        small = shape.num_layers * shape.norm_parameters_per_layer + shape.other_parameters
    elif recipe.adapter == "ia3":
        small = count_trainable(shape, "ia3", None, recipe.target_modules)
    elif recipe.adapter == "dora":
        small = shape.num_layers * sum(linear.out_features for linear in select_targets(shape, recipe.target_modules))
    else:
        small = 0
    return 6 * small


def _count_gathered_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Count the bytes of weights that sharding gathers at once: two layers (one is prefetched), or the embeddings."""
    if recipe.strategy not in SHARDED_STRATEGIES:
        return 0.0
    compute = DTYPE_BYTES[recipe.compute_dtype]
    layer = shape.layer_parameters * compute
    if recipe.quantization == "int4":
        layer = math.ceil(shape.layer_parameters * NF4_BYTES)
    gathered = max(2 * layer, (shape.embedding_parameters + shape.head_parameters) * compute)
    if recipe.strategy == "zero3":  # prefetches until this many parameters are live
        gathered = max(gathered, min(shape.num_parameters, ZERO_LIVE_ELEMENTS) * layer // shape.layer_parameters)
    return float(gathered)


def _count_host_gradient_bytes(recipe: Recipe, trainable: int) -> float:
    """Count the bytes of gradients in CPU memory if state is offloaded: in FP32, and a copy for accumulation."""
    accumulated = _get_gradient_bytes(recipe) if recipe.accumulates_gradients else 0
    return trainable * (4 + accumulated) / recipe.num_ranks


def _count_bucket_bytes(recipe: Recipe) -> float:
    """Count DeepSpeed's reduce buffers, always at full size: one in FP32 with ZeRO-3, two (overlapped) otherwise.

    ZeRO-1 and -2 have them in the compute dtype, and an FP32 copy of a 16-bit one while it is reduced.
    """
    if recipe.strategy not in DEEPSPEED_STRATEGIES:
        return 0.0
    compute = DTYPE_BYTES[recipe.compute_dtype]
    per_element = 4 if recipe.strategy == "zero3" else 2 * compute + (4 if compute < 4 else 0)
    return float(per_element * ZERO_BUCKET_ELEMENTS)


def _count_autocast_bytes(shape: ModelShape, recipe: Recipe, trainable: int) -> float:
    """Count autocast's copies of fp32 weights, and a separate gradient of the head if it is trained."""
    compute = DTYPE_BYTES[recipe.compute_dtype]
    if recipe.strategy in SHARDED_STRATEGIES:
        return 0.0  # sharded weights are gathered in the compute dtype and freed: counted there
    head = shape.embedding_parameters * compute if trains_head(shape, recipe) else 0
    if recipe.adapter != "full":
        adapter = trainable - sum(count_saved(shape, recipe.modules_to_save))
        copies = adapter * compute if is_mixed(recipe) and not fuses_lora(recipe) else 0
        return float(copies + (2 * head if is_mixed(recipe) else head))
    # with checkpointing, copies of the layers' weights are freed before the backward pass: _count_loss_bytes adds them
    layers = shape.num_layers * shape.layer_parameters * compute if recipe.checkpointing == "none" else 0
    if is_mixed_full(recipe):
        return float(2 * head + layers)
    return float(2 * head if is_mixed(recipe) else head)


def _count_border_bytes(shape: ModelShape, recipe: Recipe) -> int:
    """Count the bytes of the rows and columns that fused weights reserve for adapters, in the compute dtype.

    With an FP8 base there is a second copy of B, divided by the scales of the base.
    """
    if not fuses_lora(recipe):
        return 0
    elements = 0
    for group in group_targets(shape, recipe):
        own = sum(linear.in_features * linear.out_features for linear in group)
        elements += count_fused_weights(group, recipe) - own
        if recipe.fp8_base:
            outputs = sum(linear.out_features for linear in group)
            elements += outputs * count_fused_ranks(recipe.rank or 0, len(group))
    return elements * DTYPE_BYTES[recipe.compute_dtype] * shape.num_layers
