"""Halves of layers joined into one operation each, against transformers' and PEFT's own way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from launcher.plan.model import CompilePlan
from launcher.training import layer_passes
from launcher.training.joined import find_joinable, join_layers
from launcher.training.layers import prepare_layers
from launcher.training.products import Products, by_the_library, give_back
from tests.training.test_products import SIZES, check_same, compute, drop_alike, find_layers, lay_out, make_model
from tests.training.triton_beside import needs_triton, run_with_triton

FEW = [["q_proj", "v_proj", "up_proj", "down_proj"], ["k_proj", "gate_proj", "down_proj"]]
KERNELS_AGREE = "tests/training/triton_cases.py"


def join(model: Any, halves: int) -> Products:
    layers = find_layers(model)
    products = lay_out(model, compiled=True, filled=find_joinable(layers))
    assert join_layers(layers) == halves * SIZES["num_hidden_layers"]
    return products


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_loss_and_gradients_are_the_libraries(family: str, dora: bool, dropout: float) -> None:
    model = make_model(dora=dora, family=family, dropout=dropout)
    drop_alike(model)
    model.train()
    theirs = compute(model)
    join(model, 2)
    check_same(compute(model), theirs)
    with by_the_library():
        check_same(compute(model), theirs)


@pytest.mark.parametrize(
    ("dora", "dropout", "checkpointing"),
    [
        (True, 0.3, "none"),
        (True, 0.3, "full"),
        (False, 0.0, "none"),
        *(
            pytest.param(*rest, marks=pytest.mark.slow)
            for rest in ((True, 0.0, "none"), (True, 0.0, "full"), (False, 0.0, "full"), (False, 0.3, "none"))
        ),
    ],
)
def test_compiled(dora: bool, dropout: float, checkpointing: Any) -> None:
    model = make_model(dora=dora, dropout=dropout)
    drop_alike(model)
    model.train()
    theirs = compute(model)
    join(model, 2)
    prepare_layers(find_layers(model), checkpointing, CompilePlan(scope="layer", backend="aot_eager", mode=None))
    check_same(compute(model), theirs)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2  # the first layer's input needs no gradient


@pytest.mark.parametrize(
    "targets", [["q_proj", "v_proj", "up_proj", "down_proj"], ["k_proj", "gate_proj", "down_proj"]]
)
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_matrices_without_an_adapter_join(targets: list[str], dora: bool, dropout: float) -> None:
    check_bare(targets, dora, dropout, compiled=False)


def test_matrices_without_an_adapter_join_compiled() -> None:
    check_bare(FEW[0], dora=True, dropout=0.3, compiled=True)


@pytest.mark.slow
@pytest.mark.parametrize("targets", FEW)
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_matrices_without_an_adapter_join_compiled_in_every_way(targets: list[str], dora: bool, dropout: float) -> None:
    check_bare(targets, dora, dropout, compiled=True)


def check_bare(targets: list[str], dora: bool, dropout: float, *, compiled: bool) -> None:
    """As in every published manifest, which leave the gate out."""
    model = make_model(dora=dora, dropout=dropout, targets=targets)
    drop_alike(model)
    model.train()
    theirs = compute(model)
    products = join(model, 2)
    if compiled:
        prepare_layers(find_layers(model), "none", CompilePlan(scope="layer", backend="aot_eager", mode=None))
    check_same(compute(model), theirs)
    assert not counters["graph_break"]
    assert sum(len(block.members) for block in products.blocks) == 6 * SIZES["num_hidden_layers"]
    if compiled:  # all over again for each of the ways below
        return
    with by_the_library():
        check_same(compute(model), theirs)
    give_back(products)
    check_same(compute(model), theirs)


def test_blocks_with_bare_matrices_serve_a_half_that_goes_by_the_family() -> None:
    """As when it generates: what is not adapted multiplies by itself, and nothing is left behind."""
    model = make_model(targets=["q_proj", "v_proj"]).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        theirs = model(input_ids=ids, use_cache=True)
        products = join(model, 1)
        ours = model(input_ids=ids, use_cache=True)
    assert torch.allclose(ours.logits, theirs.logits, atol=1e-5)
    assert all(block.given is None and block.outputs == () for block in products.blocks)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dora", [False, True])
def test_what_the_gate_let_through_is_not_kept(dora: bool, dropout: float) -> None:
    """The residual stream, what the norm makes of it, gates and ups; and LoRA's columns. Of dropout two seeds.

    DoRA: the answer before its scaling; and where it drops, what is added to gates and ups.
    """
    model = make_model(dora=dora, dropout=dropout)
    model.train()
    join(model, 2)
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = torch.randn(1, 24, SIZES["hidden_size"])
        layer: Any = find_layers(model)[0]
        out = layer.mlp(hidden)
    num_bytes = sum(size for address, size in kept.items() if address not in weights)
    ranks = 8 + 8  # two of rank 4, and one that is filled up
    hidden_size, intermediate = SIZES["hidden_size"], SIZES["intermediate_size"]
    wanted = 2 * hidden_size + 2 * intermediate + ranks
    if dora:
        wanted += hidden_size + (2 * intermediate if dropout else 0)
    assert out.shape == hidden.shape
    rest = num_bytes - 4 * 24 * wanted
    of_rows = 4 * (3 * hidden_size + 4 * intermediate)  # DoRA's scales of each output
    assert 0 <= rest <= (of_rows if dora else 0) + (8 if dropout else 0)


@pytest.mark.parametrize(
    ("options", "halves"),
    [
        ({"bias": True}, 1),  # of heads: the MLP has none
        ({"targets": ["o_proj", "up_proj"]}, 0),
        ({"targets": ["q_proj", "k_proj", "v_proj", "gate_proj"]}, 1),
        ({"targets": ["gate_proj", "up_proj", "down_proj"]}, 1),
    ],
)
def test_what_cannot_be_joined_stays_as_it_was(options: dict[str, Any], halves: int) -> None:
    model = make_model(**options)
    model.eval()
    theirs = compute(model)
    join(model, halves)
    check_same(compute(model), theirs)


def test_generating_goes_by_the_family_itself() -> None:
    model = make_model()
    model.eval()
    ids = torch.tensor([[3, 5, 7]])
    theirs = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False)
    join(model, 2)
    assert torch.equal(model.generate(input_ids=ids, max_new_tokens=6, do_sample=False), theirs)


def test_behind_merge_and_unload_matrices_are_plain() -> None:
    model = make_model()
    ids = torch.tensor([[3, 5, 7]])
    adapted = model(input_ids=ids).logits
    join(model, 2)
    merged = model.merge_and_unload()
    assert torch.allclose(merged(input_ids=ids).logits, adapted, atol=1e-5)


def test_a_disabled_adapter_is_not_applied() -> None:
    model = make_model()
    with model.disable_adapter():
        plain = model(input_ids=torch.tensor([[3, 5, 7]])).logits
        join(model, 2)
        assert torch.equal(model(input_ids=torch.tensor([[3, 5, 7]])).logits, plain)


def test_plain_torch_passes_have_the_gradients_of_their_own_forward() -> None:
    torch.manual_seed(1)
    states = torch.randn(5, 2 * 6, dtype=torch.float64).float()
    wide, grad = torch.zeros(5, 12 + 3), torch.randn(5, 6)
    through = torch.empty(5, 6)
    layer_passes.gate(states, None, through)
    moved = torch.empty(5, 6)
    step = 1e-3 * torch.randn(5, 12)
    layer_passes.gate(states + step, None, moved)
    expected = float(((moved - through) * grad).sum())
    layer_passes.gate_back(grad, states, None, wide)
    assert float((wide[:, :12] * step).sum()) == pytest.approx(expected, rel=2e-2)
    assert torch.allclose(grad, through)


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves are tried (test_kernels_on_a_gpu)")
def test_kernels_interpreted() -> None:
    """Triton's interpreter runs the kernels' own code, on a CPU."""
    run_with_triton(KERNELS_AGREE, "cpu", TRITON_INTERPRET="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_kernels_on_a_gpu() -> None:
    from tests.training.triton_cases import check_all

    check_all("cuda")
