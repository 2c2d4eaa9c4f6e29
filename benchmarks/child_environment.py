"""Environment of the processes that benchmarks start: they import this checkout, installed or not."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def make_environment(**variables: str) -> dict[str, str]:
    """Return this process's environment with this checkout first in PYTHONPATH, and with other variables."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **variables}
