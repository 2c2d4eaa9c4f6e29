"""The memory estimate against measurements, sums by hand, and PEFT's parameter counts."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.memory_grid.rows import GridRow, load_rows, load_table
from benchmarks.memory_grid.summary import compute_error, is_held_out, list_miscounted
from launcher.base_models.families import Linear
from launcher.base_models.shapes import ModelShape, load_shape
from launcher.core.choices import (
    UPDATE_CHUNK,
    AdapterKind,
    AttentionBackend,
    Checkpointing,
    LossKernel,
    Quantization,
    Strategy,
)
from launcher.core.units import GIB, MIB
from launcher.plan.estimate.memory import MemoryEstimate, estimate_memory
from launcher.plan.estimate.memory.recipe import (
    Recipe,
    count_fused_ranks,
    count_trainable,
    explain_layer_path,
    fuses_mlp,
    fuses_qkv,
)
from tests.conftest import ROOT
from tools.docs.families_page import describe_result, read_results

MEASUREMENTS = load_table(Path(__file__).parents[4] / "benchmarks" / "results" / "memory_h200.json")
CHUNKED = ROOT / "benchmarks/results/memory_fp8_bf16_h200.jsonl"
SHAPES = MEASUREMENTS.shapes
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NAMES = ("weights", "adapter", "gradients", "optimizer", "activations", "loss", "workspace", "context")

RECIPE = Recipe(
    adapter="lora",
    rank=16,
    target_modules=SEVEN,
    quantization="none",
    compute_dtype="bf16",
    base_dtype="bf16",
    trainable_dtype="fp32",
    optimizer="adamw_torch_fused",
    checkpointing="none",
    compiled=True,
    loss_kernel="fused",
    attention="varlen",
    sequence_length=2_048,
    micro_batch_size=2,
    strategy="single",
    offload="none",
    num_ranks=1,
    on_gpu=True,
)
FULL = dataclasses.replace(RECIPE, adapter="full", rank=None, target_modules=(), base_dtype="fp32")


FAMILY_ROWS = read_results()


@pytest.mark.parametrize("row", FAMILY_ROWS, ids=[row["case"] for row in FAMILY_ROWS])
def test_families_need_the_measured_memory(row: dict[str, Any]) -> None:
    """LoRA on all linear layers, and on stacked experts, as in benchmarks/families.py."""
    shape, recipe = describe_result(row)
    assert row["path"] == explain_layer_path(shape, recipe)[0]
    predicted_gib = estimate_memory(shape, recipe).allocated_bytes / GIB
    assert row["peak_gib"] == pytest.approx(predicted_gib, rel=0.04)  # the bound of all predictions


def make_shape(layers: int = 4, hidden: int = 64, intermediate: int = 128, vocab: int = 100) -> ModelShape:
    """Make a shape with two heads of size 16, one KV head, QK-norm as in Qwen3, and tied embeddings."""
    sizes = {
        "q_proj": (hidden, 32),
        "k_proj": (hidden, 16),
        "v_proj": (hidden, 16),
        "o_proj": (32, hidden),
        "gate_proj": (hidden, intermediate),
        "up_proj": (hidden, intermediate),
        "down_proj": (intermediate, hidden),
    }
    return ModelShape(
        name="tiny",
        model_type="qwen3",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=intermediate,
        vocab_size=vocab,
        max_positions=128,
        tied_embeddings=True,
        linears=tuple(Linear(name=name, in_features=i, out_features=o) for name, (i, o) in sizes.items()),
        norm_parameters_per_layer=2 * hidden + 2 * 16,
        other_parameters=hidden,
        gated_mlp=True,
        basis="config",
    )


def term(estimate: MemoryEstimate, name: str) -> int:
    return {part.name: part.num_bytes for part in estimate.terms}[name]


def total(shape: ModelShape, recipe: Recipe, **changes: Any) -> int:
    return estimate_memory(shape, dataclasses.replace(recipe, **changes)).total_bytes


# ------------------------------------------------------------------------------------------------------- measurements


def test_a_third_of_enough_measurements_is_held_out() -> None:
    held_out = [row for row in MEASUREMENTS.records if is_held_out(row)]
    assert len(MEASUREMENTS.records) >= 60
    assert 0.2 <= len(held_out) / len(MEASUREMENTS.records) <= 0.45


def has_quantized_embeddings(row: Any) -> bool:
    """Whether it was measured when 8-bit AdamW also quantized the states of embeddings."""
    return bool(row.recipe["adapter"] == "full" and row.recipe["optimizer"] == "adamw_bnb_8bit")


CURRENT = [row for row in MEASUREMENTS.records if not has_quantized_embeddings(row)]


@pytest.mark.parametrize("held_out", [False, True], ids=["fitted", "held out"])
def test_predicted_peaks_equal_measured_peaks(held_out: bool) -> None:
    rows = [row for row in CURRENT if is_held_out(row) == held_out]
    errors = [compute_error(row, SHAPES[row.model]).error for row in rows]
    assert statistics.median(abs(error) for error in errors) <= 0.005
    assert max(errors) <= 0.04
    assert min(errors) >= -0.02


def test_predicted_static_memory_equals_measured() -> None:
    for row in CURRENT:
        if row.recipe["graphed"]:  # the graph's memory pool also persists between steps
            continue
        estimate = estimate_memory(SHAPES[row.model], row.make_recipe())
        predicted = sum(term(estimate, name) for name in ("weights", "adapter", "optimizer")) + 64 * 1024**2
        assert predicted == pytest.approx(row.static_bytes, rel=0.01), row.recipe


def test_context_estimate_covers_measured_contexts() -> None:
    """Uses runs that had the GPU to themselves; cases of the memory grid ran concurrently."""
    alone = json.loads((ROOT / "benchmarks/results/speed_h200.json").read_text())["records"]
    measured = [record["context_bytes"] for record in alone if "context_bytes" in record]
    context = term(estimate_memory(make_shape(), RECIPE), "context")
    assert max(measured) <= context <= 1.1 * max(measured)


def test_dora_saves_queries_and_keys_before_scaling() -> None:
    """With QK-norm, the norm has already counted them."""
    dora = dataclasses.replace(RECIPE, adapter="dora")
    tokens, layers = RECIPE.micro_batch_size * RECIPE.sequence_length, 4
    normed = make_shape(layers=layers)
    plain = normed.model_copy(update={"norm_parameters_per_layer": 2 * normed.hidden_size, "model_type": "llama"})
    extra = [
        term(estimate_memory(shape, dora), "activations") - term(estimate_memory(shape, RECIPE), "activations")
        for shape in (normed, plain)
    ]
    assert extra[1] - extra[0] == pytest.approx(2 * tokens * layers * (32 + 16), rel=1e-6)


@pytest.mark.parametrize(
    ("rank", "count", "rows"), [(4, 1, 8), (4, 2, 8), (4, 3, 16), (8, 1, 8), (16, 3, 48), (1, 1, 8)]
)
def test_fused_ranks_are_padded_for_tensor_cores(rank: int, count: int, rows: int) -> None:
    assert count_fused_ranks(rank, count) == rows


def test_padded_rank_costs_as_much_as_the_padding() -> None:
    """For one matrix, rank 4 has as many rows in the fused weight as rank 8, and half the adapter."""
    one = dataclasses.replace(RECIPE, target_modules=("o_proj",))
    four, eight = (estimate_memory(make_shape(), dataclasses.replace(one, rank=rank)) for rank in (4, 8))
    assert term(eight, "adapter") - term(four, "adapter") == 4 * 4 * 4 * (32 + 64)
    assert term(eight, "activations") == term(four, "activations")


def test_trainable_parameters_equal_measured_counts() -> None:
    assert all(row.num_trainable for row in MEASUREMENTS.records)
    assert list_miscounted(MEASUREMENTS) == ()


# ---------------------------------------------------------------------------------------------------- sums by hand

# In make_shape() a layer has 64*32 + 2*64*16 + 32*64 + 3*64*128 = 30_720 weights in matrices and 160 in norms
LAYER_MATRICES = 30_720
PARAMETERS = 4 * (LAYER_MATRICES + 160) + 100 * 64 + 64
LORA = 4 * 16 * ((64 + 32) + 2 * (64 + 16) + (32 + 64) + 3 * (64 + 128))


def test_terms_have_a_fixed_order_and_include_zeros() -> None:
    estimate = estimate_memory(make_shape(), FULL)
    assert tuple(part.name for part in estimate.terms) == NAMES
    assert term(estimate, "adapter") == 0
    assert estimate.total_bytes == sum(part.num_bytes for part in estimate.terms)


def test_full_fine_tuning_in_fp32_keeps_everything_in_fp32() -> None:
    estimate = estimate_memory(make_shape(), FULL)
    assert term(estimate, "weights") == 4 * PARAMETERS
    assert term(estimate, "gradients") == 4 * PARAMETERS
    assert term(estimate, "optimizer") == 8 * PARAMETERS


def test_bf16_weights_halve_weights_and_gradients_but_not_moments() -> None:
    estimate = estimate_memory(make_shape(), dataclasses.replace(FULL, base_dtype="bf16", trainable_dtype="bf16"))
    sizes = [term(estimate, name) for name in ("weights", "gradients", "optimizer")]
    assert sizes == [2 * PARAMETERS, 2 * PARAMETERS, 8 * PARAMETERS]


def test_lora_keeps_the_base_frozen() -> None:
    """As PEFT does; fused LoRA holds a second, 16-bit copy of the adapter in the base's fused weights."""
    recipe = dataclasses.replace(RECIPE, strategy="fsdp2", num_ranks=1)
    estimate = estimate_memory(make_shape(), recipe)
    assert term(estimate_memory(make_shape(), RECIPE), "adapter") > 6 * LORA
    sizes = [term(estimate, name) for name in ("weights", "adapter", "gradients", "optimizer")]
    assert sizes == [2 * PARAMETERS, 4 * LORA, 4 * LORA, 8 * LORA]


def test_fp8_base_has_a_second_copy_of_b() -> None:
    plain, fp8 = (estimate_memory(SHAPES["0.6B"], dataclasses.replace(RECIPE, fp8_base=base)) for base in (False, True))
    outputs_by_ranks = 4096 * 48 + 1024 * 16 + 6144 * 32 + 1024 * 16  # q, k, v; o; gate, up; down
    assert term(fp8, "adapter") - term(plain, "adapter") == 28 * 2 * outputs_by_ranks


def test_quantization_affects_linear_layers_only() -> None:
    matrices = 4 * LAYER_MATRICES * 4.127 / 8
    estimate = estimate_memory(make_shape(), dataclasses.replace(RECIPE, quantization="int4"))
    assert term(estimate, "weights") == pytest.approx(2 * (PARAMETERS - 4 * LAYER_MATRICES) + matrices, abs=1)


def test_optimizer_state_sizes() -> None:
    shape = make_shape()
    assert term(estimate_memory(shape, dataclasses.replace(RECIPE, optimizer="sgd")), "optimizer") == 0
    eight_bit = estimate_memory(shape, dataclasses.replace(FULL, optimizer="adamw_bnb_8bit"))
    norms = 4 * 160 + 64  # below 4096 elements: fp32 moments
    embeddings = shape.embedding_parameters  # fp32 moments, too
    quantized = PARAMETERS - embeddings
    expected = 2 * quantized + 8 * quantized / 256 + 6 * norms + 8 * embeddings
    assert term(eight_bit, "optimizer") == pytest.approx(expected, abs=1)


def test_paged_moments_are_in_cpu_memory() -> None:
    plain = estimate_memory(make_shape(), dataclasses.replace(FULL, optimizer="adamw_bnb_8bit"))
    paged = estimate_memory(make_shape(), dataclasses.replace(FULL, optimizer="paged_adamw_8bit"))
    assert (term(paged, "optimizer"), plain.host_bytes) == (0, 0)
    assert paged.host_bytes == term(plain, "optimizer")


def test_updates_in_backward_keep_the_gradients_of_one_layer() -> None:
    """One token: gradients and temporary tensors of the update are larger than those of the layer's backward pass."""
    shape, one_token = make_shape(), dataclasses.replace(FULL, sequence_length=1, micro_batch_size=1)
    update = 28 * shape.num_parameters  # fewer than those of a chunk
    for accumulates in (False, True):
        recipe = dataclasses.replace(one_token, optimizer_in_bwd=True, accumulates_gradients=accumulates)
        plain = dataclasses.replace(recipe, optimizer_in_bwd=False)
        assert term(estimate_memory(shape, recipe), "gradients") == 0
        more = term(estimate_memory(shape, recipe), "workspace") - term(estimate_memory(shape, plain), "workspace")
        assert more == pytest.approx(4 * shape.layer_parameters + update, rel=0.02)


def test_the_update_after_the_backward_pass_counts_where_it_needs_more() -> None:
    shape = SHAPES["0.6B"]
    recipe = dataclasses.replace(FULL, base_dtype="bf16", trainable_dtype="bf16", accumulates_gradients=False)
    fp32 = dataclasses.replace(recipe, optimizer="adamw_torch_fused", checkpointing="full")
    chunk = 28 * UPDATE_CHUNK
    kept = shape.num_parameters * (2 + 8 + 2)  # weights, moments and gradients
    few = estimate_memory(shape, dataclasses.replace(fp32, micro_batch_size=1, sequence_length=128))
    assert few.allocated_bytes - kept - chunk == pytest.approx(64 * MIB, rel=0.02)  # of cuBLAS


@pytest.mark.parametrize("row", load_rows(CHUNKED), ids=lambda row: row.case)
def test_fp8_and_bf16_weights_are_predicted(row: GridRow) -> None:
    """Six rows with BF16 weights were used for fitting; none of those in FP8."""
    estimate = estimate_memory(SHAPES[row.model], row.make_recipe()).allocated_bytes
    assert estimate == pytest.approx(row.peak_allocated_bytes, rel=0.025)


def test_strategies_shard_weights_gradients_and_optimizer_state() -> None:
    shape, four = make_shape(), dataclasses.replace(FULL, num_ranks=4)
    sizes: dict[Strategy, list[int]] = {}
    strategies: tuple[Strategy, ...] = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
    for strategy in strategies:
        estimate = estimate_memory(shape, dataclasses.replace(four, strategy=strategy))
        sizes[strategy] = [term(estimate, name) for name in ("weights", "gradients", "optimizer")]
    assert sizes["ddp"] == [4 * PARAMETERS, 8 * PARAMETERS, 8 * PARAMETERS]
    assert sizes["fsdp2"] == [PARAMETERS, PARAMETERS, 2 * PARAMETERS]
    assert sizes["zero1"] == [2 * PARAMETERS, 2 * PARAMETERS, 3 * PARAMETERS]  # bf16 weights; fp32 master and moments
    assert sizes["zero2"] == [2 * PARAMETERS, PARAMETERS, 3 * PARAMETERS]  # fp32 gradients
    assert sizes["zero3"] == [PARAMETERS / 2, PARAMETERS, 3 * PARAMETERS]


def test_offload_moves_state_to_cpu_memory() -> None:
    shape, zero = make_shape(), dataclasses.replace(FULL, strategy="zero3", num_ranks=4)
    optimizer = estimate_memory(shape, dataclasses.replace(zero, offload="optimizer"))
    assert term(optimizer, "optimizer") == 0
    # Per rank of four: fp32 master and moments, fp32 gradients, and a copy while they accumulate, fp32 in ZeRO-3.
    assert optimizer.host_bytes == 20 * PARAMETERS / 4
    zero2 = dataclasses.replace(zero, strategy="zero2", offload="optimizer")
    assert estimate_memory(shape, zero2).host_bytes == 18 * PARAMETERS / 4
    assert term(optimizer, "gradients") == 0
    everything = estimate_memory(shape, dataclasses.replace(zero, offload="optimizer_and_parameters"))
    assert term(everything, "weights") == 0
    assert everything.host_bytes == 20 * PARAMETERS / 4 + PARAMETERS / 2
    assert estimate_memory(shape, zero).host_bytes == 0


def test_cpu_has_no_cuda_context() -> None:
    estimate = estimate_memory(make_shape(), dataclasses.replace(RECIPE, on_gpu=False, compute_dtype="fp32"))
    assert term(estimate, "context") == 0
    assert "approximate" in next(part.note for part in estimate.terms if part.name == "activations")


def test_single_micro_batch_holds_the_larger_of_gradients_and_activations() -> None:
    shape = SHAPES["0.6B"]
    assert total(shape, FULL, accumulates_gradients=False) < total(shape, FULL)
    one_token = dataclasses.replace(FULL, accumulates_gradients=False, micro_batch_size=1, sequence_length=1)
    once = estimate_memory(shape, one_token)
    at_the_peak = sum(term(once, name) for name in ("gradients", "activations", "loss"))
    assert at_the_peak == pytest.approx(4 * shape.num_parameters, abs=2)


def without_gate(recipe: Recipe) -> tuple[str, ...]:
    return tuple(name for name in recipe.target_modules if name != "gate_proj")


def test_dropout_and_long_attention_cost_memory() -> None:
    shape = SHAPES["0.6B"]
    apart = dataclasses.replace(RECIPE, has_kernels=False)
    assert total(shape, apart, adapter_dropout=0.1) > total(shape, apart)
    # Fused ops recompute the dropout mask from a seed. DoRA saves the correction term of its scaled outputs.
    assert total(shape, RECIPE, adapter_dropout=0.1) == total(shape, RECIPE)
    dora = dataclasses.replace(RECIPE, adapter="dora", compiled=True)
    costs = [
        total(shape, one, adapter_dropout=0.1) - total(shape, one)
        for one in (dora, dataclasses.replace(dora, target_modules=without_gate(dora)))
    ]
    assert costs[0] > 1.2 * costs[1] > 0
    backends: tuple[AttentionBackend, ...] = ("varlen", "sdpa", "eager")
    totals = [total(shape, RECIPE, attention=attention, micro_batch_size=4) for attention in backends]
    assert totals == sorted(totals)
    assert totals[2] > 2 * totals[0]


# ------------------------------------------------------------------------------------------------------ monotonicity


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    adapter: AdapterKind = draw(st.sampled_from(["lora", "dora", "ia3", "full"]))
    quantizations: list[Quantization] = ["none"] if adapter == "full" else ["none", "int4"]
    loss_kernels: list[LossKernel] = ["fused", "chunked", "full_logits"]
    return dataclasses.replace(
        RECIPE,
        adapter=adapter,
        rank=draw(st.sampled_from([4, 16, 256])) if adapter in ("lora", "dora") else None,
        target_modules=() if adapter == "full" else SEVEN,
        quantization=draw(st.sampled_from(quantizations)),
        trainable_dtype=draw(st.sampled_from(["bf16", "fp32"])),
        optimizer=draw(st.sampled_from(["adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit", "sgd"])),
        compiled=draw(st.booleans()),
        loss_kernel=draw(st.sampled_from(loss_kernels)),
        attention=draw(st.sampled_from(["varlen", "sdpa", "eager"])),
        sequence_length=draw(st.integers(16, 8_192)),
        micro_batch_size=draw(st.integers(1, 32)),
        strategy=draw(st.sampled_from(["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"])),
        checkpointing=draw(st.sampled_from(["none", "selective", "full"])),
        adapter_dropout=draw(st.sampled_from([0.0, 0.1])),
        accumulates_gradients=draw(st.booleans()),
    )


shapes = st.sampled_from([make_shape(), *SHAPES.values()])


def is_updated_in_chunks(recipe: Recipe) -> bool:
    """Return whether the update can need more memory than any micro-batch: then tokens make no difference."""
    return recipe.trainable_dtype == "bf16" or recipe.optimizer == "paged_adamw_8bit"


@settings(max_examples=300, deadline=None)
@given(shapes, recipes())
def test_more_tokens_cost_more(shape: ModelShape, recipe: Recipe) -> None:
    equal = 2 * is_updated_in_chunks(recipe)  # bytes: the parts are rounded, so equal totals can differ by one
    before = estimate_memory(shape, recipe).total_bytes - equal
    assert total(shape, recipe, micro_batch_size=recipe.micro_batch_size + 1) > before
    assert total(shape, recipe, sequence_length=recipe.sequence_length + 1) > before


@settings(max_examples=300, deadline=None)
@given(shapes, recipes())
def test_checkpointing_saves_memory(shape: ModelShape, recipe: Recipe) -> None:
    recipe = dataclasses.replace(recipe, accumulates_gradients=True)
    steps: tuple[Checkpointing, ...] = ("none", "selective", "full")
    plain = dataclasses.replace(recipe, has_kernels=False)
    none, selective, full = (total(shape, plain, checkpointing=checkpointing) for checkpointing in steps)
    equal = is_updated_in_chunks(recipe)
    assert none + equal > selective
    assert selective + equal > full
    # Fused ops may save as little as selective checkpointing, which does not use them.
    assert total(shape, recipe, checkpointing="none") + equal > total(shape, recipe, checkpointing="full")


@settings(max_examples=300, deadline=None)
@given(shapes, recipes(), st.integers(1, 63))
def test_more_ranks_never_cost_more(shape: ModelShape, recipe: Recipe, num_ranks: int) -> None:
    fewer, more = (total(shape, recipe, num_ranks=ranks) for ranks in (num_ranks, num_ranks + 1))
    assert more <= fewer
    if recipe.strategy in ("fsdp2", "zero3"):
        assert more < fewer


@pytest.mark.parametrize(
    ("targets", "heads", "mlp"),
    [
        (SEVEN, True, True),
        (tuple(name for name in SEVEN if name != "gate_proj"), True, True),  # as in every published manifest
        (("q_proj", "v_proj"), True, False),
        (("up_proj",), False, False),  # no adapter on down_proj
        (("gate_proj", "down_proj"), False, True),
    ],
)
def test_blocks_are_fused_if_each_has_an_adapted_matrix(targets: tuple[str, ...], heads: bool, mlp: bool) -> None:
    recipe = dataclasses.replace(RECIPE, target_modules=targets)
    shape = SHAPES["0.6B"]
    assert (fuses_qkv(shape, recipe), fuses_mlp(shape, recipe)) == (heads, mlp)
    for apart in ({"has_kernels": False}, {"checkpointing": "selective"}):
        other = dataclasses.replace(recipe, **apart)
        assert not fuses_qkv(shape, other)
        assert not fuses_mlp(shape, other)


def test_one_dequantized_nf4_weight_is_alive_or_two_in_a_fused_mlp() -> None:
    """Fused weights are [W, sB; A, 0]; Qwen3-0.6B at rank 16."""
    shape = SHAPES["0.6B"]
    gates, down = (1024 + 32) * (6144 + 32) * 2, (3072 + 16) * (1024 + 16) * 2
    cases: tuple[tuple[Checkpointing, int], ...] = (("none", gates + down), ("selective", gates))
    for checkpointing, wanted in cases:
        recipe = dataclasses.replace(RECIPE, checkpointing=checkpointing)
        plain, packed = (
            term(estimate_memory(shape, dataclasses.replace(recipe, quantization=kind)), "workspace")
            for kind in ("none", "int4")
        )
        assert packed - plain == wanted


# ------------------------------------------------------------------------------------------------------- PEFT's counts


@pytest.mark.parametrize("adapter", ["lora", "dora", "ia3", "full"])
@pytest.mark.parametrize("targets", [SEVEN, ("q_proj", "v_proj"), ("k_proj", "down_proj")])
def test_trainable_parameters_equal_peft_counts(adapter: AdapterKind, targets: tuple[str, ...]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    shape = make_shape()
    config = transformers.Qwen3Config(
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=True,
    )
    with torch.device("cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    feedforward = tuple(name for name in targets if name == "down_proj")
    if adapter == "ia3":
        adapted = peft.IA3Config(
            target_modules=list(targets), feedforward_modules=list(feedforward), task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(model, adapted)
    elif adapter != "full":
        lora = peft.LoraConfig(r=8, use_dora=adapter == "dora", target_modules=list(targets))
        model = peft.get_peft_model(model, lora)
    real = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert count_trainable(shape, adapter, 8, targets, feedforward_modules=feedforward) == real


def test_offloaded_state_agrees_with_deepspeed_estimator() -> None:
    """DeepSpeed's estimator ignores accumulation: 16 bytes per parameter on the CPU, 2 on the GPU."""
    estimators = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2")
    shape = load_shape("Qwen/Qwen3-8B", ())
    recipe = dataclasses.replace(FULL, strategy="zero2", offload="optimizer", accumulates_gradients=False)
    on_cpu, on_gpu = estimators.estimate_zero2_model_states_mem_needs(
        shape.num_parameters, num_gpus_per_node=1, num_nodes=1, cpu_offload=True, additional_buffer_factor=1.0
    )
    memory = estimate_memory(shape, recipe)
    assert memory.host_bytes == pytest.approx(on_cpu, rel=0.01)
    assert sum(term(memory, name) for name in ("weights", "gradients", "optimizer")) == pytest.approx(on_gpu, rel=0.01)


def test_ia3_is_within_the_bounds_of_the_rest() -> None:
    """Peak of 8 x 2,048 tokens of Qwen3-0.6B on an H200, compiled, 2026-11-16."""
    recipe = dataclasses.replace(
        RECIPE,
        adapter="ia3",
        rank=None,
        graphed=True,
        target_modules=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        compiled=True,
        attention="triton",
        sequence_length=2048,
        micro_batch_size=8,
    )
    shape = load_shape("Qwen/Qwen3-0.6B", ())
    estimate = estimate_memory(shape, recipe)
    assert estimate.allocated_bytes / 2**30 == pytest.approx(18.4, rel=0.02)


@pytest.mark.parametrize(("sequence_length", "measured_gib"), [(4096, 7.68), (2048, 4.10)])
def test_nf4_matrices_with_partial_blocks_are_not_fused(sequence_length: int, measured_gib: float) -> None:
    """Peak of micro-batches of 4 on an H200, eager, 2026-11-19: SmolLM2's attention has matrices of 576 x 576."""
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    recipe = dataclasses.replace(
        RECIPE,
        target_modules=targets,
        quantization="int4",
        graphed=True,
        compiled=False,
        checkpointing="none",
        attention="triton",
        sequence_length=sequence_length,
        micro_batch_size=4,
    )
    shape = load_shape("HuggingFaceTB/SmolLM2-135M", ())
    path, reason = explain_layer_path(shape, recipe)
    assert path == "MLP"
    assert "multiple of 16,384 weights" in reason
    assert explain_layer_path(shape, dataclasses.replace(recipe, quantization="none"))[0] == "blocks"
    assert estimate_memory(shape, recipe).allocated_bytes / GIB == pytest.approx(measured_gib, rel=0.01)
