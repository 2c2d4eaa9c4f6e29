"""Run directories: sanitised names, nothing clobbered, files whole or not there."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from launcher.core.errors import InputError
from launcher.core.run_paths import (
    RunPaths,
    create_next_run,
    create_run,
    get_cache_folder,
    make_run_id,
    make_run_paths,
    write_files,
    write_text_atomically,
)
from launcher.hardware.user_overrides import HARDWARE_VARIABLE, find_hardware_file
from launcher.manifest.trust import get_trust_file


def test_run_ids_sort_by_time_and_are_valid_file_names() -> None:
    when = datetime(2026, 11, 15, 14, 25, 30)
    assert make_run_id("neo4j", "4xrtx4090", when) == "neo4j-20261115-142530-4xrtx4090"
    assert make_run_id("../../x y", "a/b", when) == "x-y-20261115-142530-a-b"
    assert make_run_id("...", "", when) == "x-20261115-142530-x"
    longest = make_run_id("e" * 200, "h" * 200, when)
    assert len(longest) == 93
    assert longest.startswith("e" * 38 + "-20261115")


@pytest.mark.parametrize("run_id", ["../x", "a/b", "", "a\n", ".hidden", "x" * 101, "a b", "-x", "a;b", "$(x)"])
def test_odd_run_ids_are_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(InputError, match="a run id has 1 to 100 letters"):
        make_run_paths(tmp_path, run_id)


def test_existing_run_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/plan.json").write_text("precious")
    with pytest.raises(InputError, match="already exists") as caught:
        create_run(RunPaths(tmp_path / "a"))
    assert "--resume a instead of --run-id continues it" in caught.value.hint
    assert "choose another --run-id" in caught.value.hint
    assert (tmp_path / "a/plan.json").read_text() == "precious"


def test_runs_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(InputError, match="cannot be created") as caught:
        create_run(RunPaths(tmp_path / "runs/a"))
    assert "--runs-dir" in caught.value.hint


def test_write_replaces_the_file_atomically(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.txt": "one", "b.txt": "zwei\n"})
    write_text_atomically(tmp_path / "a.txt", "two")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"a.txt": "two", "b.txt": "zwei\n"}


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    target.mkdir()  # cannot be replaced by a file
    with pytest.raises(InputError, match="cannot be written"):
        write_text_atomically(target, "new")
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_new_run_has_a_logs_folder(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "runs/neo4j-1")
    create_run(paths)
    assert paths.run_id == "neo4j-1"
    assert list(paths.root.iterdir()) == [paths.logs]


def test_unprintable_runs_dir_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not allowed in job scripts"):
        make_run_paths(tmp_path / "new\nline", "a")


def test_taken_run_id_gets_a_number(tmp_path: Path) -> None:
    assert [create_next_run(tmp_path, "a").run_id for _ in range(3)] == ["a", "a-2", "a-3"]


def test_unusable_runs_dir_fails_at_once(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match="cannot be created"):
        create_next_run(tmp_path / "runs", "a")


def test_user_without_home_folder_uses_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs with an arbitrary user id: no HOME, and no entry in /etc/passwd."""
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "LAUNCHER_CACHE_DIR", HARDWARE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert get_cache_folder() == Path("/.cache/expert-launcher")
    assert find_hardware_file() == Path("/.config/expert-launcher/hardware.json")
    assert get_trust_file() == Path("/.config/expert-launcher/trust")
