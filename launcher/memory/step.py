"""What a micro-batch costs: what autograd saves, the loss, and what lives while a layer goes backward."""

from __future__ import annotations

from launcher.choices import DTYPE_BYTES, SHARDED_STRATEGIES
from launcher.memory.recipe import (
    SELECTIVE_MIN_INNER,
    Recipe,
    count_block_weights,
    count_loss_chunk,
    count_ranks,
    find_targets,
    group_targets,
    has_input_copies,
    is_mixed_full,
    joins_heads,
    joins_mlp,
    joins_products,
    list_block_members,
    name_input,
)
from launcher.shapes import ModelShape

# What the allocator holds at the peak of a step, as functions of the shape. Which tensors autograd saves was read off
# the modules of transformers and PEFT and checked against measured slopes. The numbers of this block are fitted, to the
# part of benchmarks/results/memory_h200.json that tests/unit/test_memory.py does not hold out (torch 2.11, transformers
# 5.17, PEFT 0.21, bitsandbytes 0.50, one H200). Each is keyed by `compiled`.
_OUTSIDE_BYTES_PER_HIDDEN = {False: 6.5, True: 9.0}  # a token's final norm, hidden state and their gradients
_BACKWARD_BYTES_PER_INTERMEDIATE = {  # a token's gradients alive inside one MLP
    "joined": {False: 6.0, True: 6.5},
    "lora": {False: 6.0, True: 7.0},
    "lora without input copies": {False: 2.0, True: 6.5},
    "dora": {False: 11.5, True: 15.0},  # compiled: rests on one checkpointed measurement
    "full": {False: 6.0, True: 3.0},
}
# Checkpointed: a token's share of a layer that is gone at the peak (compiled: rests on one measurement).
_FREED_BYTES_PER_INTERMEDIATE = {False: 3.5, True: 2.5}
_DORA_BYTES_PER_WEIGHT = {False: 15.0, True: 2.0}  # the largest adapted matrix, built anew in fp32

# Counted, or measured alike everywhere.
_BYTES_PER_LOGIT = 12  # log-softmax kept in fp32, its gradient, the logits' gradient: three fp32
_BYTES_PER_CHUNKED_LOGIT = 14  # the same, and the logits themselves
_TRAINED_HEAD_BYTES = 4.4  # for each weight of the head, beside its copy and its gradient in the compute dtype
# Compiled, fp32 weights: part of the residual stream is kept in fp32 (one measured size).
_MIXED_FULL_BYTES_PER_HIDDEN = 3
# DoRA with dropout: beside the gradient of a gate or an up, what of it goes through the scaled product. Counted.
_DROPPED_DORA_BYTES_PER_GATE = 2.0
_FILLED = 1.5  # lengths rounded up to a power of two, on average; counted, never measured
_INT8_BYTES_PER_INPUT = 1.3  # quantised copies of inputs: solved from two measurements, a rough guide
_INT8_BYTES_PER_WEIGHT = 0.5  # of all layers: likewise


def estimate_step(shape: ModelShape, recipe: Recipe) -> tuple[float, float, float]:
    """Activations, the loss's own tensors, and what else lives while the last layer goes backward."""
    tokens = recipe.micro_batch_size * recipe.sequence_length
    compute = DTYPE_BYTES[recipe.compute_dtype]
    outside = tokens * (_OUTSIDE_BYTES_PER_HIDDEN[recipe.compiled] * compute / 2 * shape.hidden_size)
    rotary = tokens * 2 * compute * shape.head_dim
    kept, recomputed = _count_activation_bytes(shape, recipe, tokens)
    fused = recipe.compiled or joins_mlp(shape, recipe)
    backward = _BACKWARD_BYTES_PER_INTERMEDIATE[_name_family(recipe)][fused]
    if joins_products(recipe) and recipe.adapter == "dora" and recipe.adapter_dropout > 0:
        backward += _DROPPED_DORA_BYTES_PER_GATE * (len(_list_gates_with_rests(shape, recipe)) or 2)
    transient = tokens * backward * compute / 2 * shape.intermediate_size
    transient += _count_rebuilt_weight_bytes(shape, recipe)
    # the loss is done when the first layer is recomputed and goes backward: only the larger of the two counts
    loss = max(0.0, _count_loss_bytes(shape, recipe, tokens) - recomputed - transient)
    return kept + recomputed + outside + rotary, loss, transient


def _name_family(recipe: Recipe) -> str:
    if joins_products(recipe):
        return "joined"
    if recipe.adapter in ("full", "dora"):
        return recipe.adapter
    return "lora" if has_input_copies(recipe) else "lora without input copies"


def _count_rebuilt_weight_bytes(shape: ModelShape, recipe: Recipe) -> float:
    if joins_products(recipe):
        return float(_count_unpacked_bytes(shape, recipe))
    largest = max(linear.in_features * linear.out_features for linear in shape.linears)
    rebuilt = 0.0
    if recipe.adapter == "dora":
        rebuilt += largest * _DORA_BYTES_PER_WEIGHT[recipe.compiled]
    if recipe.quantization != "none":
        rebuilt += largest * DTYPE_BYTES[recipe.compute_dtype]
    return rebuilt


def _count_unpacked_bytes(shape: ModelShape, recipe: Recipe) -> int:
    """A block of four-bit matrices, built whole for its products; a joined MLP has two of them at a time."""
    if recipe.quantization != "int4":
        return 0
    sizes = {group[0].name: count_block_weights(group, recipe) for group in group_targets(shape, recipe)}
    at_once = [*sizes.values(), max(linear.in_features * linear.out_features for linear in shape.linears)]
    if joins_mlp(shape, recipe):
        at_once.append(sizes["gate_proj"] + sizes["down_proj"])
    return max(at_once) * DTYPE_BYTES[recipe.compute_dtype]


def _count_loss_bytes(shape: ModelShape, recipe: Recipe, tokens: int) -> float:
    """Working memory before the layers' backward pass begins. Under checkpointing autocast's copies live until here."""
    copies = 0
    is_whole = recipe.strategy not in SHARDED_STRATEGIES
    if is_whole and is_mixed_full(recipe) and recipe.checkpointing != "none" and not recipe.compiled:
        copies = shape.num_layers * shape.layer_parameters * DTYPE_BYTES[recipe.compute_dtype]
    if recipe.loss_kernel == "full_logits":
        return float(copies + tokens * shape.vocab_size * _BYTES_PER_LOGIT)
    chunk = count_loss_chunk(shape.vocab_size)
    logits = min(tokens, chunk) * shape.vocab_size
    if recipe.loss_kernel == "chunked":
        return float(copies + logits * _BYTES_PER_CHUNKED_LOGIT)
    held = float(logits * DTYPE_BYTES[recipe.compute_dtype])  # fused: gradients take the place of a chunk's logits
    if recipe.adapter == "full":  # the head's gradient in fp32
        held = max(held, _TRAINED_HEAD_BYTES * shape.vocab_size * shape.hidden_size)
    return float(copies + held)


def _count_activation_bytes(shape: ModelShape, recipe: Recipe, tokens: int) -> tuple[float, float]:
    """What autograd saves over all layers, and what the recompute of one layer adds.

    Checkpointing is never dearer than doing without, nor full than selective: the minima matter for one or two layers.
    """
    layer = tokens * _count_layer_bytes(shape, recipe) + _count_score_bytes(shape, recipe)
    layer += _count_saved_weight_bytes(shape, recipe)
    none = shape.num_layers * layer
    if recipe.checkpointing == "none":
        return none, 0.0
    boundary, products, reused = _count_kept_bytes(shape, recipe)
    selective = shape.num_layers * tokens * (boundary + products)
    recomputed = min(none - selective, layer - tokens * reused)
    if recipe.checkpointing == "selective":
        return (selective, recomputed) if recomputed > 0 else (none, 0.0)
    full = shape.num_layers * tokens * boundary
    if joins_products(recipe) and recipe.adapter == "lora":  # outputs of a block are freed before the next goes back
        fused = recipe.compiled or joins_mlp(shape, recipe)
        layer -= tokens * _FREED_BYTES_PER_INTERMEDIATE[fused] * shape.intermediate_size
    return full, max(0.0, min(none - full, layer))


def _count_layer_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Saved by one layer for one token. Eager saves an fp32 input per norm; the compiler recomputes norms and SiLU, as
    joined halves do."""
    compute = DTYPE_BYTES[recipe.compute_dtype]
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, intermediate = shape.hidden_size, shape.intermediate_size
    num_norms = max(2, shape.norm_parameters_per_layer // hidden)
    has_head_norms = shape.norm_parameters_per_layer % hidden != 0
    attention = compute * (2 * query + 2 * key) + 4 * shape.num_heads + _count_backend_bytes(recipe, query, key)
    if recipe.compiled:
        norms = compute * (num_norms * hidden + (query + key if has_head_norms else 0))
        norms += _MIXED_FULL_BYTES_PER_HIDDEN * hidden if is_mixed_full(recipe) else 0
        mlp = compute * intermediate * (2 if shape.gated_mlp else 1)
    else:
        of_heads, of_mlp = joins_heads(shape, recipe), joins_mlp(shape, recipe)
        norms = 4 * num_norms * hidden - (4 - compute) * hidden * (of_heads + of_mlp)
        norms += (compute if of_heads else 4) * (query + key) if has_head_norms else 0
        if recipe.adapter == "full":  # a trained norm also saves its normalised input
            norms += num_norms * hidden * (4 if is_mixed_full(recipe) else compute)
            norms += compute * (query + key) if has_head_norms else 0
        mlp = compute * intermediate * (2 if of_mlp or not shape.gated_mlp else 3)
    small = 4 * (num_norms + shape.num_heads + shape.num_kv_heads)  # reciprocal roots
    return norms + attention + mlp + small + _count_input_bytes(shape, recipe) + _count_variant_bytes(shape, recipe)


def _count_backend_bytes(recipe: Recipe, query: int, key: int) -> float:
    """SDPA and eager attention copy documents into groups of like length, filled up, with keys and values repeated for
    every query head; and their output back."""
    if recipe.attention not in ("sdpa", "eager"):
        return 0.0
    filled = max(_FILLED, _round_up(recipe.sequence_length) / recipe.sequence_length)
    grouped = filled * 4 * query + query
    return DTYPE_BYTES[recipe.compute_dtype] * (grouped - (2 * query + 2 * key))


def _count_input_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Inputs that are saved because a trained matrix multiplies them; frozen matrices save nothing."""
    if recipe.adapter == "ia3":
        return 0.0
    compute = DTYPE_BYTES[recipe.compute_dtype]
    targets = shape.linears if recipe.adapter == "full" else find_targets(shape, recipe.target_modules)
    ranks = compute * count_ranks(shape, recipe)
    has_copies = has_input_copies(recipe)
    total = sum(linear.in_features for linear in targets)
    if recipe.adapter_dropout > 0 and joins_products(recipe):
        return _count_dropped_bytes(shape, recipe) + ranks
    if recipe.adapter_dropout > 0 and recipe.adapter != "full":
        is_wide = recipe.compiled and recipe.adapter == "dora" and has_copies
        return total * (1 + (4 if is_wide else compute)) + ranks
    if has_copies and not recipe.compiled:
        return total * compute + ranks
    if is_mixed_full(recipe) and not recipe.compiled:  # fp32 norms: every matrix behind one casts for itself
        return compute * sum(linear.in_features for linear in targets if linear.name != "o_proj")
    inputs = {name_input(linear.name): linear.in_features for linear in targets}
    if not has_copies:
        inputs.pop("o_proj", None)  # the attention's output, saved already
    if joins_mlp(shape, recipe):
        inputs.pop("down_proj")
    return compute * sum(inputs.values()) + ranks


def _count_dropped_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Once an input: what is left of it, and where. Joined halves know where by a seed."""
    compute, total = DTYPE_BYTES[recipe.compute_dtype], 0.0
    for group in group_targets(shape, recipe):
        name, size = name_input(group[0].name), group[0].in_features
        is_joined = joins_heads(shape, recipe) if name in ("q_proj", "o_proj") else joins_mlp(shape, recipe)
        if not is_joined:
            total += (compute + 1) * size
        elif name not in ("o_proj", "down_proj"):  # the attention has kept the one, the gates make the other again
            total += compute * size
    return total


def _count_variant_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """What DoRA and IA3 save on top: the results that they scale. Int8 matrices: quantised inputs."""
    compute = DTYPE_BYTES[recipe.compute_dtype]
    targets = find_targets(shape, recipe.target_modules)
    extra = 0.0
    if recipe.adapter == "dora":
        extra += _count_scaled_bytes(shape, recipe)
    if recipe.adapter == "ia3":
        extra += sum(4 * t.in_features if t.name == "down_proj" else compute * t.out_features for t in targets)
    if recipe.quantization == "int8":
        extra += _INT8_BYTES_PER_INPUT * sum(linear.in_features for linear in shape.linears)
    return extra


def _count_scaled_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Results before DoRA scaled them."""
    compute, query = DTYPE_BYTES[recipe.compute_dtype], shape.num_heads * shape.head_dim
    results = sum(linear.out_features for linear in find_targets(shape, recipe.target_modules))
    if not joins_products(recipe):
        return float(compute * (results + query) if recipe.compiled else 2 * compute * results)
    # The compiler scales again what it has before scaling; with dropout the base's share is added to that, and the sum
    # is kept as well.
    rescales = recipe.compiled and recipe.adapter_dropout == 0
    kept = ["o_proj", *_list_scaled_heads(shape, recipe, rescales)]
    if joins_mlp(shape, recipe):
        kept += [] if rescales else ["down_proj"]
        kept += _list_gates_with_rests(shape, recipe)
    elif not rescales:
        kept += ["gate_proj", "up_proj", "down_proj"]
    members = list_block_members(shape, recipe)
    return float(compute * sum(linear.out_features * kept.count(linear.name) for linear in members))


def _list_gates_with_rests(shape: ModelShape, recipe: Recipe) -> list[str]:
    """Where a joined MLP drops: the products that are added to the scaled ones. A gate without an adapter has none."""
    if recipe.adapter_dropout == 0 or not joins_mlp(shape, recipe):
        return []
    targets = {linear.name for linear in find_targets(shape, recipe.target_modules)}
    return ["gate_proj", "up_proj"] if "gate_proj" in targets else ["up_proj"]


def _list_scaled_heads(shape: ModelShape, recipe: Recipe, rescales: bool) -> list[str]:
    """Joined, queries and keys are kept as they were before they were scaled; where a norm follows, it has counted
    them. Values are kept as scaled, too; and of dropout the products that are added to the scaled ones."""
    heads = ["q_proj", "k_proj", "v_proj"]
    if not rescales and not joins_heads(shape, recipe):
        return heads
    has_head_norms = shape.norm_parameters_per_layer % shape.hidden_size != 0
    kept = ["v_proj"] if has_head_norms else heads
    return kept + (heads if recipe.adapter_dropout > 0 else [])


def _count_saved_weight_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Copies of a layer's weights that its backward pass needs: with dropout PEFT's DoRA multiplies by a cast one."""
    targets = find_targets(shape, recipe.target_modules)
    num_weights = sum(linear.in_features * linear.out_features for linear in targets)
    if recipe.quantization == "int8":
        return _INT8_BYTES_PER_WEIGHT * num_weights
    if recipe.adapter == "dora" and recipe.adapter_dropout > 0 and not joins_products(recipe):
        return float(DTYPE_BYTES[recipe.compute_dtype] * num_weights)
    return 0.0


def _count_kept_bytes(shape: ModelShape, recipe: Recipe) -> tuple[float, float, float]:
    """Per layer and token: its input, the products that selective checkpointing keeps, what the recompute reuses."""
    compute = DTYPE_BYTES[recipe.compute_dtype]
    query = shape.num_heads * shape.head_dim
    boundary = shape.hidden_size * (4 if is_mixed_full(recipe) else compute)
    results = sum(linear.out_features for linear in shape.linears)
    targets = find_targets(shape, recipe.target_modules)
    products = compute * (results + query) + 4 * shape.num_heads
    if recipe.compiled:
        products -= compute * shape.hidden_size  # the layer's last product is not needed again
    products += compute * (recipe.rank or 0) * len(targets)
    reused = products - 2 * compute * shape.hidden_size
    if recipe.rank is not None and recipe.rank >= SELECTIVE_MIN_INNER:
        products += compute * sum(linear.out_features for linear in targets)
    return boundary, products, reused


def _count_score_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Saved per layer by eager attention: weights of documents, all of full length at worst, in two dtypes."""
    if recipe.attention != "eager":
        return 0.0
    scores = recipe.micro_batch_size * shape.num_heads * _round_up(recipe.sequence_length) ** 2
    return float(scores * (4 + DTYPE_BYTES[recipe.compute_dtype]))


def _round_up(length: int) -> int:
    """As training/grouped.py does."""
    return 1 << max(5, (length - 1).bit_length())
