"""Which positions an adapter's dropout takes: as many as asked, by no pattern, and the same for the same seed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from launcher.training.dropping import LARGEST_SEED, DropBySeed, Dropping, draw_seeds, find_factors
from launcher.training.joined import join_layers
from tests.training.test_products import IDS, find_layers, lay_out, make_model

SHAPE = torch.Size((400, 768))
SEEDS = (0, 1, 2, 12_345, 2**30, LARGEST_SEED - 1)


def drop(seed: int, rate: float) -> Dropping:
    return Dropping(torch.tensor([seed], dtype=torch.int32), rate)


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5])
@pytest.mark.parametrize("seed", SEEDS)
def test_as_many_as_asked_everywhere(seed: int, rate: float) -> None:
    factors = find_factors(SHAPE, drop(seed, rate))
    gone = (factors == 0).float()
    assert bool(((factors == 0) | ((factors - 1 / (1 - rate)).abs() < 1e-6)).all())
    assert abs(float(gone.mean()) - rate) < 6 * (rate * (1 - rate) / SHAPE.numel()) ** 0.5
    for part, count in ((gone.mean(0), SHAPE[0]), (gone.mean(1), SHAPE[1])):  # of each column, of each row
        spread = float((part - rate).square().mean())
        assert spread == pytest.approx(rate * (1 - rate) / count, rel=0.25)


def test_neighbours_and_seeds_know_nothing_of_each_other() -> None:
    drawn = [(find_factors(SHAPE, drop(seed, 0.5)) == 0).float() - 0.5 for seed in SEEDS]
    noise = 6 * 0.25 / SHAPE.numel() ** 0.5
    for one, other in pairwise(drawn):
        assert abs(float((one * other).mean())) < noise
    for one in drawn:
        for step in (1, 2, 8, 768):
            flat = one.flatten()
            assert abs(float((flat[step:] * flat[:-step]).mean())) < noise


def test_a_module_drops_as_the_seed_says_and_only_in_training() -> None:
    module, x = DropBySeed(0.3, 7), torch.randn(1, 20, 16)
    assert torch.equal(module(x), x * find_factors(x.shape, drop(7, 0.3)))
    assert torch.equal(module.eval()(x), x)


def test_seeds_are_drawn_by_torchs_generator() -> None:
    """Whose state checkpoints have."""
    torch.manual_seed(3)
    first, second = (draw_seeds(torch.nn.Dropout(0.1), 2, torch.device("cpu")) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(draw_seeds(torch.nn.Dropout(0.1), 2, torch.device("cpu")), first)
    assert not torch.equal(first, second)
    assert draw_seeds(DropBySeed(0.1, 9), 2, torch.device("cpu")).tolist() == [9, 9]


@pytest.mark.parametrize("dora", [False, True])
def test_joined_halves_drop_anew_each_time_and_never_in_an_evaluation(dora: bool) -> None:
    model = make_model(dora=dora, dropout=0.5)
    model.eval()
    whole = find_loss(model)
    lay_out(model, compiled=True)
    assert join_layers(find_layers(model))
    assert find_loss(model) == pytest.approx(whole, rel=1e-5)
    model.train()
    torch.manual_seed(1)
    first, second = find_loss(model), find_loss(model)
    torch.manual_seed(1)
    assert find_loss(model) == first
    assert first != second


def find_loss(model: Any) -> float:
    with torch.no_grad():
        return float(model(input_ids=IDS, labels=IDS, use_cache=False).loss)
