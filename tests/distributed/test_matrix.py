"""One training, every way to run it: the same packs, losses, gradients and weights as in one process.

Global batch 5 on two ranks (an empty slot), three micro-batches a step, and an epoch of 8 packs: its last step has 3,
so that one rank has micro-batches with nothing in them. Measured in fp32 on two x86-64 cores, as relative differences
to one process: losses 2e-7, gradient norms 2e-6, held-out loss 2e-7.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from launcher import metrics
from launcher.choices import Strategy
from launcher.render import Rendezvous
from tests.distributed.bench import Bench, Cell, Trained, find_port, make_command
from tests.distributed.conftest import Reference
from tests.training.builders import moved_difference

Begin = Callable[[Cell], dict[str, Tensor]]

LOSS = 1e-4
NORM = 3e-4  # ZeRO adds up one long row of numbers: on some CPUs 1e-4 of the sum is lost to rounding
# By how far the weights have come. Adam's first steps are as long for a gradient of 1e-9 as for one of 1: where
# rounding decides a sign, a weight goes the other way.
MOVED = 5e-3
LOSS_BF16 = 1e-2

STRATEGIES: tuple[Strategy, ...] = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
CELLS = [Cell(strategy="single", ranks_per_node=1)] + [
    Cell(strategy=strategy, adapter=adapter) for adapter in ("lora", "full") for strategy in STRATEGIES
]
# DeepSpeed's stages differ in what they cut, LoRA or all of it: each is tried with the adapter, but for the first.
RARER = [cell for cell in CELLS if cell.strategy == "zero1" or (cell.strategy, cell.adapter) == ("zero2", "full")]
# As replicas do that replay a graph. On a CPU nothing is recorded; all else is as there.
BEHIND = Cell(strategy="ddp", changes={"adds_up_behind": True})
DORA = [Cell(strategy=strategy, adapter="dora") for strategy in STRATEGIES]
OFFLOADED = [
    Cell(strategy="zero2", changes={"offload": "optimizer"}),
    Cell(strategy="zero3", changes={"offload": "optimizer"}, adapter="full"),
    Cell(strategy="zero3", changes={"offload": "optimizer_and_parameters"}),
    Cell(strategy="zero3", changes={"offload": "optimizer_and_parameters"}, adapter="full"),
]
# What an engine costs is measured on one GPU: one rank must run it too, and not fall back to one process.
ONE_RANK = [Cell(strategy=strategy, ranks_per_node=1) for strategy in STRATEGIES]
# ZeRO-3 gathers between graphs: what it gathers and frees must be what the compiled layers use.
COMPILED = [Cell(strategy="zero3", adapter=adapter, config={"torch_compile": True}) for adapter in ("lora", "full")]
# Emulated on a CPU, twenty times slower than fp32.
BF16 = {"precision.compute_dtype": "bf16", "precision.base_dtype": "bf16"}
IN_BF16 = [Cell(strategy=strategy, changes=BF16) for strategy in ("ddp", "fsdp2", "zero2", "zero3")]
# 96 slots for 90 packs: accumulation 8. The second step has what is left of an epoch of 101 packs.
MANY_RANKS = [
    Cell(
        strategy=strategy,
        ranks_per_node=4,
        global_batch=90,
        micro_batch=3,
        num_rows=120,
        config={"max_seq_length": 192, "max_steps": 2, "eval_steps": 2, "save_steps": 2},
    )
    for strategy in ("ddp", "fsdp2")
]


def name_cell(cell: Cell) -> str:
    return cell.name


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=pytest.mark.slow) if cell in RARER else cell for cell in CELLS],
    ids=name_cell,
)
def test_the_same_training(bench: Bench, reference: Reference, begin: Begin, cell: Cell) -> None:
    ended, trained = bench.train(cell)
    assert ended.returncode == 0, ended.console
    check_same(trained, reference(cell), begin(cell))
    check_partial_steps(trained)
    check_placement(cell, trained)


def test_replicas_that_add_up_behind_a_step(bench: Bench, reference: Reference, begin: Begin) -> None:
    cell = BEHIND
    ended, trained = bench.train(cell)
    assert ended.returncode == 0, ended.console
    assert "behind" in trained.outcome.observed["gradients"]
    check_same(trained, reference(cell), begin(cell))
    check_partial_steps(trained)
    check_placement(cell, trained)


def test_two_nodes(bench: Bench, reference: Reference, begin: Begin) -> None:
    check_two_nodes(bench, reference, begin, "static")


@pytest.mark.slow
def test_two_nodes_by_c10d(bench: Bench, reference: Reference, begin: Begin) -> None:
    check_two_nodes(bench, reference, begin, "c10d")


@pytest.mark.slow
@pytest.mark.parametrize("cell", DORA + OFFLOADED + ONE_RANK, ids=name_cell)
def test_the_same_training_in_rarer_forms(bench: Bench, reference: Reference, begin: Begin, cell: Cell) -> None:
    ended, trained = bench.train(cell)
    assert ended.returncode == 0, ended.console
    check_same(trained, reference(cell), begin(cell))
    check_placement(cell, trained)


@pytest.mark.slow
@pytest.mark.parametrize("cell", COMPILED, ids=name_cell)
def test_the_same_training_compiled(bench: Bench, reference: Reference, begin: Begin, cell: Cell) -> None:
    """Against one process without a compiler."""
    ended, trained = bench.train(cell)
    assert ended.returncode == 0, ended.console
    assert "each layer" in trained.outcome.observed["torch.compile"]
    check_same(trained, reference(replace(cell, config={})), begin(cell))


@pytest.mark.slow
@pytest.mark.parametrize("cell", MANY_RANKS, ids=name_cell)
def test_ninety_on_four_ranks(bench: Bench, reference: Reference, begin: Begin, cell: Cell) -> None:
    ended, trained = bench.train(cell)
    assert ended.returncode == 0, ended.console
    assert len(trained.packs[0]) == 90
    assert 0 < len(trained.packs[1]) < 90
    check_same(trained, reference(cell), begin(cell))


@pytest.mark.slow
@pytest.mark.parametrize("cell", IN_BF16, ids=name_cell)
def test_bf16_within_its_own_tolerance(bench: Bench, reference: Reference, cell: Cell) -> None:
    ended, trained = bench.train(cell)
    assert ended.returncode == 0, ended.console
    alone = reference(cell)
    assert trained.packs == alone.packs
    assert largest_difference(trained, alone, metrics.TRAIN_LOSS) < LOSS_BF16


def check_two_nodes(bench: Bench, reference: Reference, begin: Begin, backend: Any) -> None:
    """Two agents of one rank each, on the loopback interface."""
    cell = Cell(strategy="ddp", ranks_per_node=1, nodes=2)
    planned, paths = bench.write(cell)
    port = find_port()

    def command(node: int) -> Any:
        is_host = None if backend == "static" else node == 0
        rendezvous = Rendezvous(host="127.0.0.1", port=port, backend=backend, is_host=is_host)
        return make_command(planned, paths, rendezvous=rendezvous, machine_rank=node)

    with bench.started(command(0)) as first, bench.started(command(1)) as second:
        ended = [child.wait(200) for child in (first, second)]
    assert [one.returncode for one in ended] == [0, 0], "\n".join(one.console for one in ended)
    trained = Trained(paths)
    check_same(trained, reference(cell), begin(cell))
    check_placement(cell, trained)


def check_same(trained: Trained, alone: Trained, begin: dict[str, Tensor]) -> None:
    assert trained.packs == alone.packs
    assert trained.values(metrics.LEARNING_RATE) == alone.values(metrics.LEARNING_RATE)
    assert largest_difference(trained, alone, metrics.TRAIN_LOSS) < LOSS
    assert largest_difference(trained, alone, metrics.GRAD_NORM) < NORM
    assert len(trained.values(metrics.EVAL_LOSS)) == 1
    assert largest_difference(trained, alone, metrics.EVAL_LOSS) < LOSS
    difference = moved_difference(*(short_names(found) for found in (trained.weights, alone.weights, begin)))
    assert difference < MOVED
    assert trained.files == alone.files
    assert trained.outcome.status == "done"


def short_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A head that is tied to the embeddings is saved once; PEFT names a weight by the model around it."""
    return {name: weight.float() for name, weight in weights.items() if name != "lm_head.weight"}


def check_partial_steps(trained: Trained) -> None:
    sizes = [len(packs) for packs in trained.packs]
    assert sorted(sizes) == [3, 5, 5]
    assert max(trained.values(metrics.GRAD_NORM)) > 0.5  # else clipping would not be tested


def check_placement(cell: Cell, trained: Trained) -> None:
    """What each rank really holds, and what it steps, looked up in the live process."""
    for rank in range(cell.num_ranks):
        held = trained.placement(rank)
        everything, share = held["num_parameters"], cell.num_ranks
        is_sharded = cell.strategy in ("fsdp2", "zero3")
        assert held["num_dtensors"] == (everything if cell.strategy == "fsdp2" else 0)
        assert held["num_partitioned"] == (everything if cell.strategy == "zero3" else 0)
        assert (held["num_empty"] > 0) == (cell.strategy == "zero3")
        assert is_about(held["held_elements"], held["whole_elements"] / (share if is_sharded else 1))
        steps_all = cell.strategy in ("single", "ddp")
        assert is_about(held["stepped_elements"], held["trained_elements"] / (1 if steps_all else share))
        assert held["splits_gradients"] == (cell.strategy == "zero2")  # what tells it from ZeRO-1


def is_about(number: float, expected: float) -> bool:
    """Shards are padded."""
    return expected <= number < 1.05 * expected


def largest_difference(trained: Trained, alone: Trained, name: str) -> float:
    pairs = zip(trained.values(name), alone.values(name), strict=True)
    return max(abs(one - other) / abs(other) for one, other in pairs)
