"""Runs are found by id, path or expert; errors say where was searched."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cli.run_lookup import find_run
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
