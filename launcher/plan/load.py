"""Load a plan.json, and refuse one that another version of the launcher wrote."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from launcher import __version__
from launcher.core.errors import InputError
from launcher.plan.model import PLAN_FORMAT, Plan


def load_plan(file: Path) -> Plan:
    """Return the plan stored in `file`; raise InputError if it is unreadable or of another format."""
    try:
        text = file.read_text(encoding="utf-8")
        tree = json.loads(text)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):  # not UTF-8, or not JSON
        raise InputError(f"{file} is not a plan: it is not valid JSON") from None
    if not isinstance(tree, dict) or "launcher_version" not in tree:
        raise InputError(f"{file} is not a plan: it does not name the launcher version that wrote it")
    if tree.get("schema_version") != PLAN_FORMAT:
        raise InputError(
            f"{file} was written by launcher {tree['launcher_version']} (plan format {tree.get('schema_version')}), "
            f"which this version cannot read (launcher {__version__}, plan format {PLAN_FORMAT})",
            hint="use the launcher version that wrote it, or start a new run",
        )
    try:
        return Plan.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(
            f"{file} is not a valid plan ({error.error_count()} problems; first: {where}: {first['msg']})",
            hint="it was edited or damaged; start a new run",
        ) from None
