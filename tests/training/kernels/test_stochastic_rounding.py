"""Stochastic rounding is unbiased, exact where it can be, and a function of its key."""

from __future__ import annotations

import pytest
import torch

from launcher.training.kernels.stochastic_rounding import make_rounding_key, round_stochastically

NUM_DRAWS = 100_000


@pytest.mark.parametrize("value", [1.0009, -1.0009, 3.3e-5, -123.4, 0.999])
def test_the_mean_of_many_roundings_is_the_value(value: float) -> None:
    rounded = round_stochastically(torch.full((NUM_DRAWS,), value), make_rounding_key(1, 2, 3)).float()
    low, high = rounded.min(), rounded.max()
    assert low <= value <= high, "one of the two neighbours"
    assert set(rounded.unique().tolist()) == {float(low), float(high)}
    spread = float(high - low) / NUM_DRAWS**0.5
    assert abs(float(rounded.double().mean()) - float(torch.tensor(value))) < 3 * spread


def test_values_of_bf16_are_kept() -> None:
    values = torch.randn(1000).bfloat16().float()
    values[:3] = torch.tensor([0.0, float("inf"), float("-inf")])
    assert torch.equal(round_stochastically(values, make_rounding_key(0, 0, 0)).float(), values)


def test_bits_depend_on_seed_step_tensor_and_index_only() -> None:
    values = torch.randn(5000)
    first = round_stochastically(values, make_rounding_key(42, 1, 7))
    torch.manual_seed(123)
    assert torch.equal(round_stochastically(values, make_rounding_key(42, 1, 7)), first)
    chunks = [round_stochastically(values[start : start + 777], make_rounding_key(42, 1, 7), start)
              for start in range(0, 5000, 777)]  # fmt: skip
    assert torch.equal(torch.cat(chunks), first)
    for other in ((43, 1, 7), (42, 2, 7), (42, 1, 8)):
        differs = round_stochastically(values, make_rounding_key(*other)) != first
        assert 0.2 < float(differs.float().mean()) < 0.5, other  # a third of all pairs, for evenly spread values
