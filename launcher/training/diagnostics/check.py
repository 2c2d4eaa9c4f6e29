"""Run one check of `launcher doctor`. An exception that a library raises becomes the result of the check."""

from __future__ import annotations

import time
from collections.abc import Callable

from launcher.analysis.doctor.packages import Check, CheckStatus
from launcher.core.versions import find_version

_MAX_CHARS = 200


class NotTriedError(Exception):
    """The check cannot run right now; the message says why."""


class NotNeededError(Exception):
    """The check does not apply to this machine."""


class Passed:
    """Result of a check that passed."""

    def __init__(self, detail: str, **figures: float) -> None:
        """Store the text shown to the user (`detail`) and the measured values by their names (`figures`)."""
        self.detail, self.figures = detail, figures


CheckFunction = Callable[[], Passed]


def run_check(name: str, check: CheckFunction) -> Check:
    """Run a check and record its result and duration."""
    began = time.monotonic()
    figures: dict[str, float] = {}
    status: CheckStatus = "works"
    try:
        passed = check()
        detail, figures = passed.detail, passed.figures
    except NotNeededError as reason:
        status, detail = "not needed", str(reason)
    except NotTriedError as reason:
        status, detail = "not tried", str(reason)
    except ModuleNotFoundError as error:
        status, detail = "missing", f"{error.name} is not installed"
    except Exception as error:  # a library may raise anything
        status, detail = "fails", _describe(error)
    return Check(name=name, status=status, detail=detail, seconds=round(time.monotonic() - began, 2), figures=figures)


def _describe(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:_MAX_CHARS].rstrip(": ")


def format_version(package: str) -> str:
    """Return the installed version of a package, or `of unknown version` if it cannot be found."""
    return find_version(package) or "of unknown version"
