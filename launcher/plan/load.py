"""Load a plan.json, and refuse one that another version of the launcher wrote."""

from __future__ import annotations

import json
from pathlib import Path

from launcher import __version__
from launcher.core.errors import InputError
from launcher.core.run_files import parse_model, read_text
from launcher.plan.model import PLAN_FORMAT, Plan


def load_plan(file: Path) -> Plan:
    """Return the plan stored in `file`; raise InputError if it is unreadable or of another format."""
    text = read_text(file)
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError(f"{file} is not a plan: it is not valid JSON") from None
    if not isinstance(tree, dict) or "launcher_version" not in tree:
        raise InputError(f"{file} is not a plan: it does not name the launcher version that wrote it")
    if tree.get("schema_version") != PLAN_FORMAT:
        raise InputError(
            f"{file} was written by launcher {tree['launcher_version']} (plan format {tree.get('schema_version')}), "
            f"which this version cannot read (launcher {__version__}, plan format {PLAN_FORMAT})",
            hint="use the launcher version that wrote it, or start a new run; its adapter still works: "
            "`launcher eval EXPERT --adapter DIR` and PEFT load it",
        )
    return parse_model(Plan, text, file)
