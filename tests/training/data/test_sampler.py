"""The order of packs depends on the seed alone; ranks are balanced; a pack is trained once per epoch."""

from __future__ import annotations

from itertools import chain

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.training.data.sampler import BatchLayout, PackSampler, Slots, assign_to_ranks

# A busy machine is no failure.
quick = settings(deadline=None, max_examples=60)
Lengths = st.lists(st.integers(1, 64), min_size=1, max_size=60)


def assigned_packs(layout: list[tuple[Slots, ...]]) -> list[int]:
    return [pack for hand in layout for slots in hand for pack in slots if pack is not None]


@st.composite
def assignments(draw: st.DrawFn) -> tuple[list[int], np.ndarray, BatchLayout]:
    """Packs of one step with their costs, and a layout with room for them."""
    costs = np.array(draw(st.lists(st.integers(1, 4096), min_size=1, max_size=40)), dtype=np.int64)
    packs = draw(st.permutations(range(len(costs))))[: draw(st.integers(1, len(costs)))]
    ranks, micro = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    needed = -(-len(packs) // (ranks * micro))
    return (
        packs,
        costs,
        BatchLayout(num_ranks=ranks, micro_batch_size=micro, num_micro_batches=needed + draw(st.integers(0, 3))),
    )


@quick
@given(Lengths, st.integers(1, 9), st.integers(0, 2**32 - 1), st.booleans())
def test_every_pack_is_trained_once_per_epoch(lengths: list[int], batch: int, seed: int, grouped: bool) -> None:
    sizes = np.array(lengths, dtype=np.int32)
    order = PackSampler(num_packs=len(lengths), global_batch_size=batch, seed=seed, lengths=sizes if grouped else None)
    per_epoch = order.steps_per_epoch
    for epoch in range(3):
        steps = [order.packs_for_step(epoch * per_epoch + inside) for inside in range(per_epoch)]
        assert sorted(chain.from_iterable(steps)) == list(range(len(lengths)))
        assert [len(step) for step in steps[:-1]] == [batch] * (per_epoch - 1)
        assert 1 <= len(steps[-1]) <= batch


@quick
@given(st.integers(1, 50), st.integers(1, 9), st.integers(0, 2**32 - 1), st.lists(st.integers(0, 60), max_size=10))
def test_step_is_the_same_in_any_order_of_access(num_packs: int, batch: int, seed: int, steps: list[int]) -> None:
    """A resume starts at any step."""
    running = PackSampler(num_packs=num_packs, global_batch_size=batch, seed=seed)
    for step in steps:
        fresh = PackSampler(num_packs=num_packs, global_batch_size=batch, seed=seed)
        assert running.packs_for_step(step) == fresh.packs_for_step(step)


def test_epochs_and_seeds_have_different_orders() -> None:
    orders = {
        (seed, epoch): PackSampler(num_packs=50, global_batch_size=50, seed=seed).packs_for_step(epoch)
        for seed in (0, 1, 42)
        for epoch in (0, 1, 2)
    }
    assert len(set(orders.values())) == len(orders)


@quick
@given(assignments())
def test_each_pack_is_assigned_once_within_the_layout(assignment: tuple[list[int], np.ndarray, BatchLayout]) -> None:
    packs, costs, layout = assignment
    assigned = assign_to_ranks(packs, costs, layout)
    assert len(assigned) == layout.num_ranks
    assert sorted(assigned_packs(assigned)) == sorted(packs)
    for hand in assigned:
        assert len(hand) == layout.num_micro_batches
        assert all(len(slots) == layout.micro_batch_size for slots in hand)


@quick
@given(assignments())
def test_assignment_does_not_depend_on_the_order_of_packs(
    assignment: tuple[list[int], np.ndarray, BatchLayout],
) -> None:
    packs, costs, layout = assignment
    assert assign_to_ranks(packs, costs, layout) == assign_to_ranks(sorted(packs), costs, layout)


@quick
@given(assignments())
def test_loads_are_balanced(assignment: tuple[list[int], np.ndarray, BatchLayout]) -> None:
    """Ranks differ by at most one pack, unless slots limit them; no rank exceeds its slots."""
    packs, costs, layout = assignment
    roomy = BatchLayout(
        num_ranks=layout.num_ranks, micro_batch_size=layout.micro_batch_size, num_micro_batches=len(packs)
    )
    loads = [
        sum(int(costs[p]) for slots in hand for p in slots if p is not None)
        for hand in assign_to_ranks(packs, costs, roomy)
    ]
    assert max(loads) - min(loads) <= max(int(costs[pack]) for pack in packs)


def test_heavy_pack_is_balanced_by_light_ones() -> None:
    costs = np.array([8, *[1] * 8], dtype=np.int64)
    layout = BatchLayout(num_ranks=2, micro_batch_size=4, num_micro_batches=2)
    first, second = assign_to_ranks(range(9), costs, layout)
    assert assigned_packs([first]) == [0]
    assert sorted(assigned_packs([second])) == list(range(1, 9))


@quick
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_full_layout_is_nearly_balanced(ranks: int, slots: int, seed: int) -> None:
    """With all slots used and packs of similar cost, as in training, ranks differ by a fraction of a pack."""
    costs = np.random.default_rng(seed).integers(900, 1100, size=ranks * slots)
    layout = BatchLayout(num_ranks=ranks, micro_batch_size=1, num_micro_batches=slots)
    loads = [
        sum(int(costs[p]) for (p,) in hand if p is not None)
        for hand in assign_to_ranks(range(len(costs)), costs, layout)
    ]
    assert max(loads) - min(loads) <= 200  # the largest difference between two packs


@quick
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 8), st.integers(1, 8))
def test_ranks_do_not_change_what_a_step_trains(num_packs: int, batch: int, ranks: int, others: int) -> None:
    costs = np.arange(num_packs, dtype=np.int64) + 1
    order = PackSampler(num_packs=num_packs, global_batch_size=batch, seed=3)
    for step in range(2 * order.steps_per_epoch):
        sets = []
        for count in (ranks, others):
            layout = BatchLayout(num_ranks=count, micro_batch_size=1, num_micro_batches=-(-batch // count))
            sets.append(sorted(assigned_packs(assign_to_ranks(order.packs_for_step(step), costs, layout))))
        assert sets[0] == sets[1] == sorted(order.packs_for_step(step))
