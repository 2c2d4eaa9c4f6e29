"""Two never train the same run: the second waits a moment, and is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launcher.core import file_lock as locking
from launcher.core.errors import InputError
from launcher.core.file_lock import check_unlocked, is_locked
from launcher.core.run_paths import RunPaths
from tests.conftest import ROOT, python_path

pytestmark = pytest.mark.process

HOLD = """
import sys
from pathlib import Path
from launcher.core.file_lock import lock_run
from launcher.core.run_paths import RunPaths
lock_run(RunPaths(Path(sys.argv[1])))
print("held", flush=True)
sys.stdin.read()
"""


def test_run_in_training_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "_WAIT_SECONDS", 0.5)
    assert is_locked(RunPaths(tmp_path / "never").lock) is False
    check_unlocked(RunPaths(tmp_path))
    assert is_locked(RunPaths(tmp_path).lock) is False
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, env={"PYTHONPATH": python_path()}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(InputError, match="another process is training this run"):
            check_unlocked(RunPaths(tmp_path))
        assert is_locked(RunPaths(tmp_path).lock) is True
        holder.kill()
    assert is_locked(RunPaths(tmp_path).lock) is False
    check_unlocked(RunPaths(tmp_path))


def test_unwritable_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()  # as good as no rights, and root too meets it
    with pytest.raises(InputError, match="this run cannot be written to: Is a directory") as caught:
        check_unlocked(RunPaths(tmp_path))
    assert "owner and permissions" in caught.value.hint
