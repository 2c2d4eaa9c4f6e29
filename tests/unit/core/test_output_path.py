"""Output paths that cannot be written are refused before any work, and no device is replaced by a file."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from launcher.core.errors import InputError
from launcher.core.output_path import check_output_file, check_output_folder
from launcher.core.run_paths import write_text_atomically


def find_file_problem(text: str) -> str:
    with pytest.raises(InputError) as raised:
        check_output_file(text, "--output")
    assert raised.value.hint
    assert raised.value.title.startswith("--output")
    return raised.value.title


def list_names(folder: str = ".") -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["new.json", "./new.json", "old.json", "with space.json", "folder/new.json"])
def test_new_and_existing_files_are_accepted_and_unchanged(place: Path, name: str) -> None:
    (place / "folder").mkdir()
    (place / "old.json").write_text("old")
    assert check_output_file(name, "--output") == Path(name)
    assert list_names() == ["folder", "old.json"]
    assert list_names("folder") == []
    assert (place / "old.json").read_text() == "old"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "--output: the path is empty"),
        (" ", "--output: the path is empty"),
        ("-", "--output -: stdout is not supported here"),
        ("folder", "--output folder: it is a folder"),
        ("new/", "--output new/: it is a folder"),
        (".", "--output .: it is a folder"),
        ("missing/a.json", "--output missing/a.json: the folder missing does not exist"),
        ("file/a.json", "--output file/a.json: file is not a folder"),
        ("pipe", "--output pipe: it is a device, a pipe or a socket"),
        ("socket", "--output socket: it is a device, a pipe or a socket"),
        ("to-pipe", "--output to-pipe: it is a device, a pipe or a socket"),
        ("/dev/null", "--output /dev/null: it is a device, a pipe or a socket"),
        ("loop", "is a link that cannot be followed"),
        ("/proc/a.json", "cannot write to /proc"),
        ("x" * 300, "cannot write to .: File name too long"),
    ],
)
def test_path_that_cannot_be_written_is_refused(place: Path, text: str, problem: str) -> None:
    (place / "folder").mkdir()
    (place / "file").touch()
    os.mkfifo("pipe")
    (place / "to-pipe").symlink_to("pipe")
    (place / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind("socket")
        assert problem in find_file_problem(text)


@pytest.mark.parametrize("name", ["plan.json", "metrics.jsonl", "adapter/adapter_config.json", "link.json"])
def test_records_of_a_run_are_not_replaced(place: Path, name: str) -> None:
    (place / "run/adapter").mkdir(parents=True)
    records = "plan.json", "request.json", "metrics.jsonl", "adapter/adapter_config.json", "eval.json", "mine.json"
    for record in records:
        (place / "run" / record).write_text("{}")
    (place / "run/link.json").symlink_to("outcome.json")
    (place / "run/outcome.json").touch()
    assert "it is a record of a run" in find_file_problem(f"run/{name}")
    for free in ("eval.json", "mine.json", "new.json"):
        assert check_output_file(f"run/{free}", "--output") == Path(f"run/{free}")
    (place / "run/request.json").unlink()
    assert check_output_file("run/plan.json", "--output") == Path("run/plan.json")  # not a run's


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a device")
def test_device_that_root_may_write_is_refused(tmp_path: Path) -> None:
    try:
        os.mknod(tmp_path / "device", 0o20666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("this container may not make devices")
    assert "it is a device" in find_file_problem(str(tmp_path / "device"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_write_protected_places_are_refused(place: Path) -> None:
    (place / "protected.json").touch(0o444)
    assert "it is write-protected" in find_file_problem("protected.json")
    (place / "folder").mkdir(0o555)
    assert "cannot write to folder: Permission denied" in find_file_problem("folder/a.json")


def test_link_is_kept_and_its_target_written(place: Path) -> None:
    (place / "results").mkdir()
    for target in ("old.json", "results/new.json"):
        link = Path(f"link-to-{Path(target).name}")
        link.symlink_to(target)
        write_text_atomically(check_output_file(str(link), "--output"), "{}")
        assert link.is_symlink()
        assert Path(target).read_text() == "{}"


def test_link_into_a_missing_folder_is_refused(place: Path) -> None:
    Path("link").symlink_to("missing/a.json")
    assert f"the folder {place}/missing does not exist" in find_file_problem("link")


def test_own_stdout_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert "this command prints to it" in find_file_problem("/dev/stdout")
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("text", [".", "old", "new", "new/deep/er", "link", "old/"])
def test_folder_may_be_new(place: Path, text: str) -> None:
    (place / "old").mkdir()
    (place / "link").symlink_to("elsewhere")
    check_output_folder(text, "--out")
    assert list_names() == ["link", "old"]
    assert list_names("old") == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "--out: the path is empty"),
        ("file", "--out file: file is not a folder"),
        ("file/new", "--out file/new: file is not a folder"),
        ("/dev/null", "--out /dev/null: /dev/null is not a folder"),
        ("/proc/new", "--out /proc/new: cannot write to /proc"),
    ],
)
def test_folder_that_cannot_be_written_is_refused(place: Path, text: str, problem: str) -> None:
    (place / "file").touch()
    with pytest.raises(InputError) as raised:
        check_output_folder(text, "--out")
    assert problem in raised.value.title
    assert raised.value.hint
