"""Checks that a separate process makes of torch, its GPU and its packages, as lines of JSON.

Each check is announced before it begins: if a library crashes or hangs, the last announcement names it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field, ValidationError

from launcher.core.frozen_model import Frozen

# not needed: has no use on this machine. not tried: not possible at the moment.
CheckStatus = Literal["begun", "works", "fails", "missing", "not needed", "not tried"]


class Check(Frozen):
    """One line of the report."""

    schema_version: Literal[1] = 1
    name: str
    status: CheckStatus
    detail: str = ""
    seconds: float = 0.0
    figures: dict[str, float] = Field(default_factory=dict)


def parse_checks(lines: Iterable[str]) -> tuple[Check, ...]:
    """Return the last state of each check. Other lines, which libraries may print, are skipped."""
    checks: dict[str, Check] = {}
    for line in lines:
        try:
            check = Check.model_validate_json(line)
        except (ValidationError, ValueError):
            continue
        checks[check.name] = check
    return tuple(checks.values())
