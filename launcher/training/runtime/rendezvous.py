"""Exchange text between rank 0 and the other ranks over the TCPStore, before there is a process group.

Rank 0 publishes a call. Every other rank answers it under its own nonce, and waits for the reply under that nonce. A
store may outlive the ranks that used it, and each node counts its restarts separately, so keys of earlier attempts must
not be mistaken for new ones: they have other nonces. Nothing is pickled, because ranks may run different versions.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from launcher.core.errors import ExitCode, LauncherError, RunFailedError
from launcher.core.run_paths import RunPaths
from launcher.plan.model import Plan
from launcher.runs.record import exit_code_of

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

_PREFIX = "launcher/rendezvous"
_CALL = f"{_PREFIX}/call"
# Polled: torch prints three lines to the console for every wait that times out.
_POLL_SECONDS = 0.1
_CLOCK_SECONDS = 10.0  # for a rank that has just answered and polls for the request
_ACK_SECONDS = 5.0
_EXTRA_SECONDS = 15.0  # rank 0 times out first, because it can name the missing ranks
_PLAN_SECONDS = 600
_REPORT_SECONDS = 1.0

_hosted: list[TCPStore] = []  # kept alive for the process: other ranks are connected to it


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A text that a rank sent to rank 0, with the nonce for the reply and the offset of its clock."""

    rank: int
    nonce: str
    text: str
    clock_offset: float = 0.0  # seconds that its clock is ahead of rank 0's
    clock_error: float = 0.0  # half of the round trip


class ReportedElsewhereError(LauncherError):
    """Rank 0 failed and printed why; other ranks end silently with its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__("")
        self.exit_code = ExitCode(code)


def fail_like_rank_0(code: int) -> NoReturn:
    """End this rank after rank 0 had time to print: torchrun terminates all ranks as soon as one has exited."""
    time.sleep(_REPORT_SECONDS)
    raise ReportedElsewhereError(code)


def connect_store(timeout: timedelta) -> TCPStore:
    """Connect to torchrun's TCPStore; if torchrun's agent does not share one with its ranks, rank 0 hosts it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_host = os.environ.get("RANK") == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(host, port, is_master=is_host, timeout=timeout, multi_tenant=is_host)
    if is_host:
        _hosted.append(store)
    return store


def gather(store: Store, num_ranks: int, timeout_seconds: float) -> tuple[Message, ...]:
    """Return the messages of all other ranks; ranks that do not answer in time are missing. Rank 0 calls it."""
    call = uuid.uuid4().hex
    store.set(_CALL, call)
    deadline = time.monotonic() + timeout_seconds
    messages = (_receive(store, call, rank, deadline) for rank in range(1, num_ranks))
    return tuple(message for message in messages if message is not None)


def reply(store: Store, messages: Sequence[Message], text: str) -> None:
    """Send a reply to the gathered ranks, and wait for their acks, because the store may end with this process."""
    for message in messages:
        store.set(_key(message.nonce, "reply"), text)
    deadline = time.monotonic() + _ACK_SECONDS
    for message in messages:
        _poll(store, _key(message.nonce, "ack"), deadline)


def send(store: Store, rank: int, text: str, timeout_seconds: float) -> str | None:
    """Send text to rank 0 and return its reply, or None if none came in time. Every other rank calls it."""
    nonce = uuid.uuid4().hex
    answered_call = None
    timeout = timeout_seconds + _EXTRA_SECONDS
    deadline = time.monotonic() + timeout
    while not store.check([_key(nonce, "clock-request")]):
        if time.monotonic() > deadline:
            return None
        call = _read(store, _CALL)
        if call is not None and call != answered_call:  # it may be of an earlier attempt; then another one follows
            store.set(_key(call, str(rank)), json.dumps({"nonce": nonce, "text": text}))
            answered_call = call
            deadline = time.monotonic() + timeout
        time.sleep(_POLL_SECONDS)
    store.set(_key(nonce, "clock"), repr(time.time()))
    answer = _poll(store, _key(nonce, "reply"), time.monotonic() + timeout)
    store.set(_key(nonce, "ack"), "")
    return answer


def broadcast_plan(make_plan: Callable[[], tuple[Plan, RunPaths]], rank: int, num_ranks: int) -> tuple[Plan, RunPaths]:
    """Return rank 0's plan and run directory on all ranks; their own plans could differ by free memory or time."""
    store = connect_store(timedelta(seconds=_PLAN_SECONDS))
    if rank != 0:
        return _parse_plan(send(store, rank, "", _PLAN_SECONDS))
    try:
        plan, paths = make_plan()
    except Exception as error:
        reply(store, gather(store, num_ranks, _PLAN_SECONDS), json.dumps({"exit_code": exit_code_of(error)}))
        raise
    text = json.dumps({"plan": plan.model_dump_json(), "root": str(paths.root)})
    reply(store, gather(store, num_ranks, _PLAN_SECONDS), text)
    return plan, paths


def _parse_plan(text: str | None) -> tuple[Plan, RunPaths]:
    if text is None:
        raise RunFailedError(f"rank 0 made no plan within {_PLAN_SECONDS} s", hint="see the console of rank 0")
    values = json.loads(text)
    if "exit_code" in values:
        fail_like_rank_0(values["exit_code"])
    return Plan.model_validate_json(values["plan"]), RunPaths(Path(values["root"]))


def _receive(store: Store, call: str, rank: int, deadline: float) -> Message | None:
    sent = _poll(store, _key(call, str(rank)), deadline)
    if sent is None:
        return None
    values = json.loads(sent)
    nonce, text = str(values["nonce"]), str(values["text"])
    requested_at = time.time()
    store.set(_key(nonce, "clock-request"), "")
    clock = _poll(store, _key(nonce, "clock"), time.monotonic() + _CLOCK_SECONDS)
    if clock is None:
        return None
    half = (time.time() - requested_at) / 2
    offset = float(clock) - requested_at - half
    return Message(rank=rank, nonce=nonce, text=text, clock_offset=offset, clock_error=half)


def _poll(store: Store, key: str, deadline: float) -> str | None:
    """Return the value of a key once it is set, or None after the deadline; reads at least once."""
    while (value := _read(store, key)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return value


def _read(store: Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def _key(*parts: str) -> str:
    return "/".join((_PREFIX, *parts))
