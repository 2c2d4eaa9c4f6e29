"""Errors for users, and the exit codes of the process.

    LauncherError            1  our bug, if it ever reaches a user
    +-- InputError           2  wrong input: arguments, files, values
    |   +-- ManifestError       the manifest is wrong
    +-- DoesNotFitError      3  no plan fits the hardware
    +-- RunFailedError       4  a training started and failed
    +-- TopologyError        5  the processes that were started differ from the plan

A user's mistake is raised as one of these and printed without a traceback: what is wrong, where, and what to do.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from enum import IntEnum

from launcher.core.redaction import redact_text


class ExitCode(IntEnum):
    """Exit codes of `launcher`, documented in docs/CLI.md."""

    DONE = 0
    BUG = 1
    WRONG_INPUT = 2
    DOES_NOT_FIT = 3
    RUN_FAILED = 4
    WRONG_TOPOLOGY = 5
    QUALITY_GATE = 6
    DOCTOR_FOUND_SOMETHING = 7
    PREEMPTED = 75


def escape(text: str) -> str:
    """Make foreign text safe for a terminal: escape sequences and direction marks are shown, secrets redacted."""
    text = redact_text(text)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def show_value(value: object) -> str:
    """Format a value for a list of differences, shortened to 60 characters."""
    text = escape(str(value))
    return text if len(text) <= 60 else text[:57] + "..."


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, for use in a message of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong, and where: a dotted path into a file, a flag, or empty."""

    where: str
    what: str

    def __str__(self) -> str:
        return escape(f"{self.where}: {self.what}" if self.where else self.what)


MAX_PROBLEMS = 50  # of one error


class LauncherError(Exception):
    """Base of every error meant for a user: a title, at most 50 `problems`, and a `hint` that says what to do."""

    exit_code = ExitCode.BUG

    def __init__(self, title: str, problems: tuple[Problem, ...] = (), hint: str = "") -> None:
        super().__init__(title)
        self.title = title
        rest = len(problems) - MAX_PROBLEMS
        self.problems = problems if rest <= 0 else (*problems[:MAX_PROBLEMS], Problem(where="", what=f"{rest:,} more"))
        self.hint = hint

    def __str__(self) -> str:
        lines = [*map(escape, self.title.split("\n")), *(f"  {problem}" for problem in self.problems)]
        if self.hint:
            lines.append(f"hint: {escape(self.hint)}")
        return "\n".join(lines)


class InputError(LauncherError):
    """Wrong arguments, files or values."""

    exit_code = ExitCode.WRONG_INPUT


class ManifestError(InputError):
    """A wrong manifest."""


class DoesNotFitError(LauncherError):
    """No plan fits the hardware."""

    exit_code = ExitCode.DOES_NOT_FIT


class RunFailedError(LauncherError):
    """A training started and failed."""

    exit_code = ExitCode.RUN_FAILED


class TopologyError(LauncherError):
    """The processes that were started differ from the plan."""

    exit_code = ExitCode.WRONG_TOPOLOGY


def hint_for(error: BaseException, flag: str = "") -> str:
    """Return what to do about a file that cannot be read or written; empty if the error itself says enough.

    `flag` is the flag or variable that chooses another folder.
    """
    if isinstance(error, LauncherError):
        return error.hint
    number = error.errno if isinstance(error, OSError) else None
    if match := re.search(r"\(os error (\d+)\)", str(error)):  # of a library in Rust
        number = int(match[1])
    another = "choose another folder" + (f" with {flag}" if flag else "")
    if number in (errno.EACCES, errno.EPERM):
        return f"you have no permission: check the owner and the mode (`ls -ld`), or {another}"
    if number in (errno.ENOTDIR, errno.EEXIST):
        return f"a part of this path is a file and not a folder: {another}"
    if number == errno.EROFS:
        return f"the file system is read-only: {another}"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full: free some space, or {another}"
    return ""
