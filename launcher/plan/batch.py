"""The split of the global batch over ranks and micro-steps, and the DataLoader that reads it."""

from __future__ import annotations

from math import ceil

from launcher.core.units import format_percent
from launcher.plan.context import PlanContext, manifest_decision, plan_decision
from launcher.plan.memory_budget import SearchInputs
from launcher.plan.model import BatchPlan, Decision, LoaderPlan
from launcher.plan.schedule import count_step_sequences, estimate_run_length
from launcher.plan.search import Layout, count_accumulation_steps

# Rows are copied from a memory map, already tokenized: two workers hide that.
_WORKERS = 2
_PREFETCH = 4
# A worker process takes seconds to start (it imports torch): not worth it for fewer steps.
_FEW_STEPS = 20


def make_batch_plan(context: PlanContext, inputs: SearchInputs, layout: Layout) -> BatchPlan:
    """Return how a layout splits the global batch over ranks and micro-steps."""
    config, ranks = context.config, context.num_ranks
    steps = count_accumulation_steps(inputs, layout)
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
    """Return the multiples of the number of ranks next to a global batch; empty if it is such a multiple itself."""
    below = global_batch // ranks * ranks
    if below == global_batch:
        return ()
    return tuple(batch for batch in (below, below + ranks) if batch > 0)


def explain_batch(context: PlanContext, batch: BatchPlan) -> list[Decision]:
    """Return the decisions about the batch."""
    config = context.config
    sequences = count_step_sequences(context)
    size = f"{_count(sequences, 'sequence')} of {batch.sequence_length:,} tokens, packed"
    if not batch.packed:
        size = f"{_count(sequences, 'row')} of at most {batch.sequence_length:,} tokens, not padded"
    total = manifest_decision(
        "global batch",
        size,
        f"batch_size {config.batch_size} x gradient_accumulation_steps {config.gradient_accumulation_steps}; "
        + ("the same on any hardware" if sequences == batch.global_batch_size else "an epoch has no more sequences"),
    )
    return [total, _explain_split(batch, sequences), *_explain_order(context)]


def _explain_split(batch: BatchPlan, sequences: int) -> Decision:
    """Return the decision about the batch split, not counting micro-steps in which no rank has a sequence."""
    per_step = batch.micro_batch_size * batch.num_ranks
    steps = min(batch.gradient_accumulation_steps, ceil(sequences / per_step))
    accumulated, ranks = _count(steps, "accumulation step"), _count(batch.num_ranks, "rank")
    split = f"micro-batch {batch.micro_batch_size} x {accumulated} x {ranks}"
    if sequences < batch.global_batch_size:
        empty = steps * per_step - sequences
        reason = f"as many as an epoch needs; {empty} of {steps * per_step} slots stay empty"
        return plan_decision("batch split", split, reason)
    return plan_decision("batch split", split, _split_reason(batch))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _split_reason(batch: BatchPlan) -> str:
    if not batch.empty_slots:
        return "the fastest split that fits in memory"
    wasted = (
        f"{batch.empty_slots} of {batch.num_slots} slots stay empty ({format_percent(batch.wasted_fraction)} of the "
        "compute; training is unaffected)"
    )
    if not batch.nearest_even_batches:
        return f"{wasted}; micro-batches that divide the batch evenly would be slower"
    even = " or ".join(map(str, batch.nearest_even_batches))
    return f"{wasted}; a global batch of {even} would divide evenly over the ranks"


def _explain_order(context: PlanContext) -> list[Decision]:
    config = context.config
    if config.packing and config.group_by_length:
        return [
            plan_decision(
                "sample order",
                "shuffled packs",
                "packing and group_by_length are both true: packing wins, because all packs have the same length",
            )
        ]
    if config.group_by_length:
        reason = "group_by_length in the manifest: rows of similar length share a micro-batch"
        return [manifest_decision("sample order", "grouped by length", reason)]
    return []


def decide_dataloader(context: PlanContext) -> tuple[LoaderPlan, list[Decision]]:
    """Return the arguments of the DataLoader, and the decisions about them."""
    config = context.config
    workers, decision = _decide_workers(context)
    prefetch = (config.dataloader_prefetch_factor or _PREFETCH) if workers else None
    pin = config.dataloader_pin_memory if config.dataloader_pin_memory is not None else context.gpu is not None
    keep = config.dataloader_persistent_workers if config.dataloader_persistent_workers is not None else True
    plan = LoaderPlan(
        num_workers=workers,
        prefetch_factor=prefetch,
        pin_memory=pin and context.gpu is not None,
        persistent_workers=keep and workers > 0,
    )
    details = f"{prefetch} batches per worker" if prefetch else "off without workers"
    pinned = "pinned memory" if plan.pin_memory else "no pinned memory"
    keys = [
        key
        for key in ("dataloader_prefetch_factor", "dataloader_pin_memory", "dataloader_persistent_workers")
        if getattr(config, key) is not None
    ]
    enough = "enough to keep the GPU busy" if workers else "the training process itself reads the rows"
    reason = f"{', '.join(keys)} in the manifest" if keys else enough
    persistent = ", persistent workers" if plan.persistent_workers else ""
    state = manifest_decision if keys else plan_decision
    return plan, [decision, state("prefetch", f"{details}, {pinned}{persistent}", reason)]


def _decide_workers(context: PlanContext) -> tuple[int, Decision]:
    config, hardware, num_steps = context.config, context.hardware, estimate_run_length(context).num_steps
    if config.dataloader_num_workers is not None:
        count = config.dataloader_num_workers
        return count, manifest_decision("dataloader workers", str(count), "dataloader_num_workers in the manifest")
    cores = hardware.cpu_cores_per_node // max(1, hardware.gpus_per_node)
    if num_steps is not None and num_steps < _FEW_STEPS:
        return 0, plan_decision("dataloader workers", "0", f"{num_steps} steps are over before a worker has started")
    if context.gpu is None:
        return 0, plan_decision("dataloader workers", "0", "no GPU: all cores are needed for compute")
    count = max(0, min(_WORKERS, cores - 1))
    assumed = " (assumed)" if hardware.source == "catalogue" else ""
    return count, plan_decision(
        "dataloader workers", str(count), f"rows come from a memory map; {cores} cores{assumed} per GPU"
    )
