"""Memory of a micro-batch: saved activations, the loss, and temporary tensors of one layer's backward pass."""

from __future__ import annotations

from launcher.base_models.families import FAMILIES
from launcher.base_models.shapes import ModelShape
from launcher.core.choices import DTYPE_BYTES, SHARDED_STRATEGIES
from launcher.plan.estimate.memory.recipe import (
    SELECTIVE_MIN_INNER,
    Recipe,
    count_adapter_ranks,
    count_fused_weights,
    count_loss_chunk,
    count_stacked_weights,
    fuses_lora,
    fuses_mlp,
    fuses_qkv,
    get_input_name,
    group_targets,
    has_input_copies,
    has_large_chunks,
    is_mixed_full,
    list_block_members,
    list_gates,
    select_stacks,
    select_targets,
    trains_head,
)

# Which tensors autograd saves was read from the modules of transformers and PEFT and checked against measured slopes.
# The coefficients of this block are fitted to benchmarks/results/memory_h200.json, without the part that
# tests/unit/plan/estimate/test_memory.py holds out (torch 2.11, transformers 5.17, PEFT 0.21, bitsandbytes 0.50, one
# H200). Each is keyed by `compiled`.
_OUTSIDE_BYTES_PER_HIDDEN = {False: 6.5, True: 9.0}  # per token: final norm, hidden state and their gradients
_BACKWARD_BYTES_PER_INTERMEDIATE = {  # per token: live gradients inside one MLP
    "fused": {False: 6.0, True: 6.5},
    "fp8": {False: 4.5, True: 4.5},  # gradients of gate and up in FP8
    "lora": {False: 6.0, True: 7.0},
    "lora without input copies": {False: 2.0, True: 6.5},
    "dora": {False: 11.5, True: 15.0},  # compiled: based on one checkpointed measurement
    "full": {False: 6.0, True: 3.0},
    "full fp8": {False: 6.0, True: 3.0},
}
# With checkpointing: activations per token already freed at the peak (compiled: based on one measurement).
_FREED_BYTES_PER_INTERMEDIATE = {False: 3.5, True: 2.5}
_DORA_BYTES_PER_WEIGHT = {False: 15.0, True: 2.0}  # of the largest adapted matrix, rebuilt in fp32

# Counted, or identical in all measurements.
_BYTES_PER_LOGIT = 12  # log-softmax kept in fp32, its gradient, the logits' gradient: three fp32
_BYTES_PER_CHUNKED_LOGIT = 14  # the same plus the logits
_TRAINED_HEAD_BYTES = 4.4  # per weight of the head, in addition to its copy and gradient in the compute dtype
# Compiled, fp32 weights: part of the residual stream is kept in fp32 (one measured size).
_MIXED_FULL_BYTES_PER_HIDDEN = 3
# DoRA with dropout: the gradient of gate_proj or up_proj through the scaled output, in addition to its own. Counted.
_DROPOUT_DORA_BYTES_PER_GATE = 2.0
_PADDING_FACTOR = 1.5  # mean of lengths rounded up to a power of two; counted, not measured
# Gradients of tokens in the order of their experts that are alive together in the backward pass. Fitted to three
# measurements of Qwen3-MoE on an H200 (2026-11-17), which are within 3 %.
_ROUTED_GRADIENTS = 1.5
_ROUTER_BYTES = 4 * 8  # per token and expert in use: four int64 indices of the dispatch


def estimate_step_memory(shape: ModelShape, recipe: Recipe, updated: float) -> tuple[float, float, float]:
    """Estimate activations, tensors of the loss, and temporary tensors of the last layer's backward pass.

    `updated` are the bytes of gradients and temporary tensors of updates in the backward pass. A matrix is updated when
    the temporary tensors of its own backward pass are freed, so only the larger of the two counts.
    """
    tokens = recipe.micro_batch_size * recipe.sequence_length
    compute = DTYPE_BYTES[recipe.compute_dtype]
    outside = tokens * (_OUTSIDE_BYTES_PER_HIDDEN[recipe.compiled] * compute / 2 * shape.hidden_size)
    rotary = tokens * 2 * compute * shape.head_dim
    kept, recomputed = _count_activation_bytes(shape, recipe, tokens)
    fused = recipe.compiled or fuses_mlp(shape, recipe)
    backward = _BACKWARD_BYTES_PER_INTERMEDIATE[_get_backward_kind(recipe)][fused]
    if fuses_lora(recipe) and recipe.adapter == "dora" and recipe.adapter_dropout > 0:
        backward += _DROPOUT_DORA_BYTES_PER_GATE * (1 if _list_corrected_gates(shape, recipe) == ["up_proj"] else 2)
    transient = tokens * backward * compute / 2 * shape.intermediate_size
    transient += _count_rebuilt_weight_bytes(shape, recipe)
    if shape.experts is not None:  # gradients of routed tokens, and of the stacks with LoRA
        transient += tokens * _ROUTED_GRADIENTS * compute * shape.experts.num_active * shape.hidden_size
        transient += compute * count_stacked_weights(shape, recipe)
    transient = max(transient, updated)
    # the loss has finished when the first layer is recomputed for its backward pass: only the larger one counts
    loss = max(0.0, _count_loss_bytes(shape, recipe, tokens) - recomputed - transient)
    return kept + recomputed + outside + rotary, loss, transient


def _get_backward_kind(recipe: Recipe) -> str:
    if fuses_lora(recipe):
        return "fp8" if recipe.fp8_base and recipe.adapter == "lora" and not recipe.adapter_dropout else "fused"
    if recipe.fp8_layers:
        return "full fp8"
    if recipe.adapter in ("full", "dora"):
        return recipe.adapter
    return "lora" if has_input_copies(recipe) else "lora without input copies"


def _count_rebuilt_weight_bytes(shape: ModelShape, recipe: Recipe) -> float:
    if fuses_lora(recipe):
        return float(_count_dequantized_bytes(shape, recipe))
    if recipe.fp8_layers:
        return float(_count_rounded_weight_bytes(shape))
    largest = max(linear.in_features * linear.out_features for linear in shape.linears)
    rebuilt = 0.0
    if recipe.adapter == "dora":
        rebuilt += largest * _DORA_BYTES_PER_WEIGHT[recipe.compiled]
    if recipe.quantization != "none":
        rebuilt += largest * DTYPE_BYTES[recipe.compute_dtype]
    return rebuilt


def _count_rounded_weight_bytes(shape: ModelShape) -> int:
    """Count the bytes of the FP8 codes of the largest weights with a common input, and of the transposed codes."""
    sizes: dict[str, int] = {}
    for linear in shape.linears:
        name = get_input_name(linear.name)
        sizes[name] = sizes.get(name, 0) + linear.in_features * linear.out_features
    return 2 * max(sizes.values())


def _count_dequantized_bytes(shape: ModelShape, recipe: Recipe) -> int:
    """Count the bytes of the largest dequantized NF4 weight (two in a fused MLP), or transposed FP8 weight."""
    if recipe.fp8_base:  # codes of the largest fused weight, transposed
        return max(count_fused_weights(group, recipe) for group in group_targets(shape, recipe))
    if recipe.quantization != "int4":
        return 0
    sizes = {group[0].name: count_fused_weights(group, recipe) for group in group_targets(shape, recipe)}
    at_once = [*sizes.values(), max(linear.in_features * linear.out_features for linear in shape.linears)]
    if fuses_mlp(shape, recipe):
        at_once.append(sizes[list_gates(shape)[0]] + sizes["down_proj"])
    return max(at_once) * DTYPE_BYTES[recipe.compute_dtype]


def _count_loss_bytes(shape: ModelShape, recipe: Recipe, tokens: int) -> float:
    """Return the memory that computing the loss needs.

    With checkpointing, autocast's copies of the weights have not been freed when the loss is computed.
    """
    copies = 0
    is_unsharded = recipe.strategy not in SHARDED_STRATEGIES
    if is_unsharded and is_mixed_full(recipe) and recipe.checkpointing != "none" and not recipe.compiled:
        copies = shape.num_layers * shape.layer_parameters * DTYPE_BYTES[recipe.compute_dtype]
    if recipe.loss_kernel == "full_logits":
        return float(copies + tokens * shape.vocab_size * _BYTES_PER_LOGIT)
    chunk = count_loss_chunk(shape.vocab_size, is_large=has_large_chunks(shape, recipe))
    logits = min(tokens, chunk) * shape.vocab_size
    if recipe.loss_kernel == "chunked":
        return float(copies + logits * _BYTES_PER_CHUNKED_LOGIT)
    held = float(logits * DTYPE_BYTES[recipe.compute_dtype])  # fused: gradients overwrite the chunk's logits
    if trains_head(shape, recipe):  # the head's gradient in fp32
        held = max(held, _TRAINED_HEAD_BYTES * shape.vocab_size * shape.hidden_size)
    return float(copies + held)


def _count_activation_bytes(shape: ModelShape, recipe: Recipe, tokens: int) -> tuple[float, float]:
    """Return the bytes of activations that all layers save, and those of the one layer that is recomputed at a time.

    The minima matter for one or two layers: selective checkpointing costs at most as much as none, full as selective.
    """
    layer = tokens * _count_layer_bytes(shape, recipe) + _count_score_bytes(shape, recipe)
    layer += _count_saved_weight_bytes(shape, recipe)
    none = shape.num_layers * layer
    if recipe.checkpointing == "none":
        return none, 0.0
    boundary, matmuls, reused = _count_kept_bytes(shape, recipe)
    selective = shape.num_layers * tokens * (boundary + matmuls)
    recomputed = min(none - selective, layer - tokens * reused)
    if recipe.checkpointing == "selective":
        return (selective, recomputed) if recomputed > 0 else (none, 0.0)
    full = shape.num_layers * tokens * boundary
    if (
        fuses_lora(recipe) and recipe.adapter == "lora"
    ):  # a block's outputs are freed before the next block's backward pass
        fused = recipe.compiled or fuses_mlp(shape, recipe)
        layer -= tokens * _FREED_BYTES_PER_INTERMEDIATE[fused] * shape.intermediate_size
    return full, max(0.0, min(none - full, layer))


def _count_layer_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Count the bytes that one layer saves per token.

    Eager mode saves an fp32 input per norm; the compiler and fused ops recompute norms and SiLU.
    """
    compute = DTYPE_BYTES[recipe.compute_dtype]
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, intermediate = shape.hidden_size, shape.intermediate_size
    num_norms = max(2, shape.norm_parameters_per_layer // hidden)
    has_head_norms = shape.has_qk_norm
    attention = compute * (2 * query + 2 * key) + 4 * shape.num_heads + _count_backend_bytes(recipe, query, key)
    if {"qkv_proj", "query_key_value"} & set(shape.linear_names):  # values are a view of queries, keys and values
        attention += compute * (query + key)
    if recipe.compiled:
        # With a norm before and after each block, the compiler recomputes the input of the second block.
        family = FAMILIES.get(shape.model_type)
        num_saved = num_norms - (family is not None and family.norms_per_layer == 4)
        norms = compute * (num_saved * hidden + (query + key if has_head_norms else 0))
        norms += _MIXED_FULL_BYTES_PER_HIDDEN * hidden if is_mixed_full(recipe) else 0
        mlp = compute * intermediate * (2 if shape.gated_mlp else 1)
    else:
        fuses_heads, fuses_gates = fuses_qkv(shape, recipe), fuses_mlp(shape, recipe)
        norms = 4 * num_norms * hidden
        if fuses_lora(recipe):  # norms are part of fused blocks
            norms -= (4 - compute) * hidden * (fuses_heads + fuses_gates)
        norms += (compute if fuses_heads else 4) * (query + key) if has_head_norms else 0
        if recipe.adapter == "full":  # a trained norm also saves its normalized input, Gemma's in FP32
            is_gemma = shape.model_type.startswith("gemma")
            norms += num_norms * hidden * (4 if is_gemma or is_mixed_full(recipe) else compute)
            norms += (4 if is_gemma else compute) * (query + key) if has_head_norms and not fuses_heads else 0
        mlp = compute * intermediate * (2 if fuses_gates or not shape.gated_mlp else 3)
    small = 4 * (num_norms + shape.num_heads + shape.num_kv_heads)  # reciprocal roots
    experts = _count_expert_bytes(shape, recipe)
    inputs = _count_input_bytes(shape, recipe)
    return norms + attention + mlp + small + inputs + experts + _count_variant_bytes(shape, recipe)


def _count_expert_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Count the bytes per token that the dispatch to experts saves: their outputs, indices and FP32 router scores.

    The MLP's own tensors are counted with `intermediate_size`. Experts with LoRA save their inputs as well.
    """
    experts = shape.experts
    if experts is None:
        return 0.0
    compute = DTYPE_BYTES[recipe.compute_dtype]
    stacks = select_stacks(shape, recipe.target_parameters)
    routed = compute * (shape.hidden_size + sum(stack.in_features for stack in stacks)) + _ROUTER_BYTES
    if experts.has_bias and not recipe.compiled:  # gpt-oss: both halves are clamped and shifted, which saves them again
        routed += 3 * compute * experts.intermediate_size
    return float(experts.num_active * routed + 2 * 4 * experts.num_experts)


def _count_backend_bytes(recipe: Recipe, query: int, key: int) -> float:
    """Count the bytes per token that SDPA and eager attention save in addition to what other backends save.

    Documents are grouped by length and padded, keys and values repeated for every query head; outputs are copied back.
    """
    if recipe.attention not in ("sdpa", "eager"):
        return 0.0
    padding_factor = max(_PADDING_FACTOR, _round_up(recipe.sequence_length) / recipe.sequence_length)
    grouped = padding_factor * 4 * query + query
    return DTYPE_BYTES[recipe.compute_dtype] * (grouped - (2 * query + 2 * key))


def _count_input_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Count the bytes per token of the inputs that trained and adapted matrices save; other matrices save none."""
    if recipe.adapter == "ia3":
        return 0.0
    compute = DTYPE_BYTES[recipe.compute_dtype]
    targets = shape.linears if recipe.adapter == "full" else select_targets(shape, recipe.target_modules)
    ranks = compute * count_adapter_ranks(shape, recipe)
    has_copies = has_input_copies(recipe)
    total = sum(linear.in_features for linear in targets)
    if recipe.adapter_dropout > 0 and fuses_lora(recipe):
        return _count_dropout_bytes(shape, recipe) + ranks
    if recipe.adapter_dropout > 0 and recipe.adapter != "full":
        is_fp32 = recipe.compiled and recipe.adapter == "dora" and has_copies
        return total * (1 + (4 if is_fp32 else compute)) + ranks
    if has_copies and not recipe.compiled:
        return total * compute + ranks
    if is_mixed_full(recipe) and not recipe.compiled:  # fp32 norms: each matrix casts its input separately
        return compute * sum(linear.in_features for linear in targets if linear.name != "o_proj")
    inputs = {get_input_name(linear.name): linear.in_features for linear in targets}
    if not has_copies:
        inputs.pop("o_proj", None)  # the attention's output is already saved
    if fuses_mlp(shape, recipe):
        inputs.pop("down_proj")
    total = compute * sum(inputs.values())
    if recipe.fp8_base:  # fused ops save their input in FP8, with a scale
        fused = (fuses_qkv(shape, recipe), "q_proj"), (fuses_mlp(shape, recipe), list_gates(shape)[0])
        total -= sum((compute - 1) * inputs[name] - 4 for is_fused, name in fused if is_fused)
    return total + ranks


def _count_dropout_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Count the bytes per token of inputs after dropout, and of masks, which fused ops recompute from a seed."""
    compute, total = DTYPE_BYTES[recipe.compute_dtype], 0.0
    for group in group_targets(shape, recipe):
        name, size = get_input_name(group[0].name), group[0].in_features
        is_fused = fuses_qkv(shape, recipe) if name in ("q_proj", "o_proj") else fuses_mlp(shape, recipe)
        if not is_fused:
            total += (compute + 1) * size
        elif name not in ("o_proj", "down_proj"):  # saved by the attention, and recomputed from SwiGLU
            total += compute * size
    return total


def _count_variant_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Count the bytes per token that DoRA and IA3 save in addition to LoRA: the outputs that they scale."""
    extra = 0.0
    if recipe.adapter == "dora":
        extra += _count_scaled_bytes(shape, recipe)
    if recipe.adapter == "ia3":
        extra += _count_ia3_bytes(shape, recipe)
    return extra


def _count_ia3_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Count the bytes that IA3 keeps per token: outputs before they are scaled, and FP32 copies of scaled inputs.

    The compiler saves an output only once if it can recompute the scaled one, as for the MLP. The inputs of attention
    and the attention block's output are saved before and after scaling; with a QK-norm, queries and keys are already
    counted. On an H200 (2026-11-16): 18.4 GiB measured and 18.5 estimated for 8 x 2,048 tokens of Qwen3-0.6B.
    """
    compute, targets = DTYPE_BYTES[recipe.compute_dtype], select_targets(shape, recipe.target_modules)
    if not recipe.compiled:
        return float(sum(4 * t.in_features if t.name == "down_proj" else compute * t.out_features for t in targets))
    kept = {"o_proj", "dense", "qkv_proj", "query_key_value", *_list_scaled_heads(shape, recipe, rescales=True)}
    return float(compute * sum(linear.out_features for linear in targets if linear.name in kept))


def _count_scaled_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Count the bytes per token of the outputs that DoRA keeps before they are scaled."""
    compute, query = DTYPE_BYTES[recipe.compute_dtype], shape.num_heads * shape.head_dim
    results = sum(linear.out_features for linear in select_targets(shape, recipe.target_modules))
    if not fuses_lora(recipe):
        return float(compute * (results + query) if recipe.compiled else 2 * compute * results)
    # The compiler recomputes the scaled output from the unscaled one. With dropout the base's output is added, and the
    # sum is saved as well.
    rescales = recipe.compiled and recipe.adapter_dropout == 0
    kept = ["o_proj", *_list_scaled_heads(shape, recipe, rescales)]
    if fuses_mlp(shape, recipe):
        kept += [] if rescales else ["down_proj"]
        kept += _list_corrected_gates(shape, recipe)
    elif not rescales:
        kept += [*list_gates(shape), "down_proj"]
    members = list_block_members(shape, recipe)
    return float(compute * sum(linear.out_features * kept.count(linear.name) for linear in members))


def _list_corrected_gates(shape: ModelShape, recipe: Recipe) -> list[str]:
    """Return the matrices of a fused MLP whose outputs have a dropout correction term; gate_proj only if adapted."""
    if recipe.adapter_dropout == 0 or not fuses_mlp(shape, recipe):
        return []
    targets = {linear.name for linear in select_targets(shape, recipe.target_modules)}
    return [name for name in list_gates(shape) if name != "gate_proj" or name in targets]


def _list_scaled_heads(shape: ModelShape, recipe: Recipe, rescales: bool) -> list[str]:
    """Return the names of the Q, K and V projections whose scaled outputs are saved, one entry per saved copy.

    Fused ops save queries and keys before scaling (a QK-norm has already counted them) and values also after it; with
    dropout the correction terms are saved, too.
    """
    heads = ["q_proj", "k_proj", "v_proj"]
    if not rescales and not fuses_qkv(shape, recipe):
        return heads
    kept = ["v_proj"] if shape.has_qk_norm else heads
    return kept + (heads if recipe.adapter_dropout > 0 else [])


def _count_saved_weight_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Count the bytes of weight copies that a layer saves: of adapted experts, and of PEFT's DoRA with dropout."""
    targets = select_targets(shape, recipe.target_modules)
    num_weights = sum(linear.in_features * linear.out_features for linear in targets)
    copies = count_stacked_weights(shape, recipe)
    if recipe.adapter == "dora" and recipe.adapter_dropout > 0 and not fuses_lora(recipe):
        copies += num_weights
    return float(DTYPE_BYTES[recipe.compute_dtype] * copies)


def _count_kept_bytes(shape: ModelShape, recipe: Recipe) -> tuple[float, float, float]:
    """Return bytes per token of a layer's input, of outputs saved by selective checkpointing, and of those reused."""
    compute = DTYPE_BYTES[recipe.compute_dtype]
    query = shape.num_heads * shape.head_dim
    boundary = shape.hidden_size * (4 if is_mixed_full(recipe) else compute)
    results = sum(linear.out_features for linear in shape.linears)
    targets = select_targets(shape, recipe.target_modules)
    matmuls = compute * (results + query) + 4 * shape.num_heads
    if recipe.compiled:
        matmuls -= compute * shape.hidden_size  # the layer's last matmul is not needed again
    matmuls += compute * (recipe.rank or 0) * len(targets)
    reused = matmuls - 2 * compute * shape.hidden_size
    if recipe.rank is not None and recipe.rank >= SELECTIVE_MIN_INNER:
        matmuls += compute * sum(linear.out_features for linear in targets)
    return boundary, matmuls, reused


def _count_score_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Count the attention scores that eager attention saves per layer, in two dtypes, at full document length."""
    if recipe.attention != "eager":
        return 0.0
    scores = recipe.micro_batch_size * shape.num_heads * _round_up(recipe.sequence_length) ** 2
    return float(scores * (4 + DTYPE_BYTES[recipe.compute_dtype]))


def _round_up(length: int) -> int:
    """Return the length to which the padded attention fallback pads: the next power of two, at least 32."""
    return 1 << max(5, (length - 1).bit_length())
