"""`launcher doctor --free` asks compute processes to end, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launcher.analysis.doctor.free_memory import end_processes, find_holders
from launcher.analysis.doctor.gpu_checks import probe_gpus
from launcher.cli.doctor import _free_memory
from launcher.core.errors import ExitCode, InputError
from launcher.core.units import GIB
from tests.fake_nvml import FakeGpu, install_nvml

pytestmark = pytest.mark.process

SLEEP = "import time; print('ready', flush=True); time.sleep(600)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"


def start(code: str = SLEEP, **environment: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    process = start()
    yield process
    process.kill()
    process.wait()


def test_only_compute_processes_are_asked(child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    desktop = start()
    try:
        held: dict[int, int | None] = {child.pid: 4 * GIB, desktop.pid: GIB, 999999991: None, os.getppid(): GIB}
        gpu = FakeGpu(used_mib=9000, processes=held, graphics={desktop.pid: GIB})
        install_nvml(monkeypatch, gpu, gpu)
        holders, others = find_holders(probe_gpus())
        assert [process.pid for process in holders] == [child.pid]
        reasons = {text.rpartition(": ")[2] for text in others}
        assert reasons == {
            "draws the desktop",
            "started this command",
            "not visible here; look on the host, outside the container",
        }
        assert end_processes(holders) == []
        assert not psutil.pid_exists(child.pid)
        assert desktop.poll() is None
    finally:
        desktop.kill()
        desktop.wait()


def test_processes_of_others_are_left_alone(child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, FakeGpu(used_mib=9000, processes={child.pid: GIB}))
    monkeypatch.setattr("os.geteuid", lambda: psutil.Process().uids().real + 1)
    holders, others = find_holders(probe_gpus())
    assert holders == {}
    assert ": belongs to " in others[0]


def test_command_reports_processes_that_stay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deaf, run = start(DEAF), start(LAUNCHER_PID="1")
    try:
        install_nvml(monkeypatch, FakeGpu(used_mib=9000, processes={deaf.pid: GIB, run.pid: GIB}))
        monkeypatch.setattr("launcher.analysis.doctor.free_memory.end_processes.__defaults__", (0.5,))
        assert _free_memory(ask=False) == ExitCode.DOCTOR_FOUND_SOMETHING
        shown = capsys.readouterr().out
        assert "; a training run, which saves a checkpoint and can be resumed" in shown
        assert f"end it with kill -9 {deaf.pid} if necessary" in shown
        assert deaf.poll() is None
        assert not psutil.pid_exists(run.pid)
    finally:
        for process in (deaf, run):
            process.kill()
            process.wait()


def test_nothing_ends_without_an_answer(
    child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_nvml(monkeypatch, FakeGpu(used_mib=9000, processes={child.pid: GIB}))
    (tmp_path / "input").write_text("")
    with (tmp_path / "input").open() as empty:
        monkeypatch.setattr("sys.stdin", empty)
        with pytest.raises(InputError, match="no terminal to prompt on"):
            _free_memory(ask=True)
    assert child.poll() is None


def test_free_gpu_has_nothing_to_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install_nvml(monkeypatch)
    assert _free_memory(ask=False) == ExitCode.DONE
    assert capsys.readouterr().out == "No process of yours holds GPU memory.\n"


def test_machine_without_a_driver_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, failure="Driver Not Loaded")
    with pytest.raises(InputError, match=r"--free cannot find the processes that use GPU memory: .*Driver Not Loaded"):
        _free_memory(ask=False)
