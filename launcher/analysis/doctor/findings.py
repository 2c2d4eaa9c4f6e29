"""Findings of `launcher doctor`: what was found, whether it is wrong, why it matters and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from launcher.core.errors import ExitCode
from launcher.core.frozen_model import Frozen

Status = Literal["ok", "note", "problem"]
Family = Literal["machine", "GPU", "disks", "packages", "W&B", "expert", "run"]

FAMILIES: tuple[Family, ...] = ("run", "expert", "GPU", "machine", "disks", "packages", "W&B")
_STATUS_ORDER: tuple[Status, ...] = ("problem", "note", "ok")


class Finding(Frozen):
    """Result of one check."""

    family: Family
    subject: str
    status: Status
    found: str
    matters: str = ""  # why it matters; empty if all is well
    next_step: str = ""  # a command or a setting


class Report(Frozen):
    """All findings: the output of `launcher doctor --json`."""

    schema_version: Literal[1] = 1
    findings: tuple[Finding, ...]

    @property
    def num_problems(self) -> int:
        """Number of problems, which decides the exit code."""
        return sum(finding.status == "problem" for finding in self.findings)

    @property
    def num_notes(self) -> int:
        """Number of notes."""
        return sum(finding.status == "note" for finding in self.findings)

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of `launcher doctor`."""
        return ExitCode.DOCTOR_FOUND_SOMETHING if self.num_problems else ExitCode.DONE


def make_report(findings: Iterable[Finding]) -> Report:
    """Sort findings by family, and within a family worst first."""
    order = sorted(findings, key=lambda item: (FAMILIES.index(item.family), _STATUS_ORDER.index(item.status)))
    return Report(findings=tuple(order))


class Reporter:
    """Makes findings of one family, such as GPU or disks, from positional arguments."""

    def __init__(self, family: Family) -> None:
        self.family = family

    def __call__(self, subject: str, status: Status, found: str, matters: str = "", next_step: str = "") -> Finding:
        """Make a finding with the given status."""
        return Finding(
            family=self.family, subject=subject, status=status, found=found, matters=matters, next_step=next_step
        )

    def ok(self, subject: str, found: str) -> Finding:
        """Make a finding that a check found nothing wrong."""
        return self(subject, "ok", found)

    def note(self, subject: str, found: str, matters: str = "", next_step: str = "") -> Finding:
        """Make a finding that is worth knowing, but not a problem."""
        return self(subject, "note", found, matters, next_step)

    def problem(self, subject: str, found: str, matters: str, next_step: str) -> Finding:
        """Make a finding of a problem, with why it matters and how to fix it."""
        return self(subject, "problem", found, matters, next_step)


def make_skipped(family: Family, subject: str, reason: str) -> Finding:
    """Make a note that a check could not run, which does not count as a problem."""
    return Reporter(family).note(subject, f"not checked: {reason}")
