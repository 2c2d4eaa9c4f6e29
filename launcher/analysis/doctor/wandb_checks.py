"""Check the W&B login: whether there is a key and the server responds. The key is neither shown nor sent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Literal

from launcher.analysis.doctor.findings import Finding, Reporter
from launcher.runs.wandb_settings import check_server, decide_tracking, find_key

_MIN_KEY_LENGTH = 40
_report = partial(Reporter("W&B"), "login")


def check_login(
    environ: Mapping[str, str], planned_mode: Literal["online", "offline", "disabled"] | None = None
) -> Finding:
    """Check the W&B login that the logging mode needs; without a login, training still runs and logs offline."""
    is_mode_set = any(environ.get(name, "").strip() for name in ("WANDB_MODE", "WANDB_DISABLED"))
    default_mode = decide_tracking(None, environ).mode
    mode = default_mode if is_mode_set or planned_mode is None else planned_mode
    if mode != "online" and (is_mode_set or planned_mode is not None):
        return _report("ok", f"{mode}, set by {'the environment' if is_mode_set else 'the manifest'}")
    key = find_key(environ)
    if key is None:
        if mode == "online":
            return _report(
                "problem",
                "no API key, but the mode is online",
                "the run would be logged offline",
                "wandb login, or export WANDB_API_KEY; or --wandb offline",
            )
        found = "no API key: runs are logged only if W&B is requested, and then offline"
        return _report("note", found, "", "wandb login, to follow runs in the browser")
    is_file = key.where == "WANDB_IDENTITY_TOKEN_FILE"
    is_long = len(key.value.rpartition("-")[2]) >= _MIN_KEY_LENGTH
    if not is_file and (not is_long or re.search(r"\s", key.value)):
        return _report(
            "problem",
            f"the key in {key.where} is too short or contains a space",
            "the server will refuse it, and runs are logged offline",
            "wandb login --relogin",
        )
    if error := check_server(environ):
        return _report(
            "problem",
            f"key in {key.where}, but {error}",
            "runs are logged offline",
            "set WANDB_MODE=offline and upload later with wandb sync; or open the firewall",
        )
    return _report("ok", f"key in {key.where}, the server responds")
