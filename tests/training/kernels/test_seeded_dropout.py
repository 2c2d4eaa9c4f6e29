"""Seeded dropout masks: the right rate, no pattern, and reproducible from the seed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from launcher.training.kernels.seeded_dropout import (
    MAX_SEED,
    DropoutSeed,
    SeededDropout,
    compute_dropout_mask,
    draw_seeds,
)
from launcher.training.model.fused_lora.decoder_layer import fuse_decoder_layers
from tests.training.model.test_fused_lora_linear import IDS, fuse, get_layers, make_model

SHAPE = torch.Size((400, 768))
SEEDS = (0, 1, 2, 12_345, 2**30, MAX_SEED - 1)


def make_seed(seed: int, rate: float) -> DropoutSeed:
    return DropoutSeed(torch.tensor([seed], dtype=torch.int32), rate)


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5])
@pytest.mark.parametrize("seed", SEEDS)
def test_dropout_rate_holds_overall_per_row_and_per_column(seed: int, rate: float) -> None:
    factors = compute_dropout_mask(SHAPE, make_seed(seed, rate))
    dropped = (factors == 0).float()
    assert bool(((factors == 0) | ((factors - 1 / (1 - rate)).abs() < 1e-6)).all())
    assert abs(float(dropped.mean()) - rate) < 6 * (rate * (1 - rate) / SHAPE.numel()) ** 0.5
    for part, count in ((dropped.mean(0), SHAPE[0]), (dropped.mean(1), SHAPE[1])):  # per column, per row
        spread = float((part - rate).square().mean())
        assert spread == pytest.approx(rate * (1 - rate) / count, rel=0.25)


def test_masks_of_neighbours_and_seeds_are_uncorrelated() -> None:
    drawn = [(compute_dropout_mask(SHAPE, make_seed(seed, 0.5)) == 0).float() - 0.5 for seed in SEEDS]
    noise = 6 * 0.25 / SHAPE.numel() ** 0.5
    for one, other in pairwise(drawn):
        assert abs(float((one * other).mean())) < noise
    for one in drawn:
        for step in (1, 2, 8, 768):
            flat = one.flatten()
            assert abs(float((flat[step:] * flat[:-step]).mean())) < noise


def test_module_applies_the_seeds_mask_in_training_mode_only() -> None:
    module, x = SeededDropout(0.3, 7), torch.randn(1, 20, 16)
    assert torch.equal(module(x), x * compute_dropout_mask(x.shape, make_seed(7, 0.3)))
    assert torch.equal(module.eval()(x), x)


def test_seeds_come_from_torchs_generator() -> None:
    """Its state is part of checkpoints."""
    torch.manual_seed(3)
    first, second = (draw_seeds(torch.nn.Dropout(0.1), 2, torch.device("cpu")) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(draw_seeds(torch.nn.Dropout(0.1), 2, torch.device("cpu")), first)
    assert not torch.equal(first, second)
    assert draw_seeds(SeededDropout(0.1, 9), 2, torch.device("cpu")).tolist() == [9, 9]


@pytest.mark.parametrize("dora", [False, True])
def test_fused_blocks_draw_new_masks_in_training_and_none_in_evaluation(dora: bool) -> None:
    model = make_model(dora=dora, dropout=0.5)
    model.eval()
    without_dropout = compute_loss(model)
    fuse(model, compiled=True)
    assert fuse_decoder_layers(get_layers(model))
    assert compute_loss(model) == pytest.approx(without_dropout, rel=1e-5)
    model.train()
    torch.manual_seed(1)
    first, second = compute_loss(model), compute_loss(model)
    torch.manual_seed(1)
    assert compute_loss(model) == first
    assert first != second


def compute_loss(model: Any) -> float:
    with torch.no_grad():
        return float(model(input_ids=IDS, labels=IDS, use_cache=False).loss)
