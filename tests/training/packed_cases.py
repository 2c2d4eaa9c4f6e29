"""Blocks of a base of four bits a weight, against bitsandbytes and PEFT, one matrix at a time.

For a process of their own (test_packed.py): PEFT looks for bitsandbytes once, and is seconds longer to import with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from launcher.corpus.store import Store
from launcher.memory.static import estimate_static
from launcher.paths import RunPaths
from launcher.plan.model import CompilePlan, Plan, QuantizationPlan
from launcher.shapes import make_shape
from launcher.training import packed
from launcher.training.assembly import assemble
from launcher.training.blocks import Block
from launcher.training.joined import find_joinable, join_layers
from launcher.training.layers import prepare_layers
from launcher.training.products import ProductLinear, Products, by_the_library, give_back, lay_out_products
from launcher.training.proof import Proof
from launcher.training.run import Run
from launcher.training.starting import start
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
from tests.training.test_kept import SIZES as KEPT_SIZES
from tests.training.test_kept import TARGETS, _known_attention, check_kept  # noqa: F401  # one of them a fixture
from tests.training.test_products import ALL, check_same, compute, drop_alike, find_layers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a GPU our kernel is held to bitsandbytes' own
# 16,384 weights, the least that are scaled by themselves, or a multiple
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 256,
    "vocab_size": 96,
}


def quantise(linear: nn.Linear, *, nested: bool = True) -> nn.Module:
    quantised = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=linear.weight.dtype, quant_type="nf4"
    )
    quantised.weight = bnb.nn.Params4bit(
        linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=nested, module=quantised
    )
    moved: nn.Module = quantised.to("cpu")
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
                setattr(parent, name, quantise(child, nested=nested))
    base.is_loaded_in_4bit = True
    lora = LoraConfig(r=4, lora_alpha=6, use_dora=dora, lora_dropout=dropout, target_modules=targets)
    model: Any = get_peft_model(base, lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    drop_alike(model)
    return model.train()


def lay_out(model: Any, dtype: torch.dtype = torch.float32, *, joins: bool = False) -> Products:
    layers = find_layers(model)
    products = lay_out_products(layers, dtype, compiled=joins, filled=find_joinable(layers) if joins else ())
    products.refresh()
    if joins:
        assert join_layers(layers) == 2 * SIZES["num_hidden_layers"]
    return products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_unpacked_is_bitsandbytes_to_the_bit(dtype: torch.dtype) -> None:
    model = make_model(dtype=dtype).to(DEVICE)
    layers = list(find_layers(model))
    theirs = {
        name: bnb.functional.dequantize_4bit(one.base_layer.weight.data, one.base_layer.weight.quant_state)
        for name, one in model.named_modules()
        if type(one).__name__ == "Linear4bit" and hasattr(one, "lora_A")
    }
    names = {one: name for name, one in model.named_modules()}
    products = lay_out(model, dtype)
    assert len(products.blocks) == 4 * len(layers)
    for block in products.blocks:
        matrix, row = block.matrix(), 0
        for index, (member, size) in enumerate(zip(block.members, block.sizes, strict=True)):
            assert torch.equal(matrix[row : row + size, : block.num_in], theirs[names[member]])
            ranks = slice(index * 4, index * 4 + 4)
            down, up = member.lora_A["default"].weight, member.lora_B["default"].weight
            assert torch.equal(matrix[block.num_out :][ranks, : block.num_in], down.to(dtype))
            assert torch.equal(matrix[row : row + size, block.num_in :][:, ranks], (up * block.scale).to(dtype))
            again = bnb.functional.dequantize_4bit(member.base_layer.weight.data, member.base_layer.weight.quant_state)
            assert torch.equal(again, theirs[names[member]]), "the members' own weights are views now"
            row += size
        assert not matrix[block.num_out :, block.num_in :].any()


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("joins", [False, True])
def test_loss_and_gradients_are_the_libraries(family: str, dora: bool, dropout: float, joins: bool) -> None:
    model = make_model(family=family, dora=dora, dropout=dropout)
    theirs = compute(model)
    products = lay_out(model, joins=joins)
    check_same(compute(model), theirs)
    with by_the_library():
        check_same(compute(model), theirs)
    if not joins:
        give_back(products)
        assert {type(one).__name__ for one in model.modules() if hasattr(one, "lora_A")} == {"Linear4bit"}
        check_same(compute(model), theirs)


def test_compiled() -> None:
    check_compiled(dora=True, dropout=0.3, checkpointing="none", joins=True)


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("checkpointing", "joins"), [("none", True), ("full", True), ("selective", False)])
def test_compiled_in_every_way(dora: bool, dropout: float, checkpointing: Any, joins: bool) -> None:
    check_compiled(dora, dropout, checkpointing, joins)


def check_compiled(dora: bool, dropout: float, checkpointing: Any, joins: bool) -> None:
    model = make_model(dora=dora, dropout=dropout)
    theirs = compute(model)
    lay_out(model, joins=joins)
    prepare_layers(find_layers(model), checkpointing, CompilePlan(scope="layer", backend="aot_eager", mode=None))
    check_same(compute(model), theirs)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2  # the first layer's input needs no gradient


@pytest.mark.parametrize(
    ("compiled", "joins", "dropout"),
    [
        *((False, joins, dropout) for joins in (False, True) for dropout in (0.0, 0.3)),
        (True, True, 0.3),
        *(pytest.param(True, *rest, marks=pytest.mark.slow) for rest in ((True, 0.0), (False, 0.0), (False, 0.3))),
    ],
)
def test_no_matrix_is_kept_for_the_backward_pass(compiled: bool, joins: bool, dropout: float) -> None:
    """They would be the base in full. What is kept of a block is what its tensors are anyway."""
    model = make_model(dora=True, dropout=dropout)
    products = lay_out(model, joins=joins)
    if compiled:
        plan = CompilePlan(scope="layer", backend="aot_eager_decomp_partition", mode=None)
        prepare_layers(find_layers(model), "none", plan)
    kept: list[tuple[int, ...]] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    shapes = {tuple(block.matrix().shape) for block in products.blocks}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(input_ids=torch.arange(24)[None], labels=torch.arange(24)[None], use_cache=False).loss
    loss.backward()
    assert len(kept) > 20
    assert not shapes & set(kept)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_matrices_without_an_adapter_join(dora: bool, dropout: float) -> None:
    """The targets of every published manifest."""
    model = make_model(dora=dora, dropout=dropout, targets=[name for name in ALL if name != "gate_proj"])
    theirs = compute(model)
    products = lay_out(model, joins=True)
    check_same(compute(model), theirs)
    with by_the_library():
        check_same(compute(model), theirs)
    give_back(products)
    check_same(compute(model), theirs)


def test_what_was_trained_is_in_what_is_built() -> None:
    model = make_model(dora=True)
    products = lay_out(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    with by_the_library():
        theirs = compute(model)
    products.refresh()
    check_same(compute(model), theirs)


def test_weights_are_held_once() -> None:
    model = make_model()
    before = sum(_weight_bytes(one) for one in model.modules())
    blocks = lay_out(model).blocks
    stored = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for block in blocks for one in block.stored[:6]
    }
    tables = blocks[0].stored[1].nbytes + blocks[0].stored[3].nbytes
    means = sum(block.stored[5].nbytes for block in blocks)
    # the two tables are one object for each matrix in bitsandbytes, too
    assert sum(stored.values()) <= before + len(blocks) * tables + means
    assert all(
        member.base_layer.weight.data_ptr() in range(*_span(block)) for block in blocks for member in block.members
    )


def _weight_bytes(module: nn.Module) -> int:
    weight: Any = getattr(module, "weight", None)
    state = getattr(weight, "quant_state", None)
    if state is None or hasattr(module, "lora_A"):
        return 0
    return int(weight.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes)


def _span(block: Block) -> tuple[int, int]:
    start = block.stored[0].data_ptr()
    return start, start + block.stored[0].nbytes


def test_borders_are_as_large_as_memory_is_planned_for_them() -> None:
    model = make_model()
    blocks = lay_out(model).blocks
    own = sum(p.numel() for p in model.parameters() if p.requires_grad)
    borders = sum(one.numel() for block in blocks for one in block.stored[-2:])
    recipe = make_recipe(ALL, quantization="int4")
    shape = make_shape(model.config.to_dict(), "qwen3", "config")
    assert estimate_static(shape, recipe).adapter == 4 * (own + borders)


@pytest.mark.parametrize(
    ("options", "num_taken"),
    [
        ({"nested": False}, 0),  # scales that are not quantised themselves
        ({"sizes": {**SIZES, "num_key_value_heads": 1}}, 2 * 5),  # keys and values of half a group of scales
        ({"dtype": torch.bfloat16}, 0),  # not what is computed in
    ],
)
def test_what_is_packed_otherwise_stays_with_peft(options: dict[str, Any], num_taken: int) -> None:
    model = make_model(**options)
    theirs = compute(model)
    products = lay_out(model)
    assert sum(isinstance(one, ProductLinear) for one in model.modules()) == num_taken
    assert sum(len(block.members) for block in products.blocks) == num_taken
    check_same(compute(model), theirs)


def test_the_operation_is_what_it_says_to_torch() -> None:
    block = lay_out(make_model()).blocks[0]
    torch.library.opcheck(packed.unpack, (*block.stored, None))
    torch.library.opcheck(packed.unpack, (*block.stored, torch.zeros(3)))


@pytest.mark.parametrize("joins", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("targets", TARGETS, ids=["all", "published", "two"])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.usefixtures("_known_attention")
def test_a_layer_keeps_what_is_planned(joins: bool, targets: list[str], dora: bool, dropout: float) -> None:
    model = make_model(dora=dora, dropout=dropout, dtype=torch.bfloat16, sizes=KEPT_SIZES, targets=targets)
    check_kept(model, targets, dropout, joins=joins, quantization="int4")


PUBLISHED = tuple(name for name in ALL if name != "gate_proj")
FOUR_BITS = QuantizationPlan(kind="int4", storage_dtype="uint8", double_quantization=True)


def build_run(plan: Plan, store: Store, root: Path) -> tuple[Run, Proof]:
    """From the base's shape to a run that is proven, as any other is. No plan of a CPU would have four bits."""
    base = write_base(root / "base", make_config(**{**SIZES, "vocab_size": VOCABULARY, "tie_word_embeddings": True}))
    fixed = {"base.name": str(base), "random_weights": True, "quantization": FOUR_BITS, "schedule.max_steps": 4}
    varied = vary(plan, {**fixed, **adapt("dora", target_modules=PUBLISHED)})
    reset_accelerate()
    return assemble(varied, RunPaths(root), store, (), start(varied))


@pytest.mark.parametrize("joins", [False, True])
def test_a_training_is_pefts(
    plan: Plan, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joins: bool
) -> None:
    monkeypatch.setattr("launcher.training.model.kernels_run_on", lambda _device: joins)  # as on a GPU
    run, proof = build_run(plan, store, tmp_path / "ours")
    assert proof.products is not None
    rounding = 1e-5 if DEVICE == "cpu" else 0.1  # FP32; a plan for a GPU computes in BF16
    assert 0 < proof.products < rounding
    blocks = run.engine.module.products.blocks
    assert {len(block.stored) for block in blocks} == {8}
    assert sum(len(block.members) for block in blocks) == len(blocks) / 4 * (7 if joins else 6)
    begin, losses = trained_weights(run), train_recorded(run).losses
    other, _ = build_run(plan, store, tmp_path / "theirs")
    give_back(other.engine.module.products)
    assert train_recorded(other).losses == pytest.approx(losses, rel=min(rounding, 1e-3))
    # AdamW moves a weight by its gradient's sign to begin with, even where the gradient is next to nothing.
    assert moved_difference(trained_weights(run), trained_weights(other), begin) < (5e-3 if DEVICE == "cpu" else 0.3)


def test_wrong_ones_are_left_to_peft(
    plan: Plan, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if a kernel took the second of two weights for the first."""
    own = packed.unpack
    monkeypatch.setattr(packed, "unpack", lambda codes, *rest: own((codes >> 4) | (codes << 4), *rest))
    run, proof = build_run(plan, store, tmp_path)
    assert proof.products is None
    assert not run.engine.module.products.blocks
    assert "PEFT's own are used" in capsys.readouterr().err
