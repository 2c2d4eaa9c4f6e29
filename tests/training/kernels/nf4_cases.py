"""Fused LoRA layers with an NF4 base against bitsandbytes and PEFT.

Run in a separate process by test_nf4.py: PEFT looks for bitsandbytes once, and takes seconds longer to import with it.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3Config

from launcher.base_models.families import FAMILIES
from launcher.base_models.shapes import make_shape
from launcher.core.run_paths import RunPaths
from launcher.corpus.store import Store
from launcher.plan.estimate.memory.static import estimate_static
from launcher.plan.model import CompilePlan, Plan, QuantizationPlan
from launcher.training.build import build_run
from launcher.training.engine.accelerator import build_accelerator
from launcher.training.engine.run import TrainingRun
from launcher.training.kernels import nf4
from launcher.training.model.compile_checkpoint import prepare_layers
from launcher.training.model.fused_lora.decoder_layer import (
    fuse_decoder_layers,
    list_fusable_blocks,
)
from launcher.training.model.fused_lora.linear import (
    FusedLoraLinear,
    FusedLoraModel,
    fuse_lora_layers,
    unfuse,
)
from launcher.training.model.fused_lora.reference import use_reference_forward
from launcher.training.model.fused_lora.weights import FusedLoraWeights
from launcher.training.model.layer_path import describe_path
from launcher.training.model.nf4_linear import round_to_nf4, shard_nf4_weights
from launcher.training.verify.packing import PackingCheck
from tests.training.builders import (
    VOCABULARY,
    adapt,
    make_config,
    make_recipe,
    moved_difference,
    reset_accelerate,
    train_recorded,
    trained_weights,
    vary,
    write_base,
)
from tests.training.model.test_fused_lora_linear import ALL, check_same, compute, get_layers, use_same_dropout_mask
from tests.training.model.test_saved_activations import SIZES as SAVED_SIZES
from tests.training.model.test_saved_activations import TARGETS, _counted_attention, check_saved_bytes  # noqa: F401  # one of them a fixture
from tests.training.test_families import DENSE, plan_family
from tools.docs.families_page import list_paths

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a GPU our kernel is compared with bitsandbytes' own
# each matrix has a multiple of 16,384 weights, the unit of double quantization
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 256,
    "vocab_size": 96,
}


def quantize(linear: nn.Linear, *, nested: bool = True) -> nn.Module:
    quantized = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=linear.weight.dtype, quant_type="nf4"
    )
    quantized.weight = bnb.nn.Params4bit(
        linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=nested, module=quantized
    )
    moved: nn.Module = quantized.to("cpu")
    return moved


def make_model(
    *,
    dora: bool = False,
    dropout: float = 0.0,
    family: str = "qwen3",
    dtype: torch.dtype = torch.float32,
    nested: bool = True,
    sizes: dict[str, Any] = SIZES,
    targets: Any = ALL,
) -> Any:
    torch.manual_seed(0)
    config: Any = Qwen3Config(**sizes) if family == "qwen3" else LlamaConfig(**sizes)
    base: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parent in [module for layer in base.model.layers for module in layer.modules()]:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, quantize(child, nested=nested))
    base.is_loaded_in_4bit = True
    lora = LoraConfig(r=4, lora_alpha=6, use_dora=dora, lora_dropout=dropout, target_modules=targets)
    model: Any = get_peft_model(base, lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    use_same_dropout_mask(model)
    return model.train()


def fuse(model: Any, dtype: torch.dtype = torch.float32, *, fuses_blocks: bool = False) -> FusedLoraModel:
    layers = get_layers(model)
    fused_model = fuse_lora_layers(
        layers, dtype, compiled=fuses_blocks, include_plain=list_fusable_blocks(layers) if fuses_blocks else ()
    )
    fused_model.refresh()
    if fuses_blocks:
        assert fuse_decoder_layers(layers) == 2 * SIZES["num_hidden_layers"]
    return fused_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantized_weights_are_bit_identical_to_bitsandbytes(dtype: torch.dtype) -> None:
    model = make_model(dtype=dtype).to(DEVICE)
    layers = list(get_layers(model))
    expected = {
        name: bnb.functional.dequantize_4bit(one.base_layer.weight.data, one.base_layer.weight.quant_state)
        for name, one in model.named_modules()
        if type(one).__name__ == "Linear4bit" and hasattr(one, "lora_A")
    }
    names = {one: name for name, one in model.named_modules()}
    fused_model = fuse(model, dtype)
    assert len(fused_model.weights) == 4 * len(layers)
    for weights in fused_model.weights:
        matrix, row = weights.materialize(), 0
        for index, (member, size) in enumerate(zip(weights.members, weights.shape.out_features, strict=True)):
            assert torch.equal(matrix[row : row + size, : weights.in_features], expected[names[member]])
            ranks = slice(index * 4, index * 4 + 4)
            lora_a, lora_b = member.lora_A["default"].weight, member.lora_B["default"].weight
            assert torch.equal(matrix[weights.out_features :][ranks, : weights.in_features], lora_a.to(dtype))
            assert torch.equal(
                matrix[row : row + size, weights.in_features :][:, ranks], (lora_b * weights.shape.lora_scale).to(dtype)
            )
            again = bnb.functional.dequantize_4bit(member.base_layer.weight.data, member.base_layer.weight.quant_state)
            assert torch.equal(again, expected[names[member]]), "the members' own weights must be views"
            row += size
        assert not matrix[weights.out_features :, weights.in_features :].any()


@pytest.mark.parametrize(
    ("family", "dora", "dropout", "fuses_blocks"),
    [  # every three values together; the other half with `make test-all`
        pytest.param(
            family,
            dora,
            dropout,
            fuses_blocks,
            marks=[pytest.mark.slow] if (family == "llama") ^ dora ^ (dropout > 0) ^ fuses_blocks else [],
        )
        for family in ("qwen3", "llama")
        for dora in (False, True)
        for dropout in (0.0, 0.3)
        for fuses_blocks in (False, True)
    ],
)
def test_loss_and_gradients_equal_the_reference(family: str, dora: bool, dropout: float, fuses_blocks: bool) -> None:
    model = make_model(family=family, dora=dora, dropout=dropout)
    expected = compute(model)
    fused_model = fuse(model, fuses_blocks=fuses_blocks)
    check_same(compute(model), expected)
    with use_reference_forward():
        check_same(compute(model), expected)
    if not fuses_blocks:
        unfuse(fused_model)
        assert {type(one).__name__ for one in model.modules() if hasattr(one, "lora_A")} == {"Linear4bit"}
        check_same(compute(model), expected)


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("checkpointing", "fuses_blocks"), [("none", True), ("full", True), ("selective", False)])
def test_compiled_gradients_in_every_combination(
    dora: bool, dropout: float, checkpointing: Any, fuses_blocks: bool
) -> None:
    model = make_model(dora=dora, dropout=dropout)
    expected = compute(model)
    fuse(model, fuses_blocks=fuses_blocks)
    prepare_layers(get_layers(model), checkpointing, CompilePlan(scope="layer", backend="aot_eager", mode=None))
    check_same(compute(model), expected)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2  # the first layer's input needs no gradient


@pytest.mark.parametrize(
    ("compiled", "fuses_blocks", "dropout"),
    [
        *((False, fuses_blocks, dropout) for fuses_blocks in (False, True) for dropout in (0.0, 0.3)),
        (True, True, 0.3),
        *(pytest.param(True, *rest, marks=pytest.mark.slow) for rest in ((True, 0.0), (False, 0.0), (False, 0.3))),
    ],
)
def test_no_dense_weight_is_saved_for_backward(compiled: bool, fuses_blocks: bool, dropout: float) -> None:
    """Only the quantized tensors may be saved, which exist anyway; the gradients are the reference's."""
    model = make_model(dora=True, dropout=dropout)
    expected = compute(model)
    fused_model = fuse(model, fuses_blocks=fuses_blocks)
    if compiled:
        plan = CompilePlan(scope="layer", backend="aot_eager_decomp_partition", mode=None)
        prepare_layers(get_layers(model), "none", plan)
    saved: list[tuple[int, ...]] = []

    def record(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    shapes = {tuple(weights.materialize().shape) for weights in fused_model.weights}
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        check_same(compute(model), expected)
    assert len(saved) > 20
    assert not shapes & set(saved)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == (2 if compiled else 0)  # the first layer's input needs no gradient


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_fused_blocks_include_layers_without_an_adapter(dora: bool, dropout: float) -> None:
    """The targets of every published manifest."""
    model = make_model(dora=dora, dropout=dropout, targets=[name for name in ALL if name != "gate_proj"])
    expected = compute(model)
    fused_model = fuse(model, fuses_blocks=True)
    check_same(compute(model), expected)
    with use_reference_forward():
        check_same(compute(model), expected)
    unfuse(fused_model)
    check_same(compute(model), expected)


def test_refresh_copies_changed_parameters() -> None:
    model = make_model(dora=True)
    fused_model = fuse(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    with use_reference_forward():
        expected = compute(model)
    fused_model.refresh()
    check_same(compute(model), expected)


def test_quantized_weights_are_stored_once() -> None:
    model = make_model()
    before = sum(_weight_bytes(one) for one in model.modules())
    all_weights = fuse(model).weights
    stored = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for weights in all_weights
        for one in weights.stored[:6]
    }
    tables = all_weights[0].stored[1].nbytes + all_weights[0].stored[3].nbytes
    means = sum(weights.stored[5].nbytes for weights in all_weights)
    # bitsandbytes has one object per matrix for the two tables, too
    assert sum(stored.values()) <= before + len(all_weights) * tables + means
    assert all(
        member.base_layer.weight.data_ptr() in range(*_span(weights))
        for weights in all_weights
        for member in weights.members
    )


def _weight_bytes(module: nn.Module) -> int:
    weight: Any = getattr(module, "weight", None)
    state = getattr(weight, "quant_state", None)
    if state is None or hasattr(module, "lora_A"):
        return 0
    return int(weight.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes)


def _span(weights: FusedLoraWeights) -> tuple[int, int]:
    build_accelerator = weights.stored[0].data_ptr()
    return build_accelerator, build_accelerator + weights.stored[0].nbytes


def test_lora_parts_have_the_planned_size() -> None:
    model = make_model()
    all_weights = fuse(model).weights
    own = sum(p.numel() for p in model.parameters() if p.requires_grad)
    lora_parts = sum(one.numel() for weights in all_weights for one in weights.stored[-2:])
    recipe = make_recipe(ALL, quantization="int4")
    shape = make_shape(model.config.to_dict(), "qwen3", "config")
    assert estimate_static(shape, recipe).adapter == 4 * (own + lora_parts)


@pytest.mark.parametrize(
    ("options", "num_fused"),
    [
        ({"nested": False}, 0),  # no double quantization
        ({"sizes": {**SIZES, "num_key_value_heads": 1}}, 2 * 5),  # k_proj and v_proj have half a group of scales
        ({"dtype": torch.bfloat16}, 0),  # not the compute dtype
    ],
)
def test_other_quantization_formats_stay_with_peft(options: dict[str, Any], num_fused: int) -> None:
    model = make_model(**options)
    expected = compute(model)
    fused_model = fuse(model)
    assert sum(isinstance(one, FusedLoraLinear) for one in model.modules()) == num_fused
    assert sum(len(weights.members) for weights in fused_model.weights) == num_fused
    check_same(compute(model), expected)


def test_dequantize_passes_opcheck() -> None:
    weights = fuse(make_model()).weights[0]
    torch.library.opcheck(nf4.dequantize, (*weights.stored, None))
    torch.library.opcheck(nf4.dequantize, (*weights.stored, torch.zeros(3)))


@pytest.mark.parametrize("fuses_blocks", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("targets", TARGETS, ids=["all", "published", "two"])
@pytest.mark.parametrize(
    ("dora", "dropout"),  # the others differ by the same bytes as without quantization: test_saved_activations.py
    [(False, 0.0), (True, 0.1), *(pytest.param(*rest, marks=pytest.mark.slow) for rest in ((True, 0.0), (False, 0.1)))],
)
@pytest.mark.usefixtures("_counted_attention")
def test_layer_saves_the_estimated_bytes(fuses_blocks: bool, targets: list[str], dora: bool, dropout: float) -> None:
    model = make_model(dora=dora, dropout=dropout, dtype=torch.bfloat16, sizes=SAVED_SIZES, targets=targets)
    check_saved_bytes(model, targets, dropout, fuses_blocks=fuses_blocks, quantization="int4")


PUBLISHED = tuple(name for name in ALL if name != "gate_proj")
# Each path, and each set of linear layers; the others with `make test-all`.
FAST_FAMILIES = ("arcee", "gemma2", "glm", "gpt_neox", "llama", "olmo2", "phi3", "qwen3", "starcoder2")
NF4 = QuantizationPlan(kind="int4", storage_dtype="uint8", double_quantization=True)


def build_nf4_run(plan: Plan, store: Store, root: Path) -> tuple[TrainingRun, PackingCheck]:
    """Build a run with an NF4 base. A plan for a CPU would not quantize."""
    base = write_base(root / "base", make_config(**{**SIZES, "vocab_size": VOCABULARY, "tie_word_embeddings": True}))
    fixed = {"base.name": str(base), "random_weights": True, "quantization": NF4, "schedule.max_steps": 4}
    varied = vary(plan, {**fixed, **adapt("dora", target_modules=PUBLISHED)})
    reset_accelerate()
    return build_run(varied, RunPaths(root), store, (), build_accelerator(varied))


@pytest.mark.parametrize("shape", [(128, 128), (192, 576), (3, 64)])  # groups of scales: one, incomplete, incomplete
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sharded_weights_are_those_of_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    linear = nn.Linear(shape[1], shape[0], dtype=dtype, device=DEVICE)
    expected = bnb.functional.dequantize_4bit(*bnb.functional.quantize_4bit(linear.weight.data, quant_type="nf4"))
    nested = bnb.functional.quantize_4bit(linear.weight.data, quant_type="nf4", compress_statistics=True)
    model: Any = nn.ModuleList([linear])
    model.get_decoder = lambda: SimpleNamespace(layers=[model])
    shard_nf4_weights(model, torch.device(DEVICE), torch.bfloat16)
    sharded: Any = model[0]
    assert sharded.weight.dtype == torch.bfloat16
    assert sharded.weight.numel() * 2 < 0.54 * linear.weight.numel() + 32
    assert torch.equal(sharded.dequantize(), bnb.functional.dequantize_4bit(*nested))
    assert torch.allclose(sharded.dequantize(), expected, atol=0.02)  # without double quantization
    x = torch.randn(5, shape[1], dtype=dtype, device=DEVICE, requires_grad=True)
    saved: list[int] = []

    def record(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        y = sharded(x)
    dense = sharded.dequantize()
    assert torch.allclose(y, functional.linear(x, dense, linear.bias), rtol=1e-2, atol=1e-2)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx, torch.ones_like(y) @ dense)
    assert dense.numel() not in saved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_weights_are_those_of_a_quantized_base(dtype: torch.dtype) -> None:
    """Export and evaluation without a GPU use them; a base in BF16 is rounded the same when it is loaded in FP32."""
    linear = nn.Linear(192, 576).to(torch.bfloat16).to(dtype)
    expected = bnb.functional.dequantize_4bit(
        *bnb.functional.quantize_4bit(linear.weight.data.bfloat16(), quant_type="nf4", compress_statistics=True)
    )
    layers: Any = nn.ModuleList([linear, nn.LayerNorm(8)])
    model: Any = SimpleNamespace(get_decoder=lambda: SimpleNamespace(layers=[layers]))
    round_to_nf4(model, torch.bfloat16, double_quantization=True, sharded=False)
    assert linear.weight.dtype == dtype
    assert torch.equal(linear.weight.data.bfloat16(), expected)
    odd = nn.Linear(40, 3)
    before = odd.weight.data.clone()
    model = SimpleNamespace(get_decoder=lambda: SimpleNamespace(layers=[nn.ModuleList([odd])]))
    round_to_nf4(model, torch.float32, double_quantization=True, sharded=True)
    assert torch.equal(odd.weight.data, before)
    round_to_nf4(model, torch.float32, double_quantization=True, sharded=False)
    assert not torch.equal(odd.weight.data, before)


def test_weight_with_an_incomplete_group_stays_dense() -> None:
    model: Any = nn.ModuleList([nn.Linear(40, 3)])
    model.get_decoder = lambda: SimpleNamespace(layers=[model])
    shard_nf4_weights(model, torch.device("cpu"), torch.float32)
    assert type(model[0]) is nn.Linear


def test_rank_without_weights_only_allocates_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With RAM-efficient loading its tensors are uninitialised, and touching them would take memory."""
    monkeypatch.setattr("launcher.training.model.nf4_linear.is_fsdp_enabled", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    model: Any = nn.ModuleList([nn.Linear(128, 128, device="meta")])
    model.get_decoder = lambda: SimpleNamespace(layers=[model])
    shard_nf4_weights(model, torch.device("cpu"), torch.float32)
    assert model[0].weight.is_meta
    assert model[0].weight.shape == ((128 * 128 // 2 + 128 * 128 // 64 + 8) // 4,)


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[] if name in FAST_FAMILIES else [pytest.mark.slow]) for name in DENSE]
)
def test_every_family_trains_on_nf4_by_the_path_of_the_docs(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    """The build compares the gradients with PEFT's."""
    monkeypatch.setattr("launcher.training.model.packed_lm.supports_triton", lambda _device: True)  # as on a GPU
    sizes = {**SIZES, "vocab_size": VOCABULARY, "sliding_window": 24, "attention_dropout": 0.0, "pad_token_id": 0}
    if FAMILIES[model_type].output_from_hidden:
        sizes["hidden_size"] = SIZES["num_attention_heads"] * SIZES["head_dim"]
    base = write_base(tmp_path / "base", AutoConfig.for_model(model_type, **sizes))
    plan = vary(plan_family(base), {"random_weights": True, "quantization": NF4})
    reset_accelerate()
    run, check = build_run(plan, RunPaths(tmp_path), store, (), build_accelerator(plan))
    assert check.lora_grads is not None
    assert any(isinstance(module, bnb.nn.Linear4bit) for module in run.engine.module.modules())
    assert describe_path(run.engine.module.layers) == list_paths(plan.base)[1]
    before, losses = trained_weights(run), train_recorded(run).losses
    assert all(torch.isfinite(torch.tensor(losses)))
    assert any(not torch.equal(weight, before[name]) for name, weight in trained_weights(run).items())


@pytest.mark.parametrize("fuses_blocks", [False, True])
def test_training_equals_pefts(
    plan: Plan, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fuses_blocks: bool
) -> None:
    monkeypatch.setattr(
        "launcher.training.model.packed_lm.supports_triton", lambda _device: fuses_blocks
    )  # as on a GPU
    run, check = build_nf4_run(plan, store, tmp_path / "ours")
    assert check.lora_grads is not None
    rounding = 1e-5 if DEVICE == "cpu" else 0.1  # FP32; a plan for a GPU computes in BF16
    assert 0 < check.lora_grads < rounding
    all_weights = run.engine.module.fused_lora.weights
    assert {len(weights.stored) for weights in all_weights} == {8}
    assert sum(len(weights.members) for weights in all_weights) == len(all_weights) / 4 * (7 if fuses_blocks else 6)
    begin, losses = trained_weights(run), train_recorded(run).losses
    other, _ = build_nf4_run(plan, store, tmp_path / "expected")
    unfuse(other.engine.module.fused_lora)
    assert train_recorded(other).losses == pytest.approx(losses, rel=min(rounding, 1e-3))
    # AdamW's first steps depend on the gradient's sign, even where the gradient is almost zero.
    assert moved_difference(trained_weights(run), trained_weights(other), begin) < (5e-3 if DEVICE == "cpu" else 0.3)


def test_wrong_dequantization_falls_back_to_peft(
    plan: Plan, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if a kernel swapped the two weights of a byte."""
    own = nf4.dequantize
    monkeypatch.setattr(nf4, "dequantize", lambda codes, *rest: own((codes >> 4) | (codes << 4), *rest))
    run, check = build_nf4_run(plan, store, tmp_path)
    assert check.lora_grads is None
    assert not run.engine.module.fused_lora.weights
    assert "Using PEFT's own layers" in capsys.readouterr().err
