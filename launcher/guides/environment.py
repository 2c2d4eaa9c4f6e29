"""What a page of the docs may depend on: the code alone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def plain_environment(**told: str) -> Iterator[None]:
    """Without what this machine has learnt, and what its user wants or says of it."""
    with tempfile.TemporaryDirectory() as folder:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LAUNCHER_")}
        ours = {"LAUNCHER_CACHE_DIR": folder, "LAUNCHER_HARDWARE": "off"}
        with patch.dict(os.environ, kept | ours | told, clear=True):
            yield
