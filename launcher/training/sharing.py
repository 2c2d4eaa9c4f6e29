"""What the first rank decided, handed to the others before there is a process group: by the agent's own store."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistStoreError, TCPStore  # type: ignore[attr-defined]

from launcher.errors import ExitCode, LauncherError, RunFailedError
from launcher.paths import RunPaths
from launcher.plan.model import Plan

_KEY = "launcher/plan"
_WAIT = timedelta(minutes=10)

Decide = Callable[[], tuple[Plan, RunPaths]]


class _ToldElsewhereError(LauncherError):
    """The first rank failed and said why; the others end with its code, in silence."""

    def __init__(self, code: int) -> None:
        super().__init__("")
        self.exit_code = ExitCode(code)


def decide_once(decide: Decide, rank: int, attempt: str) -> tuple[Plan, RunPaths]:
    """One plan and one run directory for all: each rank for itself might find other free memory, another second."""
    store = connect(_WAIT)
    key = f"{_KEY}/{attempt}"
    if rank != 0:
        return _receive(store, key)
    try:
        plan, paths = decide()
    except LauncherError as error:
        store.set(key, json.dumps({"exit_code": int(error.exit_code)}))
        raise
    store.set(key, json.dumps({"plan": plan.model_dump_json(), "root": str(paths.root)}))
    return plan, paths


def _receive(store: TCPStore, key: str) -> tuple[Plan, RunPaths]:
    try:
        store.wait([key], _WAIT)
    except DistStoreError:
        raise RunFailedError(f"the first rank made no plan within {_WAIT}", hint="its console says why") from None
    told = json.loads(store.get(key))
    if "exit_code" in told:
        raise _ToldElsewhereError(told["exit_code"])
    return Plan.model_validate_json(told["plan"]), RunPaths(Path(told["root"]))


def connect(timeout: timedelta) -> TCPStore:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=False, timeout=timeout)
