"""The global batch, split for the ranks, and what the split costs."""

from __future__ import annotations

from launcher.plan.fit import Layout, accumulation_steps
from launcher.plan.model import BatchPlan, Decision
from launcher.plan.situation import Situation, asked, decided
from launcher.plan.sizing import Sizing
from launcher.units import format_percent


def make_batch_plan(situation: Situation, sizing: Sizing, layout: Layout) -> BatchPlan:
    config, ranks = situation.config, situation.num_ranks
    steps = accumulation_steps(sizing, layout)
    slots = layout.micro_batch_size * steps * ranks
    empty = slots - config.global_batch_size
    return BatchPlan(
        global_batch_size=config.global_batch_size,
        sequence_length=config.max_seq_length,
        num_ranks=ranks,
        micro_batch_size=layout.micro_batch_size,
        gradient_accumulation_steps=steps,
        empty_slots=empty,
        nearest_even_batches=_nearest_even(config.global_batch_size, ranks),
        packed=config.packing,
        group_by_length=config.group_by_length and not config.packing,
        eval_batch_size=config.eval_batch_size or layout.micro_batch_size,
    )


def _nearest_even(global_batch: int, ranks: int) -> tuple[int, ...]:
    """The global batches around this one that the ranks divide; none where they divide this one."""
    below = global_batch // ranks * ranks
    if below == global_batch:
        return ()
    return tuple(batch for batch in (below, below + ranks) if batch > 0)


def explain_batch(situation: Situation, batch: BatchPlan) -> list[Decision]:
    config = situation.config
    size = f"{batch.global_batch_size} sequences of {batch.sequence_length:,} tokens, packed"
    if not batch.packed:
        size = f"{batch.global_batch_size} rows of at most {batch.sequence_length:,} tokens, laid end to end"
    whole = asked(
        "global batch",
        size,
        f"batch_size {config.batch_size} x gradient_accumulation_steps {config.gradient_accumulation_steps}; "
        "the same on any hardware",
    )
    split = (
        f"{batch.micro_batch_size} a micro-step x {_count(batch.gradient_accumulation_steps, 'micro-step')} "
        f"x {_count(batch.num_ranks, 'rank')}"
    )
    return [whole, decided("split", split, _split_reason(batch)), *_explain_order(situation)]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _split_reason(batch: BatchPlan) -> str:
    if not batch.empty_slots:
        return "the fastest split that fits; nothing is wasted"
    wasted = (
        f"{batch.empty_slots} of {batch.num_slots} slots stay empty ({format_percent(batch.wasted_fraction)} of the "
        "compute, no change to the training)"
    )
    if not batch.nearest_even_batches:
        return f"{wasted}: micro-batches that divide it exactly would take longer"
    even = " or ".join(map(str, batch.nearest_even_batches))
    return f"{wasted}; a global batch of {even} would divide evenly by the ranks"


def _explain_order(situation: Situation) -> list[Decision]:
    config = situation.config
    if config.packing and config.group_by_length:
        return [
            decided(
                "row order",
                "shuffled packs",
                "packing and group_by_length are both true: packing wins, all packs have the same length",
            )
        ]
    if config.group_by_length:
        reason = "group_by_length in the manifest: rows of like length share a micro-batch, which evens out the steps"
        return [asked("row order", "grouped by length", reason)]
    return []
