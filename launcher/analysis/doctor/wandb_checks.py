"""Check the W&B login: whether there is a key and the server responds. The key is neither shown nor sent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from launcher.analysis.doctor.findings import Finding, Reporter
from launcher.runs.wandb_settings import check_server, decide_tracking, find_key

_MIN_KEY_LENGTH = 40

Mode = Literal["online", "offline", "disabled"]
_report = partial(Reporter("W&B"), "login")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoginFacts:
    """W&B settings of this process."""

    key_source: str | None  # variable or file; None: no key
    is_key_valid: bool
    mode: Mode  # default mode, without a manifest
    is_mode_set: bool  # by the environment
    error: str | None  # why the server cannot be reached; None: it can, or was not contacted
    was_contacted: bool


def probe_login(environ: Mapping[str, str], *, contacts_server: bool = True) -> LoginFacts:
    """Collect the W&B settings, and contact the server if runs would be logged online."""
    key, mode = find_key(environ), decide_tracking(None, environ).mode
    contacts = contacts_server and key is not None and mode == "online"
    value = "" if key is None else key.value
    is_file = key is not None and key.where == "WANDB_IDENTITY_TOKEN_FILE"
    is_valid = is_file or (len(value.rpartition("-")[2]) >= _MIN_KEY_LENGTH and re.search(r"\s", value) is None)
    return LoginFacts(
        key_source=None if key is None else key.where,
        is_key_valid=is_valid,
        mode=mode,
        is_mode_set=bool(environ.get("WANDB_MODE", "").strip() or environ.get("WANDB_DISABLED", "").strip()),
        error=check_server(environ) if contacts else None,
        was_contacted=contacts,
    )


def check_login(facts: LoginFacts, planned_mode: Mode | None = None) -> Finding:
    """Check the login for the manifest's mode. Without one, training continues and logs offline."""
    mode = facts.mode if facts.is_mode_set or planned_mode is None else planned_mode
    if mode in ("disabled", "offline") and (facts.is_mode_set or planned_mode is not None):
        return _report("ok", f"{mode}, set by {'the environment' if facts.is_mode_set else 'the manifest'}")
    if facts.key_source is None:
        if mode == "online":
            return _report(
                "problem",
                "no API key, but the mode is online",
                "the run would be logged offline",
                "wandb login, or export WANDB_API_KEY; or --wandb offline",
            )
        found = "no API key: runs are logged only if W&B is requested, and then offline"
        return _report("note", found, "", "wandb login, to follow runs in the browser")
    if not facts.is_key_valid:
        return _report(
            "problem",
            f"the key in {facts.key_source} is too short or contains a space",
            "the server will refuse it, and runs are logged offline",
            "wandb login --relogin",
        )
    if facts.error:
        return _report(
            "problem",
            f"key in {facts.key_source}, but {facts.error}",
            "runs are logged offline",
            "set WANDB_MODE=offline and upload later with wandb sync; or open the firewall",
        )
    return _report("ok", f"key in {facts.key_source}{', the server responds' if facts.was_contacted else ''}")
