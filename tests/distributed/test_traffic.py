"""What two real ranks exchange in a step, operation by operation, against what the plan's model says they do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from launcher.choices import Strategy
from launcher.inputs import PlannedRun
from launcher.launch import ACCELERATE
from launcher.paths import RunPaths
from launcher.render import render_command
from launcher.render.deepspeed import PERSISTENT_ELEMENTS
from launcher.scaling import Collective, make_collectives, make_exchange
from launcher.speed import Workload
from tests.conftest import ROOT
from tests.distributed.bench import Bench, Cell

SCRIPT = str(ROOT / "tests/distributed/counted_train.py")
NUM_MICRO_STEPS = 2
# Two ranks, two micro-steps of one sequence; evaluation and checkpoint come behind the third step.
CONFIG: Mapping[str, Any] = {"max_steps": 3}
BF16 = {"precision.compute_dtype": "bf16", "precision.base_dtype": "bf16"}
CELLS = [
    Cell(strategy="fsdp2"),
    Cell(strategy="ddp", adapter="full"),
    Cell(strategy="zero2", adapter="full"),
    Cell(strategy="fsdp2", adapter="full"),
    Cell(strategy="zero3", adapter="full"),
    Cell(strategy="ddp"),
    Cell(strategy="ddp", changes={"adds_up_behind": True}),
    Cell(strategy="zero1", adapter="full"),
    Cell(strategy="zero2"),
    Cell(strategy="zero3"),
    Cell(strategy="fsdp2", config={"gradient_checkpointing": True}),  # recomputing gathers nothing a third time
    Cell(strategy="fsdp2", changes=BF16),
    Cell(strategy="zero2", changes=BF16),
    Cell(strategy="zero3", changes=BF16),
]
# torch's word for each, whichever way it is called.
KINDS = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
}
SMALL = 1024  # bytes: losses, norms, flags and what DDP agrees on at its beginning


def name_cell(cell: Cell) -> str:
    more = "-checkpointed" if cell.config else "-bf16" if cell.changes == BF16 else "-behind" if cell.changes else ""
    return f"{cell.strategy}-{cell.adapter}{more}"


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=name_cell)
def test_two_ranks_exchange_what_the_model_says(bench: Bench, cell: Cell) -> None:
    check_traffic(bench, cell)


def check_traffic(bench: Bench, cell: Cell) -> None:
    counted = Cell(
        strategy=cell.strategy,
        adapter=cell.adapter,
        changes=cell.changes,
        config={**CONFIG, **cell.config},
        global_batch=2 * NUM_MICRO_STEPS,
    )
    planned, paths = bench.write(counted)
    command = render_command(planned.plan, paths, script=SCRIPT, accelerate=ACCELERATE)
    ended = bench.launch(command)
    assert ended.returncode == 0, ended.console
    expected = expect(planned, counted.strategy)
    for rank in range(2):
        sizes = read_sizes(paths, rank, step=2)
        assert sizes.keys() - KINDS.keys() <= {"broadcast_"}, "an operation that nobody counts"
        for operation, kind in KINDS.items():
            found = sum(size for size in sizes.get(operation, []) if size > SMALL)
            wanted = expected.get(kind, 0.0)
            assert found == pytest.approx(wanted, rel=tolerance(counted.strategy, kind)), (operation, found, wanted)
    check_messages(planned, counted.strategy, read_sizes(paths, 0, step=2))


def tolerance(strategy: Strategy, kind: str) -> float:
    """Shards are filled up to be alike. ZeRO-3 leaves small parameters whole, and hands them out once a step."""
    return 0.05 if strategy == "zero3" and kind == "all-gather" else 0.005


def expect(planned: PlannedRun, strategy: Strategy) -> dict[str, float]:
    """Bytes of one step, by operation."""
    total: dict[str, float] = {}
    for one in collectives_of(planned, strategy):
        times = NUM_MICRO_STEPS if one.moment == "micro-step" else 1
        total[one.kind] = total.get(one.kind, 0.0) + times * one.num_bytes
    return total


def collectives_of(planned: PlannedRun, strategy: Strategy) -> tuple[Collective, ...]:
    plan = planned.plan
    workload = Workload(
        shape=plan.base,
        adapter=plan.adapter.kind,
        quantization=plan.quantization_kind,
        compute_dtype=plan.precision.compute_dtype,
        compiled=False,
        checkpointing=plan.checkpointing,
        document_tokens=1.0,
    )
    return make_collectives(strategy, make_exchange(workload, plan.adapter.trainable_parameters))


def check_messages(planned: PlannedRun, strategy: Strategy, sizes: Mapping[str, list[int]]) -> None:
    """As many as the model says, where it says it exactly: FSDP2 gathers and scatters by layers."""
    if strategy != "fsdp2":
        return
    for kind, operation in (("all-gather", "_allgather_base_"), ("reduce-scatter", "_reduce_scatter_base_")):
        of_kind = [one for one in collectives_of(planned, strategy) if one.kind == kind]
        wanted = sum(one.num_messages * (NUM_MICRO_STEPS if one.moment == "micro-step" else 1) for one in of_kind)
        # Under full fine-tuning the root has gradients too: one more for each time they are scattered.
        spare = NUM_MICRO_STEPS if kind == "reduce-scatter" and planned.plan.adapter.kind == "full" else 0
        assert wanted <= len(sizes[operation]) <= wanted + spare


def read_sizes(paths: RunPaths, rank: int, step: int) -> dict[str, list[int]]:
    sizes: dict[str, list[int]] = json.loads((paths.logs / f"traffic-{rank}-{step}.json").read_text())
    return sizes


def test_small_parameters_of_zero3_are_those_that_our_files_leave_whole(bench: Bench) -> None:
    """The tolerance above stands for these: of a real base they are a thousandth, here they may be a few hundredths."""
    shape = bench.plan(Cell(strategy="zero3", adapter="full")).plan.base
    layers = [linear.num_parameters for linear in shape.linears]
    small = shape.num_layers * sum(count for count in layers if count < PERSISTENT_ELEMENTS)
    assert 0 < small < 0.05 * shape.num_parameters
