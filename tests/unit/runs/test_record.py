"""outcome.json is read back, also that of version 0.1."""

from __future__ import annotations

import json
from pathlib import Path

from launcher.runs.record import Outcome, load_outcome, write_outcome

OUTCOME = Outcome(run_id="a", status="done", exit_code=0, started_at="2026-11-16T12:00:00+00:00", pid=1)


def test_outcome_is_read_back(tmp_path: Path) -> None:
    outcome = OUTCOME.model_copy(update={"oom_fallbacks": ("micro-batch 2",)})
    write_outcome(tmp_path / "outcome.json", outcome)
    assert load_outcome(tmp_path / "outcome.json") == outcome


def test_outcome_of_version_0_1_keeps_its_fallbacks(tmp_path: Path) -> None:
    tree = OUTCOME.model_dump(mode="json")
    del tree["oom_fallbacks"]
    (tmp_path / "outcome.json").write_text(json.dumps({**tree, "rungs": ["micro-batch 2"]}))
    outcome = load_outcome(tmp_path / "outcome.json")
    assert outcome is not None
    assert outcome.oom_fallbacks == ("micro-batch 2",)


def test_damaged_outcome_is_no_outcome(tmp_path: Path) -> None:
    (tmp_path / "outcome.json").write_text("{")
    assert load_outcome(tmp_path / "outcome.json") is None
