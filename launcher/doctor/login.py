"""Weights & Biases: is there a key, does its server answer. The key itself is neither shown nor sent."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from launcher.doctor.findings import Finding, Status
from launcher.tracking import decide_tracking, find_key, find_trouble

_SHORTEST_KEY = 40

Mode = Literal["online", "offline", "disabled"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoginFacts:
    key_in: str | None  # where a key was found; None: nowhere
    is_key_whole: bool
    mode: Mode  # what a run would do whose manifest says nothing
    is_mode_told: bool  # by the environment
    trouble: str | None  # why the server cannot be reached; None: it can, or was not asked
    was_asked: bool


def probe_login(environ: Mapping[str, str], *, asks_server: bool = True) -> LoginFacts:
    key, mode = find_key(environ), decide_tracking(None, environ).mode
    asks = asks_server and key is not None and mode == "online"
    value = "" if key is None else key.value
    is_file = key is not None and key.where == "WANDB_IDENTITY_TOKEN_FILE"
    is_whole = is_file or (len(value.rpartition("-")[2]) >= _SHORTEST_KEY and re.search(r"\s", value) is None)
    return LoginFacts(
        key_in=None if key is None else key.where,
        is_key_whole=is_whole,
        mode=mode,
        is_mode_told=bool(environ.get("WANDB_MODE", "").strip() or environ.get("WANDB_DISABLED", "").strip()),
        trouble=find_trouble(environ) if asks else None,
        was_asked=asks,
    )


def probe_own_login(*, asks_server: bool = True) -> LoginFacts:
    return probe_login(os.environ, asks_server=asks_server)


def judge_login(facts: LoginFacts, planned_mode: Mode | None = None) -> Finding:
    """`planned_mode` is the manifest's. Whatever is wrong here, the training itself goes on, and is kept offline."""
    mode = facts.mode if facts.is_mode_told or planned_mode is None else planned_mode
    if mode in ("disabled", "offline") and (facts.is_mode_told or planned_mode is not None):
        return _tell("ok", f"{mode}, as {'the environment' if facts.is_mode_told else 'the manifest'} says")
    if facts.key_in is None:
        if mode == "online":
            return _tell(
                "problem",
                "no key, and the run shall be online",
                "it would be kept offline",
                "wandb login, or export WANDB_API_KEY; or --wandb offline",
            )
        return _tell("note", "no key: runs are kept offline", "", "wandb login, to see runs on a page as they train")
    if not facts.is_key_whole:
        return _tell(
            "problem",
            f"the key in {facts.key_in} is shorter than a key, or has a space in it",
            "the server will refuse it, and runs will be kept offline",
            "wandb login --relogin",
        )
    if facts.trouble:
        return _tell(
            "problem",
            f"a key in {facts.key_in}, but {facts.trouble}",
            "runs will be kept offline",
            "WANDB_MODE=offline says so from the start, wandb sync uploads later; or a way through the firewall",
        )
    return _tell("ok", f"a key in {facts.key_in}{', the server answers' if facts.was_asked else ''}")


def _tell(status: Status, found: str, matters: str = "", next_step: str = "") -> Finding:
    return Finding(family="W&B", subject="login", status=status, found=found, matters=matters, next_step=next_step)
