"""What is trained and how, as far as it moves memory, and what follows from it alone."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.choices import (
    DEEPSPEED_STRATEGIES,
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
SHARED_INPUTS = {
    "q_proj": "attention",
    "k_proj": "attention",
    "v_proj": "attention",
    "gate_proj": "mlp",
    "up_proj": "mlp",
}
DTYPE_BYTES: dict[Dtype, int] = {"bf16": 2, "fp16": 2, "fp32": 4}


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
    packed: bool  # rows lie end to end in one line, as the training lays them; False: padded, as some were measured
    sequence_length: int
    micro_batch_size: int
    strategy: Strategy
    offload: Offload
    num_ranks: int
    on_gpu: bool
    adapter_dropout: float = 0.0  # anything above 0 keeps masks and copies of the adapters' inputs
    accumulates_gradients: bool = True  # several micro-batches a step: gradients live beside activations


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


def is_mixed(recipe: Recipe) -> bool:
    """Trained in more precision than computed: autocast casts on every use."""
    return trainable_bytes(recipe) > DTYPE_BYTES[recipe.compute_dtype]


def is_mixed_full(recipe: Recipe) -> bool:
    return recipe.adapter == "full" and is_mixed(recipe)


def joins_products(recipe: Recipe) -> bool:
    """The adapter's share rides along in the base's products (training/products.py); PEFT's own way otherwise."""
    if recipe.adapter not in ("lora", "dora") or recipe.quantization != "none":
        return False
    is_whole = recipe.strategy in ("single", "ddp") and recipe.base_dtype == recipe.compute_dtype
    return is_whole and not (recipe.adapter == "dora" and recipe.adapter_dropout > 0)


def has_input_copies(recipe: Recipe) -> bool:
    """PEFT casts inputs to the adapter's dtype, autocast casts them back: a copy per matrix. Not over 4 or 8 bits."""
    if joins_products(recipe):
        return False
    return is_mixed(recipe) and recipe.adapter in ("lora", "dora") and recipe.quantization == "none"


def group_targets(shape: ModelShape, recipe: Recipe) -> list[list[Linear]]:
    """Adapted matrices by the input that they share."""
    groups: dict[str, list[Linear]] = {}
    for linear in find_targets(shape, recipe.target_modules):
        groups.setdefault(SHARED_INPUTS.get(linear.name, linear.name), []).append(linear)
    return list(groups.values())
