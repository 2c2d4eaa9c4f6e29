"""The values that a decision can take, by the names that manifests, plans and upstream libraries use."""

from __future__ import annotations

from typing import Literal

AdapterKind = Literal["lora", "dora", "ia3", "full"]
Quantization = Literal["none", "int8", "int4"]  # int4: NF4 with double quantisation
Dtype = Literal["bf16", "fp16", "fp32"]
OptimizerName = Literal["adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "sgd"]
Checkpointing = Literal[
    "none", "selective", "full"
]  # selective keeps matrix products and attention, recomputes the rest
Strategy = Literal["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]
Offload = Literal["none", "optimizer", "optimizer_and_parameters"]
AttentionBackend = Literal[
    "flash_attention_4", "flash_attention_3", "flash_attention_2", "triton", "varlen", "flex", "sdpa", "eager"
]
LossKernel = Literal["fused", "chunked", "full_logits"]
CompileScope = Literal["layer", "model"]
Profile = Literal["full", "smoke"]

DTYPE_BYTES: dict[Dtype, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
NF4_BYTES = 4.127 / 8  # a weight: 4 bits, one 8-bit scale per 64, one fp32 per 256 scales (QLoRA, section 3)

# Whose work has another shape in each micro-batch: no CUDA graph can hold it.
UNRECORDABLE_ATTENTION: frozenset[AttentionBackend] = frozenset({"flex", "sdpa", "eager"})

# Our own attention kernels: features of a head, and how many query heads may share a key head (rows of one tile).
OWN_HEAD_SIZES = (64, 128)
OWN_GROUP = 32

SHARDED_STRATEGIES: frozenset[Strategy] = frozenset({"fsdp2", "zero3"})
DEEPSPEED_STRATEGIES: frozenset[Strategy] = frozenset({"zero1", "zero2", "zero3"})

# Rows that are not packed fill a micro-batch unevenly. It is filled up to the next of so many sizes, so that compiling
# meets at most so many shapes.
UNPACKED_SIZES = 8

# What our DeepSpeed files set, in elements; the memory prediction counts the same.
# DeepSpeed allocates its reduce buffer whole, and twice with overlap_comm. Its default of 5e8 takes 2 GB of a card even
# where an adapter has ten million weights; 5e7 takes 200 MB, and still makes long messages for any link.
ZERO_BUCKET_ELEMENTS = 50_000_000
# Parameters that are gathered and alive at a time: 5e8 are 1 GB in 16 bits. DeepSpeed's default is twice that.
ZERO_LIVE_ELEMENTS = 500_000_000
