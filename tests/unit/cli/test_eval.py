"""`launcher eval` before and behind the asking: whose run it is, and which evaluation stays."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from launcher.cli.eval import _find_subject, _keep
from launcher.errors import InputError
from launcher.paths import RunPaths
from launcher.quality.results import load_result
from tests.conftest import ROOT
from tests.made_evaluations import make_evaluation
from tests.made_runs import MadeRun, write_run


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return write_run(tmp_path, MadeRun(run_id="first"))


def ask(runs_dir: Path, expert: str | None = None, run: str | None = None) -> RunPaths | None:
    return _find_subject(
        argparse.Namespace(expert=expert, run=run, adapter=None, base=False, runs_dir=str(runs_dir), output=None)
    )


@pytest.mark.parametrize("expert", ["neo4j", str(ROOT / "experts/neo4j"), str(ROOT / "experts/neo4j/manifest.json")])
def test_an_expert_is_the_same_by_name_folder_and_file(paths: RunPaths, tmp_path: Path, expert: str) -> None:
    assert ask(tmp_path, expert) == paths


def test_a_run_of_another_expert_is_refused(paths: RunPaths, tmp_path: Path) -> None:
    assert ask(tmp_path, run="first") == paths
    assert ask(tmp_path, "neo4j", "first") == paths
    with pytest.raises(InputError, match="first is a run of neo4j, not of sql"):
        ask(tmp_path, "sql", "first")
    with pytest.raises(InputError, match="no run of sql in"):
        ask(tmp_path, "sql")


def test_a_quick_look_does_not_replace_what_a_gate_compares_with(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = argparse.Namespace(output=None)
    large = make_evaluation({"parses": 0.9, "matches": 0.8})
    small = large.model_copy(update={"answers": large.answers[:2]})
    _keep(small, nothing, paths)
    assert len(load_result(paths.evaluation).answers) == 2
    _keep(large, nothing, paths)
    _keep(small, nothing, paths)
    assert len(load_result(paths.evaluation).answers) == len(large.answers)
    assert "stays: it has" in capsys.readouterr().err
