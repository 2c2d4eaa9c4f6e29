"""One thing tried out: whatever a library does then, raising included, is what was found."""

from __future__ import annotations

import time
from collections.abc import Callable

from launcher.examination import Check, CheckStatus
from launcher.versions import find_version

_LONGEST = 200


class NotTriedError(Exception):
    """It cannot be tried right now: the message says why."""


class NotNeededError(Exception):
    """The check has nothing to do on this machine."""


class Found:
    """What a check says when it works."""

    def __init__(self, detail: str, **figures: float) -> None:
        self.detail, self.figures = detail, figures


CheckFunction = Callable[[], Found]


def run_check(name: str, check: CheckFunction) -> Check:
    began = time.monotonic()
    figures: dict[str, float] = {}
    status: CheckStatus = "works"
    try:
        found = check()
        detail, figures = found.detail, found.figures
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
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:_LONGEST].rstrip(": ")


def format_version(package: str) -> str:
    return find_version(package) or "of unknown version"
