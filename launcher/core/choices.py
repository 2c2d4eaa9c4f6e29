"""Allowed values of settings and plan decisions, spelled as in manifests, plans and upstream libraries."""

from __future__ import annotations

from typing import Literal

AdapterKind = Literal["lora", "dora", "ia3", "full"]
Quantization = Literal["none", "int4"]  # int4: NF4 with double quantization
Dtype = Literal["bf16", "fp16", "fp32"]
FP8_CAPABILITIES = ((8, 9), (9, 0), (12, 0))  # compute capabilities on which FP8 products are supported
OptimizerName = Literal["adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit", "sgd"]
Checkpointing = Literal["none", "selective", "full"]  # selective keeps matmuls and attention, recomputes the rest
Strategy = Literal["single", "ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3"]
Offload = Literal["none", "optimizer", "optimizer_and_parameters"]
AttentionBackend = Literal[
    "flash_attention_4", "flash_attention_3", "flash_attention_2", "triton", "varlen", "flex", "sdpa", "eager"
]
LossKernel = Literal["fused", "chunked", "full_logits"]
CompileScope = Literal["layer", "model"]
Profile = Literal["full", "smoke"]

DTYPE_BYTES: dict[Dtype, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
NF4_GROUP_SIZES = (64, 256)  # weights per scale, and scales per scale of these
NF4_BYTES = 4.127 / 8  # per weight: 4 bits, one 8-bit scale per 64, one fp32 per 256 scales (QLoRA, section 3)

# Optimizers whose moments are quantized by bitsandbytes; paged: in CPU memory.
EIGHT_BIT_OPTIMIZERS: frozenset[OptimizerName] = frozenset({"adamw_bnb_8bit", "paged_adamw_8bit"})
UPDATE_CHUNK = 1 << 24  # elements that training/engine/chunked_adamw.py updates at a time, in FP32

# The value of target_modules that selects all linear layers of the decoder, as PEFT spells it.
ALL_LINEAR: Literal["all-linear"] = "all-linear"

# Backends whose shapes differ between micro-batches: a CUDA graph cannot capture them.
UNRECORDABLE_ATTENTION: frozenset[AttentionBackend] = frozenset({"flex", "sdpa", "eager"})

# Backends that support attention sinks, a learned score per head as in gpt-oss; the fastest first.
SINK_ATTENTION: tuple[AttentionBackend, ...] = ("triton", "eager")

# Our own attention kernels: supported head dimensions, and the most query heads per KV head (rows of one tile).
OWN_HEAD_SIZES = (64, 128, 256)
OWN_GROUP = 32

# hsdp is FSDP2 on a 2D mesh: sharded over the GPUs of a node, replicated between nodes.
FSDP_STRATEGIES: frozenset[Strategy] = frozenset({"fsdp2", "hsdp"})
SHARDED_STRATEGIES: frozenset[Strategy] = FSDP_STRATEGIES | {"zero3"}
DEEPSPEED_STRATEGIES: frozenset[Strategy] = frozenset({"zero1", "zero2", "zero3"})

# Without packing, micro-batches have uneven lengths. They are padded to one of this many sizes, so that torch.compile
# sees at most this many shapes.
UNPACKED_SIZES = 8

# Bucket sizes in our DeepSpeed configs, in elements; the memory estimate uses the same values.
# DeepSpeed allocates the full reduce buffer, and twice with overlap_comm. Its default of 5e8 takes 2 GB of GPU memory
# even for an adapter of ten million weights; 5e7 takes 200 MB and still makes messages that are long for any link.
ZERO_BUCKET_ELEMENTS = 50_000_000
# Most parameters gathered at a time: 5e8 are 1 GB in 16 bits. DeepSpeed's default is twice that.
ZERO_LIVE_ELEMENTS = 500_000_000


def accumulates_in_fp32(strategy: Strategy, offload: Offload) -> bool:
    """Whether an engine accumulates 16-bit gradients of micro-steps in FP32, as DDP and FSDP2 do.

    DeepSpeed 0.19 does for ZeRO-3, and for ZeRO-2 without offload. With an offloaded optimizer, ZeRO-2 adds them up in
    the dtype of the weights. For ZeRO-1 in BF16 grad_accum_dtype selects an optimizer class that is not supported.
    """
    return strategy not in ("zero1", "zero2") or (strategy == "zero2" and offload == "none")
