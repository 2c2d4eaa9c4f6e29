"""A/B test of training speed: blocks of steps of each variant, interleaved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import ceil, lcm
from pathlib import Path

from launcher.bench.messages import Block, Ready, Reply, Timing, VariantSpec
from launcher.bench.variants import Variant
from launcher.bench.worker import MeasurementProcess, closing_process

_MODULE = "launcher.bench.workers.vary"
_MAX_UNIT = 8  # in largest global batches: a block with complete steps of every variant must stay short
TimeBlock = Callable[[int, int], Timing]  # of a round and a variant


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSize:
    """Sequences per block: the same for every variant, whatever its global batch."""

    warmup_sequences: int
    timed_sequences: int
    is_exact: bool  # both are multiples of every variant's global batch

    def count_steps(self, global_batch_size: int) -> tuple[int, int]:
        """Return the number of warm-up steps and of timed steps."""
        return ceil(self.warmup_sequences / global_batch_size), ceil(self.timed_sequences / global_batch_size)


def make_block_size(global_batch_sizes: Sequence[int], warmup_steps: int, timed_steps: int) -> BlockSize:
    """Compute the size of a block; the steps are those of the variant with the largest global batch."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How much is measured."""

    repeats: int
    block_size: BlockSize
    limit_seconds: float  # for building a model, and for a block


@dataclass(kw_only=True)
class Measurements:
    """Everything that an A/B test measured."""

    blocks: list[Block] = field(default_factory=list)
    ready: dict[int, Ready] = field(default_factory=dict)  # by variant
    reuses_processes: bool  # each variant was one process throughout


def fit_together(variants: Sequence[Variant]) -> bool:
    """Return whether all models fit in memory at once, by the plans' own estimates with the headroom of one."""
    memory = [variant.plan.memory for variant in variants]
    return sum(plan.total_bytes for plan in memory) <= min(plan.usable_bytes for plan in memory)


def measure_variants(
    variants: Sequence[Variant],
    stores: Sequence[Path],
    effort: Effort,
    folder: Path,
    *,
    reuse_processes: bool,
    report: Callable[[str], None],
) -> Measurements:
    """Measure all blocks, with one process per variant that sleeps while another is timed, or one per block."""
    specs = [_make_spec(variant, store, effort.block_size) for variant, store in zip(variants, stores, strict=True)]
    measurements = Measurements(reuses_processes=reuse_processes)
    open_processes = _reused_processes if reuse_processes else _fresh_processes
    with open_processes(specs, folder, effort, measurements) as time_block:
        for number, order in enumerate(interleave(len(variants), effort.repeats), 1):
            for index in order:
                timing = time_block(number, index)
                measurements.blocks.append(Block(round=number, variant=index, timing=timing))
                speed = f"{timing.tokens_per_second:,.0f} tokens/s"
                report(f"round {number} of {effort.repeats}, {variants[index].label}: {speed}")
    return measurements


@contextmanager
def _reused_processes(
    specs: Sequence[VariantSpec], folder: Path, effort: Effort, measurements: Measurements
) -> Iterator[TimeBlock]:
    with ExitStack() as stack:
        processes = []
        for index, spec in enumerate(specs):  # sequentially: two that build at once would slow each other down
            process = MeasurementProcess(_MODULE, spec, folder, f"variant-{index + 1}")
            stack.enter_context(closing_process(process))
            measurements.ready[index] = _read_ready(process, effort)
            processes.append(process)
        yield lambda _number, index: _request_block(processes[index], effort)


@contextmanager
def _fresh_processes(
    specs: Sequence[VariantSpec], folder: Path, effort: Effort, measurements: Measurements
) -> Iterator[TimeBlock]:
    def time_block(number: int, index: int) -> Timing:
        name = f"variant-{index + 1}-round-{number}"
        with closing_process(MeasurementProcess(_MODULE, specs[index], folder, name)) as process:
            measurements.ready[index] = _read_ready(process, effort)
            return _request_block(process, effort)

    yield time_block


def _read_ready(process: MeasurementProcess, effort: Effort) -> Ready:
    ready = Reply.model_validate_json(process.read(effort.limit_seconds)).ready
    assert ready is not None
    return ready


def _request_block(process: MeasurementProcess, effort: Effort) -> Timing:
    process.send("block")
    timing = Reply.model_validate_json(process.read(effort.limit_seconds)).timing
    assert timing is not None
    return timing


def _make_spec(variant: Variant, store: Path, block_size: BlockSize) -> VariantSpec:
    warmup, timed = block_size.count_steps(variant.plan.batch.global_batch_size)
    return VariantSpec(plan=variant.plan, store=str(store.resolve()), warmup_steps=warmup, timed_steps=timed)
