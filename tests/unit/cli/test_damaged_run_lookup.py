"""A run without a readable plan is not taken for an expert, whose newest run would be used instead."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.cli.run_lookup import find_run_or_newest
from launcher.core.errors import InputError
from tests.conftest import ROOT


@pytest.mark.parametrize("is_pipe", [True, False])
def test_a_run_without_plan_is_refused(tmp_path: Path, is_pipe: bool) -> None:
    run = tmp_path / "damaged"
    run.mkdir()
    (run / "manifest.json").write_bytes((ROOT / "experts" / "json" / "manifest.json").read_bytes())
    (run / "request.json").write_text("{}")
    if is_pipe:
        os.mkfifo(run / "plan.json")
    with pytest.raises(InputError, match="is not a run directory"):
        find_run_or_newest(str(run), tmp_path)
