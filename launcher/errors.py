"""What can go wrong, and what the process says and returns when it does.

    LauncherError            1  our bug, if it ever reaches a user as such
    +-- InputError           2  wrong input: arguments, files, values
    |   +-- ManifestError       the manifest is at fault
    +-- DoesNotFitError      3  no plan fits the hardware
    +-- RunFailedError       4  a training began and could not end well
    +-- TopologyError        5  what was started is not what was planned

A user's mistake is raised as one of these and printed without a traceback: what is wrong, where, and the way out.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import IntEnum

from launcher.redaction import redact_text


class ExitCode(IntEnum):
    """Exit codes of `launcher`; docs/CLI.md documents them."""

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
    """Foreign text for a terminal: escape sequences and direction marks are shown, not sent; secrets never."""
    text = redact_text(text)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def show_value(value: object) -> str:
    """In a list of differences: a long one is cut."""
    text = escape(str(value))
    return text if len(text) <= 60 else text[:57] + "..."


def say(text: str) -> None:
    """To whoever watches, at once; what a verb answers goes to stdout."""
    print(text, file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    """Of a library's error, inside a message of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong, and where: a dotted path into a file, a flag, or nothing."""

    where: str
    what: str

    def __str__(self) -> str:
        return escape(f"{self.where}: {self.what}" if self.where else self.what)


class LauncherError(Exception):
    """Base of every error meant for a user. `problems` are all told at once; `hint` is the way out."""

    exit_code = ExitCode.BUG

    def __init__(self, title: str, problems: tuple[Problem, ...] = (), hint: str = "") -> None:
        super().__init__(title)
        self.title = title
        self.problems = problems
        self.hint = hint

    def __str__(self) -> str:
        lines = [*map(escape, self.title.split("\n")), *(f"  {problem}" for problem in self.problems)]
        if self.hint:
            lines.append(f"hint: {escape(self.hint)}")
        return "\n".join(lines)


class InputError(LauncherError):
    exit_code = ExitCode.WRONG_INPUT


class ManifestError(InputError):
    pass


class DoesNotFitError(LauncherError):
    exit_code = ExitCode.DOES_NOT_FIT


class RunFailedError(LauncherError):
    exit_code = ExitCode.RUN_FAILED


class TopologyError(LauncherError):
    exit_code = ExitCode.WRONG_TOPOLOGY
