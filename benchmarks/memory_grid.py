"""Measures what a training step costs in memory and time, over a grid of recipes: calibrates launcher/memory.py.

Each case builds a Qwen3 shape with random weights, trains it for a few optimizer steps of two micro-batches and writes
one JSON line; a case that is already in the output file is skipped, so an interrupted grid goes on where it stopped.

    export PYTORCH_ALLOC_CONF=expandable_segments:True
    python benchmarks/memory_grid.py measure --out memory.jsonl
    python benchmarks/memory_grid.py collect memory.jsonl --out benchmarks/results/memory_h200.json

A layer's graph does not depend on the number of layers: `measure --grid speed --layers 2 --shard 0/4` (and 1/4, ...)
fills the compile cache from several processes, and the real grid then spends its time on measuring.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import gc
import importlib
import inspect
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from launcher.bases import TINY_BASE_NAME
from launcher.choices import Checkpointing, LossKernel
from launcher.memory import CHUNKED_LOSS_TOKENS, SELECTIVE_MIN_INNER, Recipe
from launcher.shapes import ModelShape, load_shape

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ALL_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MEAN_DOCUMENT_TOKENS = 350  # of the lengths in a pack; they move the time, not the memory
WARM_STEPS = 2  # the first compiles and allocates the optimizer's state
TIMED_STEPS = 4
# torch 2.13 wants to be told what 2.11 takes for granted; resolved here, because looking it up would break the graph
GROUPED_QUERIES: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


SHAPES = {
    "tiny": load_shape(TINY_BASE_NAME, ()),
    "0.6B": load_shape("Qwen/Qwen3-0.6B", ()),
    "1.7B": load_shape("Qwen/Qwen3-1.7B", ()),
    "4B": load_shape("Qwen/Qwen3-4B", ()),
    "8B": load_shape("Qwen/Qwen3-8B", ()),
}

BASE_RECIPE = Recipe(
    adapter="lora",
    rank=16,
    target_modules=ALL_LINEARS,
    quantization="none",
    compute_dtype="bf16",
    base_dtype="bf16",
    trainable_dtype="fp32",
    optimizer="adamw_torch_fused",
    checkpointing="none",
    compiled=False,
    loss_kernel="liger",
    attention="varlen",
    packed=True,
    sequence_length=2_048,
    micro_batch_size=2,
    strategy="single",
    offload="none",
    num_ranks=1,
    on_gpu=True,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One measurement: a size of SHAPES, a recipe, and how many micro-batches make a step."""

    model: str
    recipe: Recipe

    @property
    def accumulation(self) -> int:
        return 2 if self.recipe.accumulates_gradients else 1

    @property
    def key(self) -> str:
        return json.dumps({"model": self.model, **dataclasses.asdict(self.recipe)}, sort_keys=True)


# ------------------------------------------------------------------------------------------------------------- the grid


def make_case(model: str, micro_batch_size: int, sequence_length: int, kind: str = "lora", **changes: Any) -> Case:
    """`kind` is an adapter, or one of the names below for what people call a method of its own."""
    methods: dict[str, dict[str, Any]] = {
        "qlora": {"quantization": "int4"},
        "int8": {"quantization": "int8"},
        "dora": {"adapter": "dora"},
        "ia3": {"adapter": "ia3", "rank": None},
        "full": {"adapter": "full", "rank": None, "target_modules": (), "trainable_dtype": "bf16"},
        "full32": {"adapter": "full", "rank": None, "target_modules": (), "base_dtype": "fp32"},
        "lora": {},
    }
    fields = {"micro_batch_size": micro_batch_size, "sequence_length": sequence_length, **methods[kind], **changes}
    return Case(model=model, recipe=dataclasses.replace(BASE_RECIPE, **fields))


def compiled_speed_cases() -> Iterator[Case]:
    """What the planner's speed estimate rests on, and the main line of the memory model."""
    for kind in ("lora", "dora", "full", "qlora"):
        for rows in (2, 8, 16):
            yield make_case("0.6B", rows, 2_048, kind, compiled=True)
        for rows in (2, 4):
            yield make_case("8B", rows, 2_048, kind, compiled=True)
    for kind in ("lora", "dora", "full", "qlora"):
        yield make_case("0.6B", 16, 2_048, kind, compiled=True, checkpointing="full")
    for kind in ("lora", "qlora"):
        yield make_case("8B", 4, 2_048, kind, compiled=True, checkpointing="full")
    for kind in ("lora", "full"):
        yield make_case("0.6B", 16, 2_048, kind, compiled=True, checkpointing="selective")
    yield make_case("8B", 4, 2_048, "lora", compiled=True, checkpointing="selective")


def compiled_cases() -> Iterator[Case]:
    yield make_case("0.6B", 8, 2_048, "lora", compiled=True, adapter_dropout=0.1)
    yield make_case("8B", 2, 2_048, "lora", compiled=True, adapter_dropout=0.1)
    yield make_case("1.7B", 4, 2_048, "lora", compiled=True)
    yield make_case("4B", 2, 2_048, "lora", compiled=True)
    yield make_case("0.6B", 8, 2_048, "dora", compiled=True, adapter_dropout=0.1)
    yield make_case("1.7B", 4, 2_048, "dora", compiled=True)
    yield make_case("0.6B", 8, 2_048, "full32", compiled=True)
    yield make_case("1.7B", 2, 2_048, "full32", compiled=True)
    yield make_case("4B", 2, 2_048, "qlora", compiled=True, adapter_dropout=0.05)
    yield make_case("4B", 4, 2_048, "qlora", compiled=True, checkpointing="selective")
    yield make_case("1.7B", 8, 2_048, "lora", compiled=True, checkpointing="full", adapter_dropout=0.05)
    yield make_case("0.6B", 1, 512, "lora", compiled=True)
    yield make_case("4B", 1, 8_192, "full", compiled=True, checkpointing="full")
    yield make_case("0.6B", 8, 2_048, "lora", compiled=True, loss_kernel="full_logits")


def eager_cases() -> Iterator[Case]:
    sizes: dict[str, tuple[tuple[int, int], ...]] = {
        "0.6B": ((1, 512), (2, 2_048), (16, 512), (4, 4_096), (16, 2_048)),
        "1.7B": ((1, 2_048), (8, 1_024)),
        "4B": ((2, 2_048), (1, 8_192)),
        "8B": ((1, 2_048), (4, 2_048)),
    }
    for model, batches in sizes.items():
        for rows, tokens in batches:
            yield make_case(model, rows, tokens)
    by_checkpointing: dict[Checkpointing, tuple[tuple[str, int, int], ...]] = {
        "full": (("0.6B", 2, 2_048), ("0.6B", 16, 8_192), ("1.7B", 8, 2_048), ("4B", 4, 2_048), ("8B", 2, 8_192)),
        "selective": (("0.6B", 2, 2_048), ("0.6B", 16, 2_048), ("1.7B", 4, 2_048), ("4B", 2, 2_048), ("8B", 4, 2_048)),
    }
    for checkpointing, batches_of in by_checkpointing.items():
        for model, rows, tokens in batches_of:
            yield make_case(model, rows, tokens, checkpointing=checkpointing)
    yield from eager_dora_and_quantized_cases()
    yield from eager_full_cases()
    yield from eager_odd_cases()


def eager_dora_and_quantized_cases() -> Iterator[Case]:
    for model, rows in (("0.6B", 2), ("0.6B", 8), ("1.7B", 4), ("4B", 1), ("8B", 2)):
        yield make_case(model, rows, 2_048, "dora")
    yield make_case("0.6B", 8, 2_048, "dora", checkpointing="full")
    yield make_case("8B", 2, 2_048, "dora", checkpointing="full")
    yield make_case("4B", 2, 2_048, "dora", checkpointing="selective")
    for model, rows in (("0.6B", 2), ("1.7B", 4), ("4B", 1), ("8B", 2)):
        yield make_case(model, rows, 2_048, "qlora")
    yield make_case("8B", 1, 2_048, "qlora", checkpointing="full")
    yield make_case("8B", 8, 2_048, "qlora", checkpointing="full")
    yield make_case("4B", 2, 2_048, "qlora", checkpointing="selective")
    yield make_case("8B", 1, 2_048, "qlora", adapter="dora", checkpointing="full")
    for model, rows, kind in (("0.6B", 8, "lora"), ("8B", 2, "lora"), ("8B", 1, "qlora"), ("1.7B", 2, "dora")):
        yield make_case(model, rows, 2_048, kind, adapter_dropout=0.1)


def eager_full_cases() -> Iterator[Case]:
    for kind in ("full", "full32"):
        for model, rows in (("0.6B", 2), ("0.6B", 8), ("1.7B", 4)):
            yield make_case(model, rows, 2_048, kind)
        yield make_case("1.7B", 4, 2_048, kind, checkpointing="full")
        yield make_case("4B", 2, 2_048, kind, checkpointing="full")
        yield make_case("0.6B", 8, 2_048, kind, checkpointing="selective")
        yield make_case("1.7B", 2, 2_048, kind, accumulates_gradients=False)
        yield make_case("0.6B", 2, 2_048, kind, optimizer="adamw_bnb_8bit")
    yield make_case("4B", 2, 2_048, "full", optimizer="adamw_bnb_8bit", checkpointing="full")
    yield make_case("1.7B", 1, 2_048, "full", optimizer="sgd")
    yield make_case("1.7B", 1, 2_048, "full", optimizer="adamw_torch", checkpointing="full")


def eager_odd_cases() -> Iterator[Case]:
    """Losses, attention backends and adapters off the main line."""
    losses: tuple[LossKernel, ...] = ("chunked", "full_logits")
    for loss_kernel in losses:
        yield make_case("0.6B", 2, 2_048, loss_kernel=loss_kernel)
        yield make_case("0.6B", 8, 2_048, loss_kernel=loss_kernel, checkpointing="full")
        yield make_case("8B", 1, 2_048, loss_kernel=loss_kernel)
        yield make_case("0.6B", 2, 2_048, "full", loss_kernel=loss_kernel)
    for kind in ("ia3", "int8"):
        yield make_case("0.6B", 4, 2_048, kind)
        yield make_case("8B", 1, 2_048, kind)
    yield make_case("0.6B", 8, 2_048, trainable_dtype="bf16")
    yield make_case("8B", 1, 2_048, trainable_dtype="bf16")
    yield make_case("0.6B", 4, 2_048, attention="sdpa", packed=False)
    yield make_case("1.7B", 2, 2_048, attention="sdpa", packed=False)
    yield make_case("0.6B", 2, 2_048, attention="sdpa", packed=True)
    yield make_case("0.6B", 4, 1_024, attention="eager", packed=False)


def tiny_cases() -> Iterator[Case]:
    """Every code path of this script, on a CPU, in a minute."""
    cpu: dict[str, Any] = {"attention": "sdpa", "on_gpu": False, "loss_kernel": "chunked"}
    for kind in ("lora", "dora", "ia3", "full", "full32", "qlora"):
        yield make_case("tiny", 1, 64, kind, **cpu)
    for checkpointing in ("full", "selective"):
        for compiled in (False, True):
            yield make_case("tiny", 1, 64, **cpu, checkpointing=checkpointing, compiled=compiled)
    yield make_case("tiny", 2, 64, **cpu, packed=False, adapter_dropout=0.1)
    yield make_case("tiny", 2, 64, **{**cpu, "loss_kernel": "full_logits", "attention": "eager"}, packed=False)
    yield make_case("tiny", 1, 64, **cpu, accumulates_gradients=False, optimizer="sgd")


GRIDS: dict[str, Callable[[], Iterable[Case]]] = {
    "all": lambda: [*compiled_speed_cases(), *compiled_cases(), *eager_cases()],
    "speed": lambda: list(compiled_speed_cases()),
    "compiled": lambda: list(compiled_cases()),
    "eager": lambda: list(eager_cases()),
    "tiny": lambda: list(tiny_cases()),
}


# ------------------------------------------------------------------------------------------------------------ attention


class PackedRow:
    """The borders of the documents in the row under training: read by the attention function, set by the batch."""

    borders: Tensor
    longest: int
    dtype: torch.dtype


def attend_packed(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface over torch's variable-length FlashAttention."""
    # fp32 norm weights and DoRA leave fp32 here, which FlashAttention does not take
    query, key, value = (heads.transpose(1, 2).flatten(0, 1).to(PackedRow.dtype) for heads in (query, key, value))
    borders, longest = PackedRow.borders, PackedRow.longest
    scale = kwargs.get("scaling")
    mixed = varlen_attn(
        query, key, value, borders, borders, longest, longest, scale=scale, window_size=(-1, 0), **GROUPED_QUERIES
    )
    return cast(Tensor, mixed).unsqueeze(0), None


def sample_document_lengths(num_tokens: int, longest: int, rng: random.Random) -> list[int]:
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        length = int(rng.lognormvariate(math.log(MEAN_DOCUMENT_TOKENS) - 0.32, 0.8))
        lengths.append(min(longest, max(16, length)))
    lengths[-1] -= sum(lengths) - num_tokens
    return lengths if lengths[-1] > 0 else lengths[:-1]


# ---------------------------------------------------------------------------------------------------------------- model


def build_base(shape: ModelShape, recipe: Recipe, device: str) -> nn.Module:
    from transformers import AutoModelForCausalLM, Qwen3Config
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("varlen", attend_packed)
    config = Qwen3Config(
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.tied_embeddings,
        max_position_embeddings=shape.max_positions,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(DTYPES[recipe.base_dtype])
    try:
        with torch.device(device):
            model = cast(Any, AutoModelForCausalLM).from_config(config, attn_implementation=recipe.attention)
    finally:
        torch.set_default_dtype(torch.float32)
    if recipe.quantization != "none":
        quantize_linears(cast(Any, model), recipe, device)
    return cast(nn.Module, model)


def quantize_linears(model: Any, recipe: Recipe, device: str) -> None:
    """The layers' linears only, as transformers does on loading."""
    bnb = importlib.import_module("bitsandbytes")
    for module in [m for layer in model.model.layers for m in layer.modules()]:
        for name, child in list(module.named_children()):
            if not isinstance(child, nn.Linear):
                continue
            weight = child.weight.data
            if recipe.quantization == "int4":
                options = {"compute_dtype": DTYPES[recipe.compute_dtype], "quant_type": "nf4", "bias": False}
                packed = bnb.nn.Linear4bit(child.in_features, child.out_features, **options, device="meta")
                packed.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=packed)
            else:
                options = {"has_fp16_weights": False, "threshold": 6.0, "bias": False}
                packed = bnb.nn.Linear8bitLt(child.in_features, child.out_features, **options, device="meta")
                packed.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
            setattr(module, name, packed.to(device))
    setattr(model, "is_loaded_in_4bit" if recipe.quantization == "int4" else "is_loaded_in_8bit", True)


def add_adapter(model: nn.Module, recipe: Recipe) -> nn.Module:
    from peft import IA3Config, LoraConfig, get_peft_model

    if recipe.adapter == "full":
        return model
    config: Any
    if recipe.adapter == "ia3":
        config = IA3Config(
            target_modules=list(recipe.target_modules), feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
        )
    else:
        config = LoraConfig(
            r=recipe.rank or 0,
            lora_alpha=32,
            lora_dropout=recipe.adapter_dropout,
            use_dora=recipe.adapter == "dora",
            target_modules=list(recipe.target_modules),
        )
    adapted = get_peft_model(cast(Any, model), config, autocast_adapter_dtype=recipe.trainable_dtype == "fp32")
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(DTYPES[recipe.trainable_dtype])
    return cast(nn.Module, adapted)


def keep_products(_context: Any, op: Any, *args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Keep what is dear to recompute: attention, and products with a long inner dimension (not a LoRA's second one)."""
    name = str(op)
    if name.startswith(("torch_attn._varlen_attn", "aten._scaled_dot_product", "bitsandbytes.gemm_4bit")):
        return CheckpointPolicy.MUST_SAVE
    left = args[1] if name.startswith("aten.addmm") else args[0] if name.startswith("aten.mm.") else None
    if left is not None and left.shape[-1] >= SELECTIVE_MIN_INNER:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def prepare_layers(layers: Iterable[Any], recipe: Recipe) -> None:
    """Selective checkpointing sits inside the compiled region, where the compiler sees what it may recompute.

    Full checkpointing sits around it: inside, the compiler kept the products of 4-bit weights and gave up on DoRA.
    """
    for layer in layers:
        forward = layer.forward
        if recipe.checkpointing == "selective":
            forward = checkpoint_layer(forward, recipe)
        if recipe.compiled:
            forward = torch.compile(forward, dynamic=False)
        if recipe.checkpointing == "full":
            forward = checkpoint_layer(forward, recipe)
        layer.forward = forward


def checkpoint_layer(forward: Callable[..., Any], recipe: Recipe) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False}
    if recipe.checkpointing == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, keep_products)

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    return run


def build_optimizer(parameters: list[nn.Parameter], recipe: Recipe) -> torch.optim.Optimizer:
    if recipe.optimizer == "adamw_bnb_8bit":
        return cast(torch.optim.Optimizer, importlib.import_module("bitsandbytes").optim.AdamW8bit(parameters, lr=1e-4))
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=1e-4)
    return torch.optim.AdamW(parameters, lr=1e-4, fused=recipe.optimizer == "adamw_torch_fused")


# ----------------------------------------------------------------------------------------------------------------- loss


def compute_chunk_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy((hidden @ weight.t()).float(), labels, reduction="sum")


def compute_loss(hidden: Tensor, weight: Tensor, labels: Tensor, recipe: Recipe) -> Tensor:
    """Sum over tokens divided by their number. The head's product runs in the compute dtype."""
    dtype = DTYPES[recipe.compute_dtype]
    hidden, weight = hidden.flatten(0, 1).to(dtype), weight.to(dtype)
    if recipe.loss_kernel == "liger":
        loss = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss(reduction="sum")
        return cast(Tensor, loss(weight, hidden, labels)) / labels.numel()
    if recipe.loss_kernel == "full_logits":
        return compute_chunk_loss(hidden, weight, labels) / labels.numel()
    total = hidden.new_zeros((), dtype=torch.float32)
    chunks = zip(torch.split(hidden, CHUNKED_LOSS_TOKENS), torch.split(labels, CHUNKED_LOSS_TOKENS), strict=True)
    for part, part_labels in chunks:
        total = total + checkpoint(compute_chunk_loss, part, weight, part_labels, use_reentrant=False)
    return total / labels.numel()


# ------------------------------------------------------------------------------------------------------------ measuring


class Trainer:
    """One case, ready to step."""

    def __init__(self, case: Case, shape: ModelShape, device: str) -> None:
        self.recipe, self.shape, self.device, self.accumulation = case.recipe, shape, device, case.accumulation
        base: Any = build_base(shape, case.recipe, device)
        self.model: Any = add_adapter(base, case.recipe)
        self.model.train()
        self.decoder, self.head = base.model, base.lm_head
        prepare_layers(self.decoder.layers, case.recipe)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = build_optimizer(self.parameters, case.recipe)
        self.inputs = self.make_positions()

    @property
    def num_tokens(self) -> int:
        return self.recipe.micro_batch_size * self.recipe.sequence_length

    def make_positions(self) -> dict[str, Tensor]:
        """Packed: one row of documents, alike in every step, so that one graph serves all. Padded: the longest rows."""
        if not self.recipe.packed:
            rows = (self.recipe.micro_batch_size, self.recipe.sequence_length)
            mask = torch.ones(rows, dtype=torch.long, device=self.device)
            mask[:, -1] = 0  # a mask without padding is dropped by transformers
            return {"attention_mask": mask}
        lengths = sample_document_lengths(self.num_tokens, self.recipe.sequence_length, random.Random(0))
        PackedRow.borders = torch.tensor([0, *lengths]).cumsum(0).int().to(self.device)
        PackedRow.longest = self.recipe.sequence_length
        PackedRow.dtype = DTYPES[self.recipe.compute_dtype]
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        return {"position_ids": positions.to(self.device)}

    def step(self) -> None:
        rows = (1, self.num_tokens) if self.recipe.packed else (self.recipe.micro_batch_size, -1)
        for _ in range(self.accumulation):
            ids = torch.randint(0, self.shape.vocab_size, (self.num_tokens,), device=self.device)
            with torch.autocast(self.device, dtype=DTYPES[self.recipe.compute_dtype]):
                hidden = self.decoder(input_ids=ids.view(rows), use_cache=False, **self.inputs).last_hidden_state
                loss = compute_loss(hidden, self.head.weight, ids.roll(-1), self.recipe)
            del hidden
            (loss / self.accumulation).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure_case(case: Case, shape: ModelShape, device: str, *, timed: bool) -> dict[str, Any]:
    """Peaks are those of steady steps: the optimizer's state exists and nothing is compiled any more."""
    trainer = Trainer(case, shape, device)
    started = time.perf_counter()
    for _ in range(WARM_STEPS):
        trainer.step()
    synchronize(device)
    warm_seconds = time.perf_counter() - started
    cuda = torch.cuda
    static_bytes = cuda.memory_allocated() if device == "cuda" else 0
    if device == "cuda":
        cuda.empty_cache()  # what building took (quantising holds the unquantised weights) is not the steps'
        cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(TIMED_STEPS if timed else 1):
        started = time.perf_counter()
        trainer.step()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    step_seconds = statistics.median(seconds)
    return {
        "num_trainable": sum(parameter.numel() for parameter in trainer.parameters),
        "static_bytes": static_bytes,
        "peak_allocated_bytes": cuda.max_memory_allocated() if device == "cuda" else 0,
        "peak_reserved_bytes": cuda.max_memory_reserved() if device == "cuda" else 0,
        "context_bytes": measure_context_bytes() if device == "cuda" and timed else None,
        "num_graphs": counters["stats"]["unique_graphs"],
        "num_graph_breaks": sum(counters["graph_break"].values()),
        "warm_seconds": round(warm_seconds, 2),
        "step_seconds": round(step_seconds, 5) if timed else None,
        "tokens_per_second": round(trainer.accumulation * trainer.num_tokens / step_seconds) if timed else None,
    }


def measure_context_bytes() -> int:
    """What the process holds beside torch's allocator: the context and the loaded kernels."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def clean_up(device: str) -> int:
    """Returns what is still allocated: a leak would falsify the next case."""
    torch._dynamo.reset()
    counters.clear()
    gc.collect()
    if device != "cuda":
        return 0
    with contextlib.suppress(AttributeError):
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def read_versions() -> dict[str, str]:
    import importlib.metadata

    names = ("torch", "transformers", "peft", "bitsandbytes", "liger-kernel")
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return {**found, "python": sys.version.split()[0]}


def read_done(path: Path) -> set[str]:
    """Keys of the cases that have a measurement; failed ones are tried again."""
    if not path.exists():
        return set()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {Case(model=row["model"], recipe=load_recipe(row["recipe"])).key for row in rows if "error" not in row}


def load_recipe(fields: dict[str, Any]) -> Recipe:
    return Recipe(**{**fields, "target_modules": tuple(fields["target_modules"])})


def measure_into(path: Path, case: Case, shape: ModelShape, device: str, *, timed: bool) -> None:
    row: dict[str, Any] = {"model": case.model, "recipe": dataclasses.asdict(case.recipe)}
    row["leftover_bytes"] = clean_up(device)
    try:
        row |= measure_case(case, shape, device, timed=timed)
    except Exception as error:  # one case that fails must not cost the others
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    row |= {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "versions": read_versions(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    with path.open("a") as out:
        out.write(json.dumps(row, sort_keys=True) + "\n")
    print(describe_row(row), flush=True)


def describe_row(row: dict[str, Any]) -> str:
    recipe = row["recipe"]
    what = " ".join(
        str(recipe[name])
        for name in ("adapter", "quantization", "checkpointing", "loss_kernel", "attention", "trainable_dtype")
    )
    batch = f"{recipe['micro_batch_size']}x{recipe['sequence_length']}"
    mode = "compiled" if recipe["compiled"] else "eager"
    if "error" in row:
        return f"{row['model']:>5} {batch:>7} {mode:8} {what}: {row['error']}"
    graphs = f"{row['num_graphs']} graphs, {row['num_graph_breaks']} breaks, warm {row['warm_seconds']} s"
    peak, speed = row["peak_allocated_bytes"] / 2**30, row["tokens_per_second"]
    return f"{row['model']:>5} {batch:>7} {mode:8} {what}: {peak:.2f} GiB, {speed} tok/s, {graphs}"


def run_measure(args: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    deadline = time.monotonic() + args.seconds
    done = read_done(args.out)
    part, parts = (int(number) for number in args.shard.split("/"))
    for case in list(GRIDS[args.grid]())[part::parts]:
        if case.key in done:
            continue
        if time.monotonic() > deadline:
            print("out of time; run again to go on")
            return
        shape = SHAPES[case.model]
        if args.layers is not None:
            shape = shape.model_copy(update={"num_layers": args.layers})
        measure_into(args.out, case, shape, device, timed=not args.untimed)


def run_collect(args: argparse.Namespace) -> None:
    """One sorted, diffable file: the shapes, what is alike in all rows, and the rows."""
    rows = [json.loads(line) for path in args.rows for line in path.read_text().splitlines()]
    measured = {json.dumps([row["model"], row["recipe"]], sort_keys=True): row for row in rows if "error" not in row}
    common = {name: rows[0][name] for name in ("gpu", "versions", "date")}
    records = [{name: value for name, value in measured[key].items() if name not in common} for key in sorted(measured)]
    shapes = {name: SHAPES[name].model_dump(mode="json") for name in sorted({row["model"] for row in records})}
    lines = ",\n    ".join(json.dumps(record, sort_keys=True) for record in records)
    header = {**common, "allocator": "expandable_segments:True", "shapes": shapes}
    text = json.dumps(header, indent=1, sort_keys=True).removesuffix("\n}")
    args.out.write_text(f'{text},\n "records": [\n    {lines}\n ]\n}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    measure = verbs.add_parser("measure")
    measure.add_argument("--out", type=Path, required=True)
    measure.add_argument("--grid", choices=GRIDS, default="all")
    measure.add_argument("--shard", default="0/1", help="I/N: every Nth case from the Ith on")
    measure.add_argument("--layers", type=int, help="fewer layers than the model has: only to fill the compile cache")
    measure.add_argument("--seconds", type=float, default=math.inf, help="start no case after so long")
    measure.add_argument("--untimed", action="store_true", help="memory only: other processes use the GPU as well")
    measure.set_defaults(run=run_measure)
    collect = verbs.add_parser("collect")
    collect.add_argument("rows", type=Path, nargs="+")
    collect.add_argument("--out", type=Path, required=True)
    collect.set_defaults(run=run_collect)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
