"""The global batch is the manifest's on any hardware; ranks that do not divide it get empty slots, stated."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.plan.conftest import decision, plan_for


@pytest.mark.parametrize(
    "where",
    [
        {"gpu": "rtx4090"},
        {"gpu": "rtx5090"},
        {"gpu": "rtx4080super"},
        {"gpu": "t4"},
        {"gpu": "h100", "gpus": 8, "nodes": 2},
        {"gpu": "rtx4090", "gpus": 4},
        {"gpu": None, "profile": "full"},
    ],
    ids=str,
)
def test_the_product_is_the_global_batch(where: dict[str, object]) -> None:
    batch = plan_for(**where).batch  # type: ignore[arg-type]
    assert batch.global_batch_size == 48
    assert batch.micro_batch_size * batch.gradient_accumulation_steps * batch.num_ranks == 48
    assert (batch.empty_slots, batch.nearest_even_batches) == (0, ())


def test_gpus_are_counted_per_node() -> None:
    assert plan_for(gpu="h100", gpus=8, nodes=2).batch.num_ranks == 16


def test_ninety_on_four_ranks() -> None:
    plan = plan_for(gpu="h100", gpus=4, config={"batch_size": 2, "gradient_accumulation_steps": 45})
    batch = plan.batch
    assert batch.global_batch_size == 90
    assert batch.num_slots == 92
    assert batch.empty_slots == 2
    assert batch.nearest_even_batches == (88, 92)
    assert "2 of 92 slots stay empty (2.2 % of the compute; training is unaffected)" in decision(plan, "batch split")
    assert "a global batch of 88 or 92 would divide evenly" in decision(plan, "batch split")


def test_more_ranks_than_sequences() -> None:
    batch = plan_for(gpu="h100", gpus=8, nodes=2, config={"batch_size": 8, "gradient_accumulation_steps": 1}).batch
    assert (batch.micro_batch_size, batch.gradient_accumulation_steps, batch.empty_slots) == (1, 1, 8)
    assert batch.nearest_even_batches == (16,)


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 300),
    gpus=st.integers(1, 8),
    gpu=st.sampled_from(["rtx3060", "rtx4090", "h100"]),
    packed=st.booleans(),
)
def test_any_split_holds_the_whole_batch_and_wastes_little(size: int, gpus: int, gpu: str, packed: bool) -> None:
    config = {"batch_size": size, "gradient_accumulation_steps": 1, "packing": packed}
    batch = plan_for(gpu=gpu, gpus=gpus, config=config).batch
    assert batch.num_slots - batch.empty_slots == batch.global_batch_size == size
    assert batch.micro_batch_size * batch.gradient_accumulation_steps >= size / gpus
    # Never a whole micro-step of nothing on every rank.
    assert batch.empty_slots < batch.micro_batch_size * batch.num_ranks + batch.num_ranks


def test_packing_wins_over_group_by_length_and_the_plan_says_so() -> None:
    plan = plan_for(config={"group_by_length": True})
    assert plan.batch.packed
    assert not plan.batch.group_by_length
    assert "packing and group_by_length are both true: packing wins" in decision(plan, "sample order")
    grouped = plan_for(config={"group_by_length": True, "packing": False})
    assert grouped.batch.group_by_length
    assert "rows of similar length share a micro-batch" in decision(grouped, "sample order")


def test_rows_that_are_not_packed_lie_end_to_end() -> None:
    assert decision(plan_for(), "global batch").startswith("48 sequences of 2,048 tokens, packed |")
    loose = decision(plan_for(config={"packing": False}), "global batch")
    assert loose.startswith("48 rows of at most 2,048 tokens, not padded |")


def test_eval_batch_size() -> None:
    assert plan_for(config={"eval_batch_size": 3}).batch.eval_batch_size == 3
    default = plan_for().batch
    assert default.eval_batch_size == default.micro_batch_size
