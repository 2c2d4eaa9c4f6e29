"""What is trained and how, as far as it moves memory, and what follows from it alone."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.choices import (
    DEEPSPEED_STRATEGIES,
    DTYPE_BYTES,
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
from launcher.shapes import Linear, ModelShape

_CHUNK_LOGITS = 160_000_000  # that the loss holds at a time: 1,024 positions of 152k tokens were fastest on an H200
_CHUNK_POSITIONS = (256, 8_192)
SELECTIVE_MIN_INNER = 512  # selective checkpointing keeps products of at least this inner size: no LoRA's second one
# Matrices that get the same input, by the names of Llama and its relatives.
SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Whose layers were read: training/joined.py.
JOINED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
JOINED_HEADS = ("llama", "qwen3")
_ALIGNED = 8  # numbers of 16 bits: rows then begin where tensor cores can load them; what is filled up is zero


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Everything that moves the memory of one rank, besides the base model's shape."""

    adapter: AdapterKind
    rank: int | None  # of the adapter; None for ia3 and full
    target_modules: tuple[str, ...]
    quantization: Quantization
    compute_dtype: Dtype
    base_dtype: Dtype
    trainable_dtype: Dtype
    optimizer: OptimizerName
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
    adapter_dropout: float = 0.0  # anything above 0 keeps masks and copies of the adapters' inputs
    accumulates_gradients: bool = True  # several micro-batches a step: gradients live beside activations
    graphed: bool = False  # a micro-step is one CUDA graph
    has_kernels: bool = True  # our Triton kernels run there, or it is a CPU


def count_loss_chunk(vocab_size: int) -> int:
    """Positions whose logits the loss holds at a time: a power of two."""
    least, most = _CHUNK_POSITIONS
    return max(least, min(most, 1 << ((_CHUNK_LOGITS // vocab_size).bit_length() - 1)))


def count_trainable(
    shape: ModelShape,
    adapter: AdapterKind,
    rank: int | None,
    target_modules: tuple[str, ...],
    feedforward_modules: tuple[str, ...] = ("down_proj",),
) -> int:
    """Parameters that receive gradients. IA3 scales the inputs of feedforward modules and the outputs of the others."""
    if adapter == "full":
        return shape.num_parameters
    per_layer = 0
    for linear in find_targets(shape, target_modules):
        if adapter == "ia3":
            per_layer += linear.in_features if linear.name in feedforward_modules else linear.out_features
            continue
        per_layer += (rank or 0) * (linear.in_features + linear.out_features)
        per_layer += linear.out_features if adapter == "dora" else 0
    return per_layer * shape.num_layers


def find_targets(shape: ModelShape, target_modules: tuple[str, ...]) -> tuple[Linear, ...]:
    return tuple(linear for linear in shape.linears if linear.name in target_modules)


def trainable_bytes(recipe: Recipe) -> int:
    """DeepSpeed holds every parameter in the compute dtype, and the fp32 master among the optimizer's state."""
    if recipe.strategy in DEEPSPEED_STRATEGIES:
        return DTYPE_BYTES[recipe.compute_dtype]
    return DTYPE_BYTES[recipe.trainable_dtype]


def has_buckets(recipe: Recipe) -> bool:
    """DDP's, as large as all gradients. Replicas that replay a graph have none: they send gradients behind it."""
    return recipe.strategy == "ddp" and not recipe.graphed


def is_mixed(recipe: Recipe) -> bool:
    """Trained in more precision than computed: autocast casts on every use."""
    return trainable_bytes(recipe) > DTYPE_BYTES[recipe.compute_dtype]


def is_mixed_full(recipe: Recipe) -> bool:
    return recipe.adapter == "full" and is_mixed(recipe)


def joins_products(recipe: Recipe) -> bool:
    """The adapter's share rides along in the base's products (training/products.py); PEFT's own way otherwise."""
    if recipe.adapter not in ("lora", "dora") or recipe.quantization == "int8":
        return False
    if recipe.quantization == "int4" and not recipe.has_kernels:  # that unpack the base into a block
        return False
    return recipe.strategy in ("single", "ddp") and recipe.base_dtype == recipe.compute_dtype


def joins_mlp(shape: ModelShape, recipe: Recipe) -> bool:
    """The MLP is one operation (training/joined.py), which computes again what its gate let through."""
    return shape.model_type in JOINED_FAMILIES and _joins(shape, recipe, (("gate_proj", "up_proj"), ("down_proj",)))


def joins_heads(shape: ModelShape, recipe: Recipe) -> bool:
    """Norm, products and rotation of queries, keys and values are one operation."""
    return shape.model_type in JOINED_HEADS and _joins(shape, recipe, (("q_proj", "k_proj", "v_proj"),))


def _joins(shape: ModelShape, recipe: Recipe, blocks: tuple[tuple[str, ...], ...]) -> bool:
    """One matrix at least of each block is adapted; others are taken in."""
    if not joins_products(recipe) or not recipe.has_kernels or recipe.checkpointing == "selective":
        return False
    if not recipe.on_gpu and not recipe.compiled:  # there are no kernels for CPUs: plain torch is faster
        return False
    parts = {linear.name: linear for linear in shape.linears}
    return all(
        all(name in parts and not parts[name].has_bias for name in names)
        and any(name in recipe.target_modules for name in names)
        for names in blocks
    )


def count_block_ranks(rank: int, num_matrices: int) -> int:
    """Rows and columns that a block of matrices has for their adapters (training/products.py)."""
    return -(-rank * num_matrices // _ALIGNED) * _ALIGNED


def count_block_weights(group: list[Linear], recipe: Recipe) -> int:
    """Of a block's matrix, the adapter's rows and columns included."""
    ranks = count_block_ranks(recipe.rank or 0, len(group))
    return (group[0].in_features + ranks) * (sum(linear.out_features for linear in group) + ranks)


def count_ranks(shape: ModelShape, recipe: Recipe) -> int:
    """Of all adapters of a layer, as their products are laid out."""
    rank = recipe.rank or 0
    if joins_products(recipe):
        return sum(count_block_ranks(rank, len(group)) for group in group_targets(shape, recipe))
    return rank * len(find_targets(shape, recipe.target_modules))


def has_input_copies(recipe: Recipe) -> bool:
    """PEFT casts inputs to the adapter's dtype, autocast casts them back: a copy per matrix. Not over 4 or 8 bits."""
    if joins_products(recipe):
        return False
    return is_mixed(recipe) and recipe.adapter in ("lora", "dora") and recipe.quantization == "none"


def name_input(matrix: str) -> str:
    """By the first of the matrices that share it."""
    return next((names[0] for names in SHARED_INPUTS if matrix in names), matrix)


def group_targets(shape: ModelShape, recipe: Recipe) -> list[list[Linear]]:
    """Adapted matrices by the input that they share, and those that joined halves take into their blocks."""
    groups: dict[str, list[Linear]] = {}
    for linear in list_block_members(shape, recipe):
        groups.setdefault(name_input(linear.name), []).append(linear)
    return list(groups.values())


def list_block_members(shape: ModelShape, recipe: Recipe) -> list[Linear]:
    names = set(recipe.target_modules)
    if joins_heads(shape, recipe):
        names |= {"q_proj", "k_proj", "v_proj"}
    if joins_mlp(shape, recipe):
        names |= {"gate_proj", "up_proj"}
    return [linear for linear in shape.linears if linear.name in names]
