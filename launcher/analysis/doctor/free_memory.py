"""`launcher doctor --free`: ask compute processes that hold GPU memory to end. Nothing is killed by force."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

import psutil

from launcher.analysis.doctor.gpu_checks import GpuFacts, GpuProcess, format_process

_WAIT_SECONDS = 60.0  # a training run saves a checkpoint first


def find_holders(facts: GpuFacts) -> tuple[dict[psutil.Process, str], list[str]]:
    """Find the processes that hold memory of visible GPUs.

    Return the processes that may be asked to end, each with a description, and for each other one why it may not. A
    psutil.Process knows its start time, so a later process with the same PID is never signalled.
    """
    processes: dict[int, GpuProcess] = {}
    for state in facts.states:
        for one in state.holders:
            known = processes.get(one.pid)
            processes[one.pid] = one if known is None or one.is_graphics else known
    chosen: dict[psutil.Process, str] = {}
    left: list[str] = []
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
            chosen[process] = f"{text}, user {owner}{run}"
    return chosen, left


def end_processes(processes: Iterable[psutil.Process], seconds: float = _WAIT_SECONDS) -> list[psutil.Process]:
    """Send SIGTERM to processes, wait, and return the processes that are still alive."""
    asked = list(processes)
    for process in asked:
        with suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(asked, timeout=seconds)
    return list(alive)
