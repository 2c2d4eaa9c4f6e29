"""What a process with torch found out about torch, its GPU and the packages around it: read by `launcher doctor`.

Each check is a line of its own, announced before it begins: where a library takes the process down, or hangs, the last
announcement says which.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field, ValidationError

from launcher.values import Frozen

# not needed: it has nothing to do on this machine. not tried: it could not be, for now.
CheckStatus = Literal["begun", "works", "fails", "missing", "not needed", "not tried"]


class Check(Frozen):
    schema_version: Literal[1] = 1
    name: str
    status: CheckStatus
    detail: str = ""
    seconds: float = 0.0
    figures: dict[str, float] = Field(default_factory=dict)


def parse_checks(lines: Iterable[str]) -> tuple[Check, ...]:
    """The last word on each check. What is no check is passed over: a library may have written between ours."""
    found: dict[str, Check] = {}
    for line in lines:
        try:
            check = Check.model_validate_json(line)
        except (ValidationError, ValueError):
            continue
        found[check.name] = check
    return tuple(found.values())
