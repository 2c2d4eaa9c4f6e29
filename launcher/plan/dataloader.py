"""DataLoader workers, prefetch and pinned memory."""

from __future__ import annotations

from launcher.plan.context import PlanContext, manifest_decision, plan_decision
from launcher.plan.model import Decision, LoaderPlan

# Rows are copied from a memory map, already tokenized: two workers hide that.
_WORKERS = 2
_PREFETCH = 4
# A worker process takes seconds to start (it imports torch): not worth it for fewer steps.
_FEW_STEPS = 20


def decide_dataloader(context: PlanContext, num_steps: int | None) -> tuple[LoaderPlan, list[Decision]]:
    """Return the arguments of the DataLoader, and the decisions about them."""
    config = context.config
    workers, decision = _decide_workers(context, num_steps)
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


def _decide_workers(context: PlanContext, num_steps: int | None) -> tuple[int, Decision]:
    config, hardware = context.config, context.hardware
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
