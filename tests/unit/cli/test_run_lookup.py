"""Runs are found by id, path or expert; errors say where was searched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.cli.main import main
from launcher.cli.run_lookup import find_run, find_run_or_newest
from launcher.core.errors import InputError
from tests.made_runs import MadeRun, write_run


def test_error_says_where_was_searched_and_how_to_find_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no run called 'first'") as caught:
        find_run("first", Path("runs"))
    assert caught.value.hint.startswith(f"{tmp_path}/runs has no runs; ")
    assert caught.value.hint.endswith("give its path, such as ../project/runs/RUN, or --runs-dir")
    paths = write_run(tmp_path / "runs", MadeRun(run_id="first"))
    with pytest.raises(InputError, match="no run called 'second'") as caught:
        find_run("second", Path("runs"))
    assert caught.value.hint.startswith(f"above: the newest runs in {tmp_path}/runs; to find a run that was started in")
    assert find_run("runs/first", Path("elsewhere")).root.samefile(paths.root)


def test_run_around_the_working_directory_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_run(tmp_path / "runs", MadeRun(run_id="first"))
    for folder, name in ((paths.root, "."), (paths.logs, "..")):
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        assert find_run(name, Path("runs")).run_id == "first"


def test_expert_stands_for_its_newest_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = Path("runs")
    first = write_run(runs, MadeRun(run_id="first"))
    stopped = write_run(runs, MadeRun(run_id="stopped", status="stopped"))
    os.utime(first.plan, (1, 1))
    assert find_run_or_newest("neo4j", runs) == first
    assert capsys.readouterr().err == "using runs/first, the newest finished run of neo4j\n"
    assert find_run_or_newest("stopped", runs) == stopped
    assert capsys.readouterr().err == ""
    with pytest.raises(InputError, match=f"no finished run of sql in {tmp_path}/runs"):
        find_run_or_newest("sql", runs)
    with pytest.raises(InputError, match="no run called 'other'"):
        find_run_or_newest("other", runs)
    assert main(["report", "neo4j"]) == 0
    assert capsys.readouterr().out.startswith("# neo4j, run `first`")
    with pytest.raises(InputError, match="'neo4j' is an expert: name one of its runs") as caught:
        find_run("neo4j", runs)
    assert [problem.where for problem in caught.value.problems] == ["stopped", "first"]


def test_name_of_a_run_is_not_taken_for_an_expert(tmp_path: Path) -> None:
    write_run(tmp_path, MadeRun(run_id="first"))
    named = write_run(tmp_path, MadeRun(run_id="neo4j", status="stopped"))
    assert find_run_or_newest("neo4j", tmp_path) == named


def test_folder_in_a_run_and_folder_of_runs_are_recognized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = write_run(tmp_path / "my runs", MadeRun(run_id="first"))
    adapter = paths.root / "adapter"
    adapter.mkdir(exist_ok=True)
    with pytest.raises(InputError, match="is a folder in a run directory") as caught:
        find_run("my runs/first/adapter", Path("runs"))
    assert caught.value.hint == "name the run: 'my runs/first'"
    with pytest.raises(InputError, match="is a folder with run directories") as caught:
        find_run("my runs", Path("runs"))
    assert [problem.where for problem in caught.value.problems] == ["my runs/first"]
    assert caught.value.hint == "name one of its runs, or add --runs-dir 'my runs' and a run's name"


@pytest.mark.parametrize("verb", ["eval", "doctor", "plan", "train"])
def test_run_in_the_place_of_an_expert_is_answered_with_its_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], verb: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs"), MadeRun(run_id="first"))
    assert main([verb, "first"]) == 2
    error = capfd.readouterr().err
    assert error.startswith("error: first is a run, not an expert\n")
    assert "launcher eval --run first, launcher doctor --run first" in error
