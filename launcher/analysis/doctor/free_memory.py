"""`launcher doctor --free`: ask compute processes that hold GPU memory to end. Nothing is killed by force."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from launcher.analysis.doctor.gpu_checks import GpuFacts, GpuProcess, format_process

_WAIT_SECONDS = 60.0  # a training run saves a checkpoint first


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process of this machine that holds GPU memory."""

    process: psutil.Process  # knows when it was started: a later process with the same number is never signalled
    description: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Holders:
    """Processes that may be asked to end, and why the others may not."""

    chosen: tuple[Holder, ...]
    left: tuple[str, ...]


def find_holders(facts: GpuFacts) -> Holders:
    """Find the processes that hold memory of visible GPUs."""
    processes: dict[int, GpuProcess] = {}
    for state in facts.states:
        for one in state.holders:
            known = processes.get(one.pid)
            processes[one.pid] = one if known is None or one.is_graphics else known
    chosen, left = [], []
    ancestors = {process.pid for process in psutil.Process().parents()} | {os.getpid()}
    for one in processes.values():
        text = format_process(one)
        try:
            process = psutil.Process(one.pid)
            owner = process.username()
        except psutil.Error:
            left.append(f"{text}: not visible here; look on the host, outside the container")
            continue
        if one.is_graphics:
            left.append(f"{text}: draws the desktop")
        elif one.pid in ancestors:
            left.append(f"{text}: started this command")
        elif os.geteuid() not in (0, process.uids().real):
            left.append(f"{text}: belongs to {owner}")
        else:
            run = "; a training run, which saves a checkpoint and can be resumed" if one.is_ours else ""
            chosen.append(Holder(process=process, description=f"{text}, user {owner}{run}"))
    return Holders(chosen=tuple(chosen), left=tuple(left))


def end_processes(holders: Iterable[Holder], seconds: float = _WAIT_SECONDS) -> Sequence[Holder]:
    """Send SIGTERM and wait; return those that are still alive."""
    asked = list(holders)
    for holder in asked:
        with suppress(psutil.Error):
            holder.process.terminate()
    _, alive = psutil.wait_procs([holder.process for holder in asked], timeout=seconds)
    return [holder for holder in asked if holder.process in alive]
