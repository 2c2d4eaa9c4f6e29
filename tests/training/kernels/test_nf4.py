"""Run the NF4 and AdamW 8-bit tests in a process that can import bitsandbytes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

CASES = (
    "tests/training/kernels/nf4_cases.py",
    "tests/training/engine/adamw_8bit_cases.py",
    "tests/training/engine/chunked_adamw_cases.py",
    *(() if os.environ.get("LAUNCHER_TEST_GPU") else ("tests/distributed/nf4_cases.py",)),  # several ranks on a CPU
)
BITSANDBYTES = os.environ.get("LAUNCHER_TEST_BITSANDBYTES")  # a folder that contains it, if the environment does not


@pytest.mark.skipif(
    BITSANDBYTES is None and importlib.util.find_spec("bitsandbytes") is None,
    reason="neither bitsandbytes nor LAUNCHER_TEST_BITSANDBYTES",
)
def test_cases_that_need_bitsandbytes(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), *([BITSANDBYTES] if BITSANDBYTES else []), *sys.path])
    options = ["-v", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'cases'}"]  # else it deletes those of old runs
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *CASES],
        env={**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": "", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stdout[-20_000:]
    count = re.search(r"(\d+) passed", result.stdout)
    assert count is not None, result.stdout[-2000:]
    assert int(count[1]) > 40, "most were skipped"
