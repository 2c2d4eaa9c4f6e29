"""Judges' Python processes find the packages of this process, and say why they do not start."""

from __future__ import annotations

from pathlib import Path

import pytest

import launcher
from launcher.core.errors import RunFailedError
from launcher.judges.worker import make_python_worker

_ECHO = "import only_here; print('ready', flush=True); print(only_here.NAME + sys.stdin.readline(), flush=True)"


def test_packages_of_this_process_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("NAME = 'found '\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    worker = make_python_worker(_ECHO, seconds=20, memory_mib=256)
    try:
        assert worker.request("it").strip() == "found it"
    finally:
        worker.close()


def test_modules_of_the_working_directory_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("NAME = 'planted '\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path.cwd()))  # as `python -m launcher` does
    worker = make_python_worker(_ECHO, seconds=20, memory_mib=256)
    with pytest.raises(RunFailedError, match="No module named 'only_here'"):
        worker.request("it")


def test_a_package_cannot_replace_the_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "colorsys.py").write_text("raise SystemExit('planted')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "import colorsys; print('ready', flush=True); sys.stdin.readline(); print(colorsys.__file__, flush=True)"
    worker = make_python_worker(code, seconds=20, memory_mib=256)
    try:
        assert str(tmp_path) not in worker.request("where")
    finally:
        worker.close()


def test_the_launcher_of_this_process_is_imported() -> None:
    """Another one may be installed, for example if this one is a second checkout."""
    code = "import launcher; print('ready', flush=True); sys.stdin.readline(); print(launcher.__file__, flush=True)"
    worker = make_python_worker(code, seconds=20, memory_mib=256)
    try:
        assert worker.request("where").strip() == launcher.__file__
    finally:
        worker.close()
