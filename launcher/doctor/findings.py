"""A finding: what was seen, whether it is wrong, why it matters and what to do. All findings together are a report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from launcher.errors import ExitCode
from launcher.values import Frozen

Status = Literal["ok", "note", "problem"]
Family = Literal["machine", "GPU", "disks", "packages", "W&B", "expert", "run"]

FAMILIES: tuple[Family, ...] = ("run", "expert", "GPU", "machine", "disks", "packages", "W&B")
_WORST_FIRST: tuple[Status, ...] = ("problem", "note", "ok")


class Finding(Frozen):
    family: Family
    subject: str
    status: Status
    found: str
    matters: str = ""  # why it does; empty where all is well
    next_step: str = ""  # a command, or a setting


class Report(Frozen):
    """`launcher doctor --json`."""

    schema_version: Literal[1] = 1
    findings: tuple[Finding, ...]

    @property
    def num_problems(self) -> int:
        return sum(finding.status == "problem" for finding in self.findings)

    @property
    def num_notes(self) -> int:
        return sum(finding.status == "note" for finding in self.findings)

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.DOCTOR_FOUND_SOMETHING if self.num_problems else ExitCode.DONE


def make_report(findings: Iterable[Finding]) -> Report:
    """By family, and inside a family worst first; what is alike stays in the order in which it was found."""
    order = sorted(findings, key=lambda one: (FAMILIES.index(one.family), _WORST_FIRST.index(one.status)))
    return Report(findings=tuple(order))


def could_not_look(family: Family, subject: str, why: str) -> Finding:
    """A look that failed is no problem of the machine: it is told, and nothing is concluded from it."""
    return Finding(family=family, subject=subject, status="note", found=f"could not look: {why}")
