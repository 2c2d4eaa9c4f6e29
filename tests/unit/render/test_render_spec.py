"""Rendering is pure text: no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.process
def test_rendering_imports_neither_torch_nor_the_engines() -> None:
    code = "import sys, launcher.render; print(sorted({'torch', 'accelerate', 'deepspeed'} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
