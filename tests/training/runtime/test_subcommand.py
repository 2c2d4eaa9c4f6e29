"""A subcommand that is stopped by a signal removes its temporary files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import python_path

# Stands for `launcher export`: its parent starts it with run_module, and it writes into a temporary folder.
MODULE = """
import pathlib, shutil, sys, time
from launcher.training.runtime.subcommand import run_subcommand

def write():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir()
    try:
        time.sleep(60)
    finally:
        shutil.rmtree(folder)
    return ""

sys.exit(run_subcommand("export", write))
"""
PARENT = """
import sys
from launcher.cli.torch_subcommands import run_module

sys.exit(run_module("stands_for_export", sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signal_to_the_launcher_removes_the_files_of_its_subcommand(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "stands_for_export.py").write_text(MODULE)
    environment = {**os.environ, "PYTHONPATH": f"{python_path()}{os.pathsep}{tmp_path}"}
    folder = tmp_path / "out"
    command = [sys.executable, "-c", PARENT, str(folder)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, start_new_session=True) as process:
        deadline = time.monotonic() + 60
        while not folder.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if number == signal.SIGINT:  # as a terminal does
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        assert process.wait(30) == 130
        assert process.stderr is not None
        assert process.stderr.read() == b"interrupted\n"
    assert not folder.exists()
