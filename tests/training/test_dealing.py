"""Which pack is trained when: by the seed alone. Ranks share the work evenly; a pack is trained once an epoch."""

from __future__ import annotations

from itertools import chain

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.training.dealing import Hands, Slots, StepOrder, deal

# A busy machine is no failure.
quick = settings(deadline=None, max_examples=60)
Lengths = st.lists(st.integers(1, 64), min_size=1, max_size=60)


def dealt_packs(hands: list[tuple[Slots, ...]]) -> list[int]:
    return [pack for hand in hands for slots in hand for pack in slots if pack is not None]


@st.composite
def deals(draw: st.DrawFn) -> tuple[list[int], np.ndarray, Hands]:
    """Packs of one step with their costs, and hands that have room for them."""
    costs = np.array(draw(st.lists(st.integers(1, 4096), min_size=1, max_size=40)), dtype=np.int64)
    packs = draw(st.permutations(range(len(costs))))[: draw(st.integers(1, len(costs)))]
    ranks, micro = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    needed = -(-len(packs) // (ranks * micro))
    return (
        packs,
        costs,
        Hands(num_ranks=ranks, micro_batch_size=micro, num_micro_batches=needed + draw(st.integers(0, 3))),
    )


@quick
@given(Lengths, st.integers(1, 9), st.integers(0, 2**32 - 1), st.booleans())
def test_every_pack_is_trained_once_an_epoch(lengths: list[int], batch: int, seed: int, grouped: bool) -> None:
    sizes = np.array(lengths, dtype=np.int32)
    order = StepOrder(num_packs=len(lengths), global_batch_size=batch, seed=seed, lengths=sizes if grouped else None)
    per_epoch = order.steps_per_epoch
    for epoch in range(3):
        steps = [order.packs_of(epoch * per_epoch + inside) for inside in range(per_epoch)]
        assert sorted(chain.from_iterable(steps)) == list(range(len(lengths)))
        assert [len(step) for step in steps[:-1]] == [batch] * (per_epoch - 1)
        assert 1 <= len(steps[-1]) <= batch


@quick
@given(st.integers(1, 50), st.integers(1, 9), st.integers(0, 2**32 - 1), st.lists(st.integers(0, 60), max_size=10))
def test_a_step_is_the_same_whenever_it_is_asked_for(num_packs: int, batch: int, seed: int, steps: list[int]) -> None:
    """Resuming asks for a step out of the blue."""
    running = StepOrder(num_packs=num_packs, global_batch_size=batch, seed=seed)
    for step in steps:
        fresh = StepOrder(num_packs=num_packs, global_batch_size=batch, seed=seed)
        assert running.packs_of(step) == fresh.packs_of(step)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {
        (seed, epoch): StepOrder(num_packs=50, global_batch_size=50, seed=seed).packs_of(epoch)
        for seed in (0, 1, 42)
        for epoch in (0, 1, 2)
    }
    assert len(set(orders.values())) == len(orders)


@quick
@given(deals())
def test_each_pack_is_dealt_once_and_slots_are_kept(dealing: tuple[list[int], np.ndarray, Hands]) -> None:
    packs, costs, hands = dealing
    dealt = deal(packs, costs, hands)
    assert len(dealt) == hands.num_ranks
    assert sorted(dealt_packs(dealt)) == sorted(packs)
    for hand in dealt:
        assert len(hand) == hands.num_micro_batches
        assert all(len(slots) == hands.micro_batch_size for slots in hand)


@quick
@given(deals())
def test_dealing_does_not_depend_on_the_order_in_which_packs_come(
    dealing: tuple[list[int], np.ndarray, Hands],
) -> None:
    packs, costs, hands = dealing
    assert deal(packs, costs, hands) == deal(sorted(packs), costs, hands)


@quick
@given(deals())
def test_loads_are_even(dealing: tuple[list[int], np.ndarray, Hands]) -> None:
    """Where slots do not bind, ranks differ by no more than one pack. Where they do, nobody has a slot too many."""
    packs, costs, hands = dealing
    roomy = Hands(num_ranks=hands.num_ranks, micro_batch_size=hands.micro_batch_size, num_micro_batches=len(packs))
    loads = [sum(int(costs[p]) for slots in hand for p in slots if p is not None) for hand in deal(packs, costs, roomy)]
    assert max(loads) - min(loads) <= max(int(costs[pack]) for pack in packs)


def test_one_heavy_pack_is_set_against_many_light_ones() -> None:
    costs = np.array([8, *[1] * 8], dtype=np.int64)
    hands = Hands(num_ranks=2, micro_batch_size=4, num_micro_batches=2)
    first, second = deal(range(9), costs, hands)
    assert dealt_packs([first]) == [0]
    assert sorted(dealt_packs([second])) == list(range(1, 9))


@quick
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_full_hands_stay_near_even(ranks: int, slots: int, seed: int) -> None:
    """Every slot taken, packs of like cost, as in training: ranks differ by a fraction of a pack."""
    costs = np.random.default_rng(seed).integers(900, 1100, size=ranks * slots)
    hands = Hands(num_ranks=ranks, micro_batch_size=1, num_micro_batches=slots)
    loads = [sum(int(costs[p]) for (p,) in hand if p is not None) for hand in deal(range(len(costs)), costs, hands)]
    assert max(loads) - min(loads) <= 200  # what two packs differ by at most


@quick
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 8), st.integers(1, 8))
def test_ranks_do_not_change_what_a_step_trains(num_packs: int, batch: int, ranks: int, others: int) -> None:
    costs = np.arange(num_packs, dtype=np.int64) + 1
    order = StepOrder(num_packs=num_packs, global_batch_size=batch, seed=3)
    for step in range(2 * order.steps_per_epoch):
        sets = []
        for count in (ranks, others):
            hands = Hands(num_ranks=count, micro_batch_size=1, num_micro_batches=-(-batch // count))
            sets.append(sorted(dealt_packs(deal(order.packs_of(step), costs, hands))))
        assert sets[0] == sets[1] == sorted(order.packs_of(step))
