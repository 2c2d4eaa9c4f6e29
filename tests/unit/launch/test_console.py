"""The console filter: ordinary text passes unchanged; an agent's traceback is held, however it is split."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import pytest

from launcher.launch.console import Console, Gate, Relay
from tests.unit.standins import wait_until

TRACEBACK = b'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: no\n'
AGENT = b"E1115 04:38:41.418000 28945 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 5)\n"
WARNING = b"W1115 04:38:41.418000 28945 torch/distributed/elastic/multiprocessing/api.py:900] Sending SIGTERM\n"


@pytest.mark.parametrize("noise", [TRACEBACK, AGENT, WARNING])
@pytest.mark.parametrize(
    "prefix", [b"", b"[rank0]:", b"[rank0]: ", b"[default0]:", b"[default12]:[rank3]: ", b"\x1b[K"]
)
@pytest.mark.parametrize("before", [b"", b"error: mine\n", b"\r 50% done\r", b"\n"])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_noise_is_held_from_its_first_byte(noise: bytes, prefix: bytes, before: bytes, size: int) -> None:
    gate = Gate()
    data = before + prefix + noise + b"later\n"
    shown = b"".join(gate.feed(data[at : at + size]) for at in range(0, len(data), size))
    assert shown == before
    assert gate.release() == prefix + noise + b"later\n"


@pytest.mark.parametrize(
    "text",
    [
        b"the word Traceback (most recent call last): within a line\n",
        b"Traceback of nothing\n",
        b"E1115 04:38:41.418000 28945 torch/nn/modules.py:12] ours\n",
        b"Epoch 1\n",
        b"[note] T\n",
        b"[rank0]: loss 1.0\n",
        "bar ███\r 50%\x1b[31m red \x1b[0m\n".encode(),
        b"\xff\xfe\x00 not text\n",
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_other_text_passes_unchanged(text: bytes, size: int) -> None:
    gate = Gate()
    shown = b"".join(gate.feed(text[at : at + size]) for at in range(0, len(text), size))
    assert shown == text
    assert gate.held_seconds == 0


def test_start_of_a_line_is_shown_by_flush() -> None:
    gate = Gate()
    assert (gate.feed(b"loss 1.0"), gate.has_partial) == (b"", True)
    assert gate.feed(b"\rTra") == b"loss 1.0\r"
    assert gate.flush() == b"Tra"
    assert gate.feed(TRACEBACK[3:]) == TRACEBACK[3:], "the start of this line has been shown already"


def test_released_gate_holds_the_next_traceback() -> None:
    gate = Gate()
    gate.feed(TRACEBACK)
    time.sleep(0.01)
    assert gate.held_seconds >= 0.01
    assert gate.release() == TRACEBACK
    assert gate.held_seconds == 0
    assert gate.feed(b"step 2\n") == b"step 2\n"
    assert gate.feed(TRACEBACK) == b""


class Broken(io.BytesIO):
    def write(self, _: object) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_partial_line_is_shown_after_a_delay(tmp_path: Path) -> None:
    shown = io.BytesIO()
    relay = Relay(Console(stdout=io.BytesIO(), stderr=shown), tmp_path / "log")
    out_reader, out_writer = os.pipe()
    error_reader, error_writer = os.pipe()
    with open(out_reader, "rb") as out, open(error_reader, "rb") as error:  # noqa: PTH123
        relay.start(out, error)
        os.write(error_writer, b"T")
        wait_until(lambda: shown.getvalue() == b"T", seconds=5)
        os.close(error_writer)
        os.close(out_writer)
        relay.finish(5)
    relay.close()
    assert (tmp_path / "log").read_bytes() == b"T"


def test_lines_of_two_streams_are_not_mixed_in_the_log(tmp_path: Path) -> None:
    shown, log, total = io.BytesIO(), tmp_path / "log", 0
    relay = Relay(Console(stdout=shown, stderr=shown), log)
    out_reader, out_writer = os.pipe()
    error_reader, error_writer = os.pipe()
    with open(out_reader, "rb") as out, open(error_reader, "rb") as error:  # noqa: PTH123
        relay.start(out, error)
        for writer, piece, known in (
            (out_writer, b"one line", b""),
            (error_writer, b"another\nbar\rand", b"another\nbar\r"),
            (out_writer, b"\n", b"another\nbar\rone line\n"),
        ):
            os.write(writer, piece)
            total += len(piece)
            wait_until(lambda: len(shown.getvalue()) == total, seconds=5)  # noqa: B023
            assert log.read_bytes() == known
        wait_until(lambda: log.read_bytes().endswith(b"and"), seconds=10)  # the end of this line never comes
        os.close(error_writer)
        os.close(out_writer)
        relay.finish(5)
    relay.close()
    assert log.read_bytes() == b"another\nbar\rone line\nand"


def test_closed_console_does_not_stop_the_relay(tmp_path: Path) -> None:
    relay = Relay(Console(stdout=Broken(), stderr=Broken()), tmp_path / "log")
    out_reader, out_writer = os.pipe()
    error_reader, error_writer = os.pipe()
    with open(out_reader, "rb") as out, open(error_reader, "rb") as error:  # noqa: PTH123
        relay.start(out, error)
        for _ in range(3):
            os.write(out_writer, b"o" * 60_000)
            os.write(error_writer, b"e" * 60_000)
        os.close(error_writer)
        os.close(out_writer)
        relay.finish(5)
    relay.close()
    assert len((tmp_path / "log").read_bytes()) == 360_000


def test_unwritable_log_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a full disk; open_log itself refuses devices.
    monkeypatch.setattr("launcher.launch.console.open_log", lambda path: path.open("ab", buffering=0))
    shown = io.BytesIO()
    relay = Relay(Console(stdout=io.BytesIO(), stderr=shown), Path("/dev/full"))
    relay.log("hello")
    relay.finish(1)
    relay.close()
    assert shown.getvalue() == b"hello\nwarning: /dev/full is incomplete: No space left on device\n"


def test_tail_includes_held_output(tmp_path: Path) -> None:
    shown = io.BytesIO()
    relay = Relay(Console(stdout=io.BytesIO(), stderr=shown), tmp_path / "log")
    out_reader, out_writer = os.pipe()
    error_reader, error_writer = os.pipe()
    with open(out_reader, "rb") as out, open(error_reader, "rb") as error:  # noqa: PTH123
        relay.start(out, error)
        os.write(error_writer, b"mine\n" + TRACEBACK)
        os.close(error_writer)
        os.close(out_writer)
        relay.finish(5)
    assert shown.getvalue() == b"mine\n"
    assert relay.tail.endswith("ValueError: no\n")
    relay.release()
    relay.close()
    assert shown.getvalue() == b"mine\n" + TRACEBACK
