"""Measuring processes: controlled over a pipe, killed after their time limit, never left running."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from launcher.bench.worker import (
    MeasurementFailedError,
    MeasurementProcess,
    MeasurementTimeoutError,
)
from launcher.core.errors import ExitCode
from launcher.core.frozen_model import Frozen
from launcher.core.processes import is_alive

pytestmark = pytest.mark.process

MODULE = "tests.unit.bench.echo_worker"
LIMIT_SECONDS = 60.0


class Spec(Frozen):
    number: int


def start(folder: Path) -> MeasurementProcess:
    return MeasurementProcess(MODULE, Spec(number=7), folder, "variant-1")


def test_each_line_gets_a_reply_and_the_process_exits_at_the_end(tmp_path: Path) -> None:
    with start(tmp_path) as process:
        for word in ("a", "b"):
            process.send(word)
            assert process.read(LIMIT_SECONDS) == f'{word} {{"number":7}}'
        pid = process.pid
    assert not is_alive(pid)


def test_failure_has_the_workers_message_and_exit_code(tmp_path: Path) -> None:
    with start(tmp_path) as process:
        process.send("fail")
        with pytest.raises(MeasurementFailedError, match="exited with code 3") as caught:
            process.read(LIMIT_SECONDS)
    assert caught.value.exit_code == ExitCode.DOES_NOT_FIT
    assert [problem.what for problem in caught.value.problems] == ["error: out of memory: 3 GiB more", "hint: none"]
    assert caught.value.reason == "out of memory: 3 GiB more"


def test_timeout_kills_the_process(tmp_path: Path) -> None:
    with start(tmp_path) as process:
        process.send("sleep")
        began = time.monotonic()
        with pytest.raises(MeasurementTimeoutError, match="timed out after 1 s"):
            process.read(1.0)
        assert time.monotonic() - began < LIMIT_SECONDS
        assert not is_alive(process.pid)
