"""Data-loader workers, prefetch and pinning for the cores at hand."""

from __future__ import annotations

from launcher.plan.model import Decision, LoaderPlan
from launcher.plan.situation import Situation, asked, decided

# Rows are read from a memory map and laid end to end: a copy, no tokenising. Two workers hide it.
_WORKERS = 2
_PREFETCH = 4
# Starting a worker process takes seconds (it imports torch); below this many steps it never pays.
_FEW_STEPS = 20


def decide_loading(situation: Situation, num_steps: int | None) -> tuple[LoaderPlan, list[Decision]]:
    config = situation.config
    workers, decision = _decide_workers(situation, num_steps)
    prefetch = (config.dataloader_prefetch_factor or _PREFETCH) if workers else None
    pin = config.dataloader_pin_memory if config.dataloader_pin_memory is not None else situation.gpu is not None
    keep = config.dataloader_persistent_workers if config.dataloader_persistent_workers is not None else True
    plan = LoaderPlan(
        num_workers=workers,
        prefetch_factor=prefetch,
        pin_memory=pin and situation.gpu is not None,
        persistent_workers=keep and workers > 0,
    )
    details = f"prefetch {prefetch}" if prefetch else "no prefetch without workers"
    pinned = "pinned memory, copies run beside the GPU" if plan.pin_memory else "no pinned memory"
    given = [
        key
        for key in ("dataloader_prefetch_factor", "dataloader_pin_memory", "dataloader_persistent_workers")
        if getattr(config, key) is not None
    ]
    why = f"{', '.join(given)} in the manifest" if given else "enough to stay ahead of the GPU"
    kept = ", workers kept between epochs" if plan.persistent_workers else ""
    state = asked if given else decided
    return plan, [decision, state("batches ahead", f"{details}, {pinned}{kept}", why)]


def _decide_workers(situation: Situation, num_steps: int | None) -> tuple[int, Decision]:
    config, hardware = situation.config, situation.hardware
    if config.dataloader_num_workers is not None:
        count = config.dataloader_num_workers
        return count, asked("loader workers", str(count), "dataloader_num_workers in the manifest")
    cores = hardware.cpu_cores_per_node // max(1, hardware.gpus_per_node)
    if num_steps is not None and num_steps < _FEW_STEPS:
        return 0, decided("loader workers", "0", f"{num_steps} steps end before a worker has started")
    if situation.gpu is None:
        return 0, decided("loader workers", "0", "no GPU: all cores compute")
    count = max(0, min(_WORKERS, cores - 1))
    assumed = " (assumed)" if hardware.source == "catalogue" else ""
    return count, decided(
        "loader workers", str(count), f"rows come from a memory map; {cores} cores{assumed} for each GPU"
    )
