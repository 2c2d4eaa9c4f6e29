"""Bases of four bits a weight, optimizers of eight: in a process that sees bitsandbytes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

CASES = ("tests/training/packed_cases.py", "tests/training/eight_bit_cases.py")
BITSANDBYTES = os.environ.get("LAUNCHER_TEST_BITSANDBYTES")  # a folder that has it, where the environment has not


@pytest.mark.skipif(
    BITSANDBYTES is None and importlib.util.find_spec("bitsandbytes") is None,
    reason="neither bitsandbytes nor LAUNCHER_TEST_BITSANDBYTES",
)
def test_with_bitsandbytes() -> None:
    path = os.pathsep.join([str(ROOT), *([BITSANDBYTES] if BITSANDBYTES else []), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *CASES],
        env={**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": "", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-20_000:]
    counted = re.search(r"(\d+) passed", done.stdout)
    assert counted is not None, done.stdout[-2000:]
    assert int(counted[1]) > 40, "most were skipped"
