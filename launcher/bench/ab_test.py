"""A/B test of training speed: the variants take turns to train short blocks of steps, which are timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import ceil, lcm
from pathlib import Path

from launcher.bench.variants import Variant
from launcher.bench.worker import MeasurementProcess, Timing
from launcher.core.frozen_model import Frozen
from launcher.plan.model import Plan

_MODULE = "launcher.bench.workers.vary"
_MAX_UNIT = 8  # in largest global batches: a block with complete steps of every variant must stay short


class VariantSpec(Frozen):
    """Input of a variant's worker process: the plan, the prepared data, and the number of steps per block."""

    plan: Plan
    store: str  # folder of the prepared data
    warmup_steps: int
    timed_steps: int


class Ready(Frozen):
    """First message of a worker process, once its model is built: build time, attention backend and compilation."""

    seconds: float  # taken to build
    attention: str
    compiled: str  # description; empty: nothing is compiled


class Block(Frozen):
    """Step times of one block of an A/B test, with the block's round and variant."""

    round: int
    variant: int
    timing: Timing


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSize:
    """Number of warm-up and timed sequences per block, equal for all variants even if their global batches differ."""

    warmup_sequences: int
    timed_sequences: int
    is_exact: bool  # both are multiples of every variant's global batch

    def count_steps(self, global_batch_size: int) -> tuple[int, int]:
        """Return how many warm-up steps and timed steps a block has at a given global batch size."""
        return ceil(self.warmup_sequences / global_batch_size), ceil(self.timed_sequences / global_batch_size)


def make_block_size(global_batch_sizes: Sequence[int], warmup_steps: int, timed_steps: int) -> BlockSize:
    """Compute the sequences per block from numbers of steps, which refer to the largest of the global batch sizes."""
    largest = max(global_batch_sizes)
    unit = lcm(*global_batch_sizes)
    is_exact = unit <= _MAX_UNIT * largest
    unit = unit if is_exact else largest
    return BlockSize(
        warmup_sequences=ceil(warmup_steps * largest / unit) * unit,
        timed_sequences=ceil(timed_steps * largest / unit) * unit,
        is_exact=is_exact,
    )


def interleave(num_variants: int, repeats: int) -> tuple[tuple[int, ...], ...]:
    """Return the order of the variants in each round: A B, B A, A B, … so that drift affects all alike."""
    forward = tuple(range(num_variants))
    return tuple(forward if number % 2 == 0 else forward[::-1] for number in range(repeats))


@dataclass(kw_only=True)
class Measurements:
    """Everything that an A/B test measured."""

    blocks: list[Block] = field(default_factory=list)
    ready: dict[int, Ready] = field(default_factory=dict)  # by variant
    reuses_processes: bool  # each variant was one process throughout


def fit_together(variants: Sequence[Variant]) -> bool:
    """Return whether the models of all variants fit in memory at once, by the estimates of their plans."""
    memory = [variant.plan.memory for variant in variants]
    return sum(plan.total_bytes for plan in memory) <= min(plan.usable_bytes for plan in memory)


def measure_variants(
    variants: Sequence[Variant],
    stores: Sequence[Path],
    block_size: BlockSize,
    folder: Path,
    *,
    repeats: int,
    limit_seconds: float,
    reuse_processes: bool,
    report: Callable[[str], None],
) -> Measurements:
    """Time all blocks of an A/B test, with one process per variant that idles while others are timed, or one per block.

    `limit_seconds` is the time limit for building a model, and for a block.
    """
    measurements = Measurements(reuses_processes=reuse_processes)

    def start(index: int, name: str) -> MeasurementProcess:
        plan = variants[index].plan
        warmup, timed = block_size.count_steps(plan.batch.global_batch_size)
        spec = VariantSpec(plan=plan, store=str(stores[index].resolve()), warmup_steps=warmup, timed_steps=timed)
        process = stack.enter_context(MeasurementProcess(_MODULE, spec, folder, name))
        measurements.ready[index] = Ready.model_validate_json(process.read(limit_seconds))
        return process

    with ExitStack() as stack:
        processes: list[MeasurementProcess] = []
        if reuse_processes:  # started sequentially: two that build at once would slow each other down
            processes = [start(index, f"variant-{index + 1}") for index in range(len(variants))]
        for number, order in enumerate(interleave(len(variants), repeats), 1):
            for index in order:
                process = processes[index] if processes else start(index, f"variant-{index + 1}-round-{number}")
                process.send("block")
                timing = Timing.model_validate_json(process.read(limit_seconds))
                if not processes:
                    stack.close()  # its memory is free for the next one
                measurements.blocks.append(Block(round=number, variant=index, timing=timing))
                speed = f"{timing.tokens_per_second:,.0f} tokens/s"
                report(f"round {number} of {repeats}, {variants[index].label}: {speed}")
    return measurements
