"""Settings that determine memory use, and values derived from them, such as parameter counts."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from launcher.base_models.families import Linear
from launcher.base_models.shapes import ModelShape
from launcher.core.choices import (
    DEEPSPEED_STRATEGIES,
    DTYPE_BYTES,
    NF4_GROUP_SIZES,
    AdapterKind,
    AttentionBackend,
    Checkpointing,
    Dtype,
    LossKernel,
    Offload,
    OptimizerName,
    Quantization,
    Strategy,
)

_CHUNK_LOGITS = 160_000_000  # per loss chunk: 1,024 positions with a vocabulary of 152k were fastest on an H200
# Each chunk adds to the gradient of a trained head: four times the positions are 3 % faster (full 0.6B, FP8, H200).
_LARGE_CHUNK = 4
_CHUNK_POSITIONS = (256, 8_192)
SELECTIVE_MIN_INNER = 512  # selective checkpointing keeps matmuls of at least this inner size: not lora_B's
# Matrices with a common input, as Llama-like models name them.
SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Model types whose MLP block training/model/fused_lora/ can run as a fused op, with the prefix of their class names.
FUSED_FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3",
    "granite": "Granite",
    "phi3": "Phi3",
    "smollm3": "SmolLM3",
}
FUSED_QKV_FAMILIES = frozenset(FUSED_FAMILIES) - {"phi3"}  # some of Phi's models rotate only part of each head
FUSED_HEAD_DIMS = (32, 64, 128, 256)  # Triton needs powers of two
# Weights with a common scale of scales: fused ops join matrices of complete blocks only.
NF4_BLOCK = prod(NF4_GROUP_SIZES)
_ALIGNED = 8  # 16-bit elements: aligns rows for tensor cores; the padding is zero


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Settings that determine the memory of one rank, in addition to the base model's shape."""

    adapter: AdapterKind
    rank: int | None  # LoRA rank; None for ia3 and full
    target_modules: tuple[str, ...]
    target_parameters: tuple[str, ...] = ()  # stacked experts with LoRA
    modules_to_save: tuple[str, ...] = ()  # embeddings and head that are trained completely with the adapter
    quantization: Quantization
    compute_dtype: Dtype
    base_dtype: Dtype
    trainable_dtype: Dtype
    optimizer: OptimizerName
    optimizer_in_bwd: bool = False  # weights are updated in the backward pass, and their gradients freed
    checkpointing: Checkpointing
    compiled: bool
    loss_kernel: LossKernel
    attention: AttentionBackend
    sequence_length: int
    micro_batch_size: int
    strategy: Strategy
    offload: Offload
    num_ranks: int
    on_gpu: bool
    adapter_dropout: float = 0.0  # above 0, masks and copies of the adapters' inputs are saved
    accumulates_gradients: bool = True  # several micro-batches per step: gradients and activations coexist
    graphed: bool = False  # each micro-step is captured as one CUDA graph
    fp8_base: bool = False  # frozen linear layers are stored in FP8
    fp8_layers: bool = False  # trained linear layers are multiplied in FP8
    has_kernels: bool = True  # our Triton kernels run on this device, or it is a CPU


def count_loss_chunk(vocab_size: int, *, is_large: bool = False) -> int:
    """Return the number of token positions in one chunk of the loss, a power of two; for has_large_chunks more."""
    low, high = _CHUNK_POSITIONS
    logits = _CHUNK_LOGITS * (_LARGE_CHUNK if is_large else 1)
    return max(low, min(high, 1 << (max(1, logits // vocab_size).bit_length() - 1)))


def count_trainable(
    shape: ModelShape,
    adapter: AdapterKind,
    rank: int | None,
    target_modules: tuple[str, ...],
    *,
    feedforward_modules: tuple[str, ...] = ("down_proj",),
    target_parameters: tuple[str, ...] = (),
    modules_to_save: tuple[str, ...] = (),
) -> int:
    """Count the trainable parameters. IA3 scales the inputs of feedforward modules and the outputs of all others."""
    if adapter == "full":
        return shape.num_parameters - shape.frozen_parameters
    per_layer = 0
    for linear in select_targets(shape, target_modules):
        if adapter == "ia3":
            per_layer += linear.in_features if linear.name in feedforward_modules else linear.out_features
            continue
        per_layer += (rank or 0) * (linear.in_features + linear.out_features)
        per_layer += linear.out_features if adapter == "dora" else 0
    for stack in select_stacks(shape, target_parameters):
        assert shape.experts is not None
        per_layer += shape.experts.num_experts * (rank or 0) * (stack.in_features + stack.out_features)
    return per_layer * shape.num_layers + sum(count_saved(shape, modules_to_save))


def count_saved(shape: ModelShape, modules_to_save: tuple[str, ...]) -> tuple[int, int]:
    """Return how many parameters modules_to_save trains: in the embeddings (tied ones included), and in the LM head."""
    if shape.tied_embeddings:
        return (shape.embedding_parameters if modules_to_save else 0), 0
    head = shape.head_parameters + (shape.vocab_size if shape.has_head_bias else 0)
    embeddings_name, head_name = shape.embedding_names
    return (
        shape.embedding_parameters if embeddings_name in modules_to_save else 0,
        head if head_name in modules_to_save else 0,
    )


def count_new_rows(shape: ModelShape, modules_to_save: tuple[str, ...], num_tokens: int) -> int:
    """Count the parameters of new tokens' rows in embeddings and LM head, unless modules_to_save trains the module."""
    if shape.tied_embeddings:
        return 0 if modules_to_save else num_tokens * shape.hidden_size
    return num_tokens * shape.hidden_size * sum(name not in modules_to_save for name in shape.embedding_names)


def count_trained_embeddings(shape: ModelShape, recipe: Recipe) -> int:
    """Count the parameters of trained embeddings, whose optimizer states are never quantized."""
    return shape.embedding_parameters if recipe.adapter == "full" else count_saved(shape, recipe.modules_to_save)[0]


def trains_head(shape: ModelShape, recipe: Recipe) -> bool:
    """Whether the LM head has a gradient."""
    embeddings, head = count_saved(shape, recipe.modules_to_save)
    return recipe.adapter == "full" or head > 0 or (shape.tied_embeddings and embeddings > 0)


def has_large_chunks(shape: ModelShape, recipe: Recipe) -> bool:
    """Whether the loss has larger chunks, which need 0.5 to 0.9 GiB more: if the head is trained in FP32."""
    return trains_head(shape, recipe) and is_mixed(recipe) and recipe.strategy in ("single", "ddp")


def select_targets(shape: ModelShape, target_modules: tuple[str, ...]) -> tuple[Linear, ...]:
    """Return the linear layers of a decoder layer that the adapter targets; all of them if a target name is unknown."""
    if not set(target_modules) <= set(shape.linear_names):
        return shape.linears
    return tuple(linear for linear in shape.linears if linear.name in target_modules)


def select_stacks(shape: ModelShape, target_parameters: tuple[str, ...]) -> tuple[Linear, ...]:
    """Return the matrices of one expert that target_parameters adapts; names match the ends of paths, as in PEFT."""
    stacks = {} if shape.experts is None else shape.experts.stacks
    return tuple(
        linear for path, linear in stacks.items() if any(f".{path}".endswith(f".{name}") for name in target_parameters)
    )


def count_stacked_weights(shape: ModelShape, recipe: Recipe) -> int:
    """Count a layer's expert weights that LoRA adapts; PEFT adds the update to a copy of them in every forward pass."""
    stacks = select_stacks(shape, recipe.target_parameters)
    num_experts = 0 if shape.experts is None else shape.experts.num_experts
    return num_experts * sum(stack.in_features * stack.out_features for stack in stacks)


def get_trainable_bytes(recipe: Recipe) -> int:
    """Return the bytes of a trainable weight; DeepSpeed's fp32 master weights count as optimizer state instead."""
    if recipe.strategy in DEEPSPEED_STRATEGIES:
        return DTYPE_BYTES[recipe.compute_dtype]
    return DTYPE_BYTES[recipe.trainable_dtype]


def has_buckets(recipe: Recipe) -> bool:
    """Whether DDP allocates buckets as large as all gradients. With CUDA graphs, gradients are reduced without DDP."""
    return recipe.strategy == "ddp" and not recipe.graphed


def is_mixed(recipe: Recipe) -> bool:
    """Whether trainable weights are more precise than the compute dtype, so that autocast casts them on every use."""
    return get_trainable_bytes(recipe) > DTYPE_BYTES[recipe.compute_dtype]


def is_mixed_full(recipe: Recipe) -> bool:
    """Whether all weights are trained, and autocast casts those of the layers on every use; FP8 layers round them."""
    return recipe.adapter == "full" and is_mixed(recipe) and not recipe.fp8_layers


def fuses_lora(recipe: Recipe) -> bool:
    """Whether LoRA is computed inside the base's matmuls (training/model/fused_lora/) instead of by PEFT."""
    if recipe.adapter not in ("lora", "dora"):
        return False
    if recipe.quantization == "int4" and not recipe.has_kernels:  # needed to dequantize the base weights
        return False
    return recipe.strategy in ("single", "ddp") and recipe.base_dtype == recipe.compute_dtype


def fuses_mlp(shape: ModelShape, recipe: Recipe) -> bool:
    """Whether the MLP block is one fused op, which recomputes SwiGLU's output in the backward pass."""
    if shape.model_type not in FUSED_FAMILIES:
        return False
    if recipe.fp8_layers:
        return not any(linear.has_bias for linear in shape.linears if linear.name in (*list_gates(shape), "down_proj"))
    return _can_fuse(shape, recipe, (list_gates(shape), ("down_proj",)))


def fuses_qkv(shape: ModelShape, recipe: Recipe) -> bool:
    """Whether the Q/K/V projections and RoPE, and with LoRA the RMSNorm before them, are one fused op."""
    if shape.model_type not in FUSED_QKV_FAMILIES or shape.head_dim not in FUSED_HEAD_DIMS:
        return False
    projections = (("q_proj", "k_proj", "v_proj"),)
    return recipe.fp8_layers or _can_fuse(shape, recipe, projections, adds_bias=recipe.adapter == "lora")


def explain_layer_path(shape: ModelShape, recipe: Recipe) -> tuple[str, str]:
    """Return the name that docs/families.md gives to the code that runs the decoder layers, and the reason for it."""
    if recipe.fp8_layers:
        return _explain_fp8_path(shape, recipe)
    if not fuses_lora(recipe):
        if recipe.adapter not in ("lora", "dora"):
            reason = "only LoRA and DoRA are part of fused ops"
        elif recipe.strategy not in ("single", "ddp"):
            reason = f"{recipe.strategy} splits the weights that fused ops would join"
        else:
            reason = "fused ops need a base in the compute dtype or, with our kernels, in NF4"
        return "library", reason
    has_mlp, has_attention = fuses_mlp(shape, recipe), fuses_qkv(shape, recipe)
    if has_mlp and has_attention:
        return "blocks", "norms, projections with LoRA, RoPE and the gated activation run as fused ops"
    if has_mlp or has_attention:
        fused, other = ("MLP", "attention") if has_mlp else ("attention", "MLP")
        own = f"{shape.model_type}'s {other} block keeps its own code around fused LoRA"
        if recipe.quantization == "int4" and any(map(_has_partial_block, shape.linears)):
            own = f"in NF4 they need matrices of a multiple of {NF4_BLOCK:,} weights, unlike the {other} block's"
        return fused, f"fused ops for the {fused}; {own}"
    if shape.model_type not in FUSED_FAMILIES:
        return "matmuls", f"LoRA inside the base's matmuls; fused blocks do not support {shape.model_type}"
    return "matmuls", f"LoRA inside the base's matmuls; {_explain_no_blocks(shape, recipe)}"


def _explain_fp8_path(shape: ModelShape, recipe: Recipe) -> tuple[str, str]:
    has_mlp, has_attention = fuses_mlp(shape, recipe), fuses_qkv(shape, recipe)
    if has_mlp and has_attention:
        return "blocks", "FP8 projections run as fused ops with RoPE and the gated activation"
    if has_mlp or has_attention:
        fused, other = ("MLP", "attention") if has_mlp else ("attention", "MLP")
        return fused, f"fused FP8 ops for the {fused}; {shape.model_type}'s {other} block keeps its own code around FP8"
    return "matmuls", f"linear layers in FP8; fused blocks do not support {shape.model_type}"


def _explain_no_blocks(shape: ModelShape, recipe: Recipe) -> str:
    if not recipe.on_gpu:
        return "fused blocks are slower on a CPU"
    if not recipe.has_kernels:
        return "the kernels of fused blocks do not run on this GPU"
    if recipe.quantization == "int4" and any(map(_has_partial_block, shape.linears)):
        return f"in NF4, fused blocks need matrices of a multiple of {NF4_BLOCK:,} weights"
    return "fused blocks do not support these targets or this checkpointing"


def list_gates(shape: ModelShape) -> tuple[str, ...]:
    """Return the names of the MLP's matrices before its gated activation: gate_proj and up_proj, or gate_up_proj."""
    return ("gate_up_proj",) if "gate_up_proj" in shape.linear_names else ("gate_proj", "up_proj")


def _can_fuse(
    shape: ModelShape, recipe: Recipe, blocks: tuple[tuple[str, ...], ...], *, adds_bias: bool = False
) -> bool:
    """Whether all blocks can be fused: each needs an adapted matrix, and no biases unless the fused op adds them."""
    if not fuses_lora(recipe) or not recipe.has_kernels or recipe.checkpointing == "selective":
        return False
    if not recipe.on_gpu and not recipe.compiled:  # without kernels for CPUs, plain torch is faster
        return False
    parts = {linear.name: linear for linear in shape.linears}
    members = [parts[name] for names in blocks for name in names if name in parts]
    if recipe.quantization == "int4" and any(map(_has_partial_block, members)):
        return False
    return all(
        all(name in parts and (adds_bias or not parts[name].has_bias) for name in names)
        and any(name in recipe.target_modules for name in names)
        for names in blocks
    )


def _has_partial_block(linear: Linear) -> bool:
    return linear.in_features * linear.out_features % NF4_BLOCK != 0


def count_fused_ranks(rank: int, num_matrices: int) -> int:
    """Return the number of rows (and of columns) that a fused weight reserves for its adapters, with padding."""
    return -(-rank * num_matrices // _ALIGNED) * _ALIGNED


def count_fused_weights(group: list[Linear], recipe: Recipe) -> int:
    """Count the elements of a fused weight, including the adapters' rows and columns."""
    ranks = count_fused_ranks(recipe.rank or 0, len(group))
    return (group[0].in_features + ranks) * (sum(linear.out_features for linear in group) + ranks)


def count_adapter_ranks(shape: ModelShape, recipe: Recipe) -> int:
    """Sum the ranks of all adapters of a layer, with padding where they are fused."""
    rank = recipe.rank or 0
    if fuses_lora(recipe):
        return sum(count_fused_ranks(rank, len(group)) for group in group_targets(shape, recipe))
    return rank * len(select_targets(shape, recipe.target_modules))


def has_input_copies(recipe: Recipe) -> bool:
    """Whether the backward pass needs another copy of each adapted layer's input, made by casts.

    PEFT casts the input to the adapter's dtype, and autocast casts it back. PEFT does not cast the inputs of
    quantized layers.
    """
    if fuses_lora(recipe):
        return False
    return is_mixed(recipe) and recipe.adapter in ("lora", "dora") and recipe.quantization == "none"


def get_input_name(matrix: str) -> str:
    """Return the name that stands for a matrix's input: that of the first matrix with the same input."""
    return next((names[0] for names in SHARED_INPUTS if matrix in names), matrix)


def group_targets(shape: ModelShape, recipe: Recipe) -> list[list[Linear]]:
    """Group the adapted matrices, and others that fused ops include, by their common input."""
    groups: dict[str, list[Linear]] = {}
    for linear in list_block_members(shape, recipe):
        groups.setdefault(get_input_name(linear.name), []).append(linear)
    return list(groups.values())


def list_block_members(shape: ModelShape, recipe: Recipe) -> list[Linear]:
    """Return the linear layers that are adapted, or are part of a fused op with an adapted one."""
    names = set(recipe.target_modules)
    if fuses_qkv(shape, recipe):
        names |= {"q_proj", "k_proj", "v_proj"}
    if fuses_mlp(shape, recipe):
        names |= set(list_gates(shape))
    return [linear for linear in shape.linears if linear.name in names]
