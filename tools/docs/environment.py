"""Environment for rendering pages, which must depend on the code only."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def plain_environment(**variables: str) -> Iterator[None]:
    """Hide this machine's calibration and hardware settings."""
    with tempfile.TemporaryDirectory() as folder:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("LAUNCHER_")}
        ours = {"LAUNCHER_CACHE_DIR": folder, "LAUNCHER_HARDWARE": "off"}
        with patch.dict(os.environ, inherited | ours | variables, clear=True):
            yield
