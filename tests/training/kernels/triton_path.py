"""Run programs that need Triton, on machines where torch must not see Triton: it would expect a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

TRITON = os.environ.get("LAUNCHER_TEST_TRITON")  # a folder that contains it, if the environment does not

needs_triton = pytest.mark.skipif(
    TRITON is None and importlib.util.find_spec("triton") is None, reason="neither triton nor LAUNCHER_TEST_TRITON"
)


def run_with_triton(program: str, *arguments: str, **variables: str) -> str:
    path = [str(ROOT), *([TRITON] if TRITON else []), *sys.path]
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(path)}
    result = subprocess.run(
        [sys.executable, program, *arguments], env=environment, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
