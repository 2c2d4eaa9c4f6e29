"""The benchmark of FP8 matmuls measures a case without a GPU and prints its table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytest.importorskip("torch", reason="pip install 'expert-launcher[train]'")


def run(*words: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks/matmuls.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


@pytest.mark.long
def test_small_product_is_measured_and_compared(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    run("measure", "--cases", "tiny", "--out", str(out))
    row = json.loads(out.read_text())
    assert row["shape"] == [64, 32, 48]
    assert 0 < row["difference"] < 0.02
    names = "bf16_ms", "fp8_ms", "rounding_ms", "lora_forward_ms", "lora_backward_ms"
    assert min(row[name] for name in names) > 0
    assert "| tiny | 64 x 32 x 48 |" in run("table", str(out))
