"""What the first rank decided, handed to the others before there is a process group: by the agent's own store."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from launcher.errors import ExitCode, LauncherError, RunFailedError
from launcher.paths import RunPaths
from launcher.plan.model import Plan
from launcher.record import exit_code_of
from launcher.training.roll_call import answer, hear_all, tell_all

_WAIT_SECONDS = 600

_hosted: list[TCPStore] = []  # kept for the process's life: others are connected to it

Decide = Callable[[], tuple[Plan, RunPaths]]


class ToldElsewhereError(LauncherError):
    """The first rank failed and said why; the others end with its code, in silence."""

    def __init__(self, code: int) -> None:
        super().__init__("")
        self.exit_code = ExitCode(code)


def decide_once(decide: Decide, rank: int, num_ranks: int) -> tuple[Plan, RunPaths]:
    """One plan and one run directory for all: each rank for itself might find other free memory, another second."""
    store = connect(timedelta(seconds=_WAIT_SECONDS))
    if rank != 0:
        return _read(answer(store, rank, "", _WAIT_SECONDS))
    try:
        plan, paths = decide()
    except Exception as error:
        _tell(store, num_ranks, {"exit_code": exit_code_of(error)})
        raise
    _tell(store, num_ranks, {"plan": plan.model_dump_json(), "root": str(paths.root)})
    return plan, paths


def _tell(store: TCPStore, num_ranks: int, decided: dict[str, int | str]) -> None:
    tell_all(store, hear_all(store, num_ranks, _WAIT_SECONDS), json.dumps(decided))


def _read(decided: str | None) -> tuple[Plan, RunPaths]:
    if decided is None:
        raise RunFailedError(f"the first rank made no plan within {_WAIT_SECONDS} s", hint="its console says why")
    told = json.loads(decided)
    if "exit_code" in told:
        raise ToldElsewhereError(told["exit_code"])
    return Plan.model_validate_json(told["plan"]), RunPaths(Path(told["root"]))


def connect(timeout: timedelta) -> TCPStore:
    """To the agent's store. Where the agent keeps none for its ranks, the first rank does, now and for the group."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_host = os.environ.get("RANK") == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(host, port, is_master=is_host, timeout=timeout, multi_tenant=is_host)
    if is_host:
        _hosted.append(store)
    return store
