"""outcome.json is read back, also that of version 0.1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.core.errors import InputError
from launcher.core.run_paths import RunPaths
from launcher.runs.record import Outcome, load_outcome, load_record, write_outcome
from launcher.runs.wandb_settings import make_summary
from tests.made_runs import MadeRun, write_run

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


@pytest.mark.parametrize("content", [b"", b"{", b"\xff"])
@pytest.mark.parametrize("name", ["outcome.json", "plan.json"])
def test_run_with_damaged_record_was_not_never_started(tmp_path: Path, name: str, content: bytes) -> None:
    paths = write_run(tmp_path, MadeRun(run_id="a", num_steps=2))
    (paths.root / name).write_bytes(content)
    with pytest.raises(InputError, match=name) as raised:
        load_record(paths)
    assert raised.value.hint == "it was edited or damaged, or another version wrote it"


def test_metrics_that_are_no_file_are_an_error(tmp_path: Path) -> None:
    paths = write_run(tmp_path, MadeRun(run_id="a", num_steps=2))
    paths.metrics.unlink()
    paths.metrics.mkdir()
    with pytest.raises(InputError, match=r"metrics\.jsonl: cannot be read: not a regular file"):
        load_record(paths)


def summarize(paths: RunPaths) -> dict[str, object]:
    outcome = load_outcome(paths.outcome)
    assert outcome is not None
    return make_summary(paths, outcome.model_copy(update={"status": "crashed", "steps_done": 0}))


def test_summary_of_killed_run_counts_its_steps(tmp_path: Path) -> None:
    paths = write_run(tmp_path, MadeRun(run_id="a", num_steps=3, oom_fallbacks=("micro-batch 2",)))
    summary = summarize(paths)
    assert summary["steps_done"] == 3
    assert summary["oom_fallbacks"] == 1
    paths.metrics.write_text("damaged\n")
    assert summarize(paths)["status"] == "crashed"
