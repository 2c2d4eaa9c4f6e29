"""Adapted matrices multiplied in blocks, against PEFT's own way of multiplying, one matrix at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from launcher.memory import count_trainable
from launcher.memory.static import estimate_static
from launcher.plan.model import CompilePlan
from launcher.shapes import make_shape
from launcher.training import layers as layers_module
from launcher.training.dropping import DropBySeed
from launcher.training.layers import prepare_layers
from launcher.training.products import ProductLinear, Products, by_the_library, lay_out_products, multiply
from tests.training.builders import make_recipe

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 160,
    "vocab_size": 96,
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IDS = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(3))
TOLERANCE = 5e-6  # of fp32 sums that are added up in another order


def make_model(
    *, dora: bool = False, dropout: float = 0.0, bias: bool = False, family: str = "qwen3", targets: Any = ALL
) -> Any:
    torch.manual_seed(0)
    config: Any = Qwen3Config(**SIZES, attention_bias=bias) if family == "qwen3" else LlamaConfig(**SIZES)
    lora = LoraConfig(r=4, lora_alpha=6, use_dora=dora, lora_dropout=dropout, target_modules=targets)
    model: Any = get_peft_model(AutoModelForCausalLM.from_config(config), lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def drop_alike(model: Any) -> None:
    """PEFT draws a mask for each matrix, we one for each input: now all are the same."""
    for module in model.modules():
        if isinstance(module, LoraLayer) and isinstance(module.lora_dropout["default"], nn.Dropout):
            module.lora_dropout["default"] = DropBySeed(module.lora_dropout["default"].p, 5)


def find_layers(model: Any) -> list[nn.Module]:
    return list(model.get_base_model().model.layers)


def lay_out(model: Any, **options: Any) -> Products:
    products = lay_out_products(find_layers(model), torch.float32, **options)
    products.refresh()
    return products


def compute(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), grads


def check_same(ours: tuple[Tensor, dict[str, Tensor]], theirs: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert float(ours[0]) == pytest.approx(float(theirs[0]), rel=TOLERANCE)
    assert ours[1].keys() == theirs[1].keys()
    for name, grad in theirs[1].items():
        assert float((ours[1][name] - grad).norm() / grad.norm()) < TOLERANCE, name


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_are_pefts(family: str, dora: bool, bias: bool) -> None:
    model = make_model(dora=dora, bias=bias, family=family)
    theirs = compute(model)
    products = lay_out(model)
    assert len(products.blocks) == 4 * SIZES["num_hidden_layers"]
    check_same(compute(model), theirs)
    with by_the_library():
        check_same(compute(model), theirs)


@pytest.mark.parametrize("targets", [ALL, ["q_proj", "v_proj", "down_proj"]])
def test_blocks_are_as_large_as_memory_is_planned_for_them(targets: list[str]) -> None:
    """Rank 4: a block of three matrices has 12 rows for it, and is filled up to 16."""
    model = make_model(targets=targets)
    own = sum(p.numel() for p in model.parameters() if p.requires_grad)
    blocks = lay_out(model).blocks
    border = sum(block.matrix().numel() - block.members[0].in_features * sum(block.sizes) for block in blocks)
    recipe = make_recipe(targets)
    shape = make_shape(model.config.to_dict(), "qwen3", "config")
    assert count_trainable(shape, "lora", 4, tuple(targets)) == own
    assert estimate_static(shape, recipe).adapter == 4 * (own + border)


@pytest.mark.parametrize(
    ("dora", "dropout"),
    [(False, 0.0), (True, 0.3), *(pytest.param(*rest, marks=pytest.mark.slow) for rest in ((True, 0.0), (False, 0.3)))],
)
def test_one_compiled_graph_serves_all_layers_but_the_first(dora: bool, dropout: float) -> None:
    """The first one's input needs no gradient."""
    model = make_model(dora=dora, dropout=dropout)
    drop_alike(model)
    theirs = compute(model.train())
    lay_out(model, compiled=True)
    prepare_layers(find_layers(model), "none", CompilePlan(scope="layer", backend="aot_eager", mode=None))
    check_same(compute(model), theirs)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_checkpointed(monkeypatch: pytest.MonkeyPatch, checkpointing: Any, compiled: bool) -> None:
    monkeypatch.setattr(layers_module, "SELECTIVE_MIN_INNER", 32)
    model = make_model()
    theirs = compute(model)
    lay_out(model, compiled=compiled)
    plan = CompilePlan(scope="layer", backend="aot_eager", mode=None) if compiled else None
    prepare_layers(find_layers(model), checkpointing, plan)
    model.train()
    check_same(compute(model), theirs)
    assert layers_module.is_compiling(), "the compiler must not have given up"
    assert bool(counters["stats"]["unique_graphs"]) == compiled


def test_what_was_trained_is_copied_in() -> None:
    model = make_model()
    products = lay_out(model)
    before = compute(model)[0]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.05)
    products.refresh()
    after = compute(model)[0]
    assert float(after) != float(before)
    with by_the_library():
        assert float(compute(model)[0]) == pytest.approx(float(after), rel=TOLERANCE)


def test_optimizers_that_leave_no_trace_are_followed_when_told() -> None:
    model = make_model()
    products = lay_out(model)
    before = compute(model)[0]
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.add_(0.05)  # as a kernel of somebody else's writes
    products.refresh()
    assert float(compute(model)[0]) == float(before)
    products.refresh(anyway=True)
    assert float(compute(model)[0]) != float(before)


def test_weights_are_held_once_and_state_keeps_its_names() -> None:
    model, plain = make_model(), make_model()
    products = lay_out(model)
    for block in products.blocks:
        for member in block.members:
            weight = member.base_layer.weight
            assert weight.untyped_storage().data_ptr() == block.matrix().untyped_storage().data_ptr()
    ours, theirs = model.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_with_dropout_too_where_all_matrices_drop_alike(dora: bool, bias: bool) -> None:
    model = make_model(dora=dora, bias=bias, dropout=0.3)
    if dora:
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.data *= 1 + 0.2 * torch.rand_like(parameter)
    drop_alike(model)
    theirs = compute(model.train())
    whole = compute(model.eval())
    assert float(theirs[0]) != pytest.approx(float(whole[0]), rel=1e-4), "nothing is dropped"
    model.train()
    assert len(lay_out(model).blocks) == 4 * SIZES["num_hidden_layers"]
    check_same(compute(model), theirs)


@pytest.mark.parametrize("dora", [False, True])
def test_dropout_drops_in_training_only(dora: bool) -> None:
    model = make_model(dropout=0.5, dora=dora)
    theirs = compute(model.eval())
    lay_out(model)
    check_same(compute(model), theirs)
    model.train()
    torch.manual_seed(1)
    one = compute(model)
    torch.manual_seed(1)
    check_same(compute(model), one)
    torch.manual_seed(2)
    assert float(compute(model)[0]) != float(one[0])


@pytest.mark.parametrize("dora", [False, True])
def test_dropout_drops_what_it_says_and_its_gradient_is_right(dora: bool) -> None:
    """Against numerical differences: the mask is the same while the seed is."""
    model = make_model(dropout=0.5, dora=dora, targets=["gate_proj", "up_proj"]).double()
    lay_out_products(find_layers(model), torch.float64).refresh()
    first: Any = find_layers(model)[0]
    member = first.mlp.gate_proj
    assert isinstance(member, ProductLinear)
    x = torch.randn(3, SIZES["hidden_size"], dtype=torch.float64, requires_grad=True)
    block = member.launcher_block

    def output(given: Tensor) -> Tensor:
        torch.manual_seed(4)
        return multiply(block, given)[0]

    assert torch.autograd.gradcheck(output, (x,))


def test_a_block_multiplies_once_and_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    products = lay_out(model)
    seen: list[int] = []

    def multiply_and_note(block: Any, x: Tensor) -> tuple[Tensor, ...]:
        seen.append(products.blocks.index(block))
        return multiply(block, x)

    monkeypatch.setattr("launcher.training.products.multiply", multiply_and_note)
    compute_loss(model)
    assert sorted(seen) == list(range(len(products.blocks)))
    assert all(block.given is None and block.outputs == () for block in products.blocks)


@pytest.mark.parametrize(
    ("family", "compiled", "frees"), [("qwen3", True, False), ("qwen3", False, True), ("llama", True, True)]
)
def test_kept_values_do_not_keep_queries_and_keys(family: str, compiled: bool, frees: bool) -> None:
    """Where a compiled norm follows, these are kept anyway."""
    model = make_model(family=family)
    products = lay_out(model, compiled=compiled)
    block = next(block for block in products.blocks if len(block.members) == 3)
    query, key, value = multiply(block, torch.randn(5, SIZES["hidden_size"]))
    assert query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
    assert (value.untyped_storage().data_ptr() != query.untyped_storage().data_ptr()) == frees


def test_what_is_not_taken_stays_with_peft() -> None:
    assert lay_out_products(find_layers(make_model()), torch.bfloat16).blocks == []
    few = lay_out(make_model(targets=["q_proj", "v_proj", "down_proj"])).blocks
    assert sorted(len(block.members) for block in few) == [1, 1, 2, 2]


def test_a_switched_off_adapter_is_off() -> None:
    model = make_model()
    lay_out(model)
    with model.disable_adapter():
        alone = compute_loss(model)
    assert alone != pytest.approx(compute_loss(model), rel=1e-4)
    with model.disable_adapter(), by_the_library():
        assert compute_loss(model) == alone


def compute_loss(model: Any) -> float:
    with torch.no_grad():
        return float(model(input_ids=IDS, labels=IDS, use_cache=False).loss)
