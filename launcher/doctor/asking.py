"""Questions to the outside, each with a time limit: a program that hangs or a disk that is dead must not hang us."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

_LONGEST_LINE = 160

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a program said; `trouble` is why it did not."""

    text: str = ""
    trouble: str = ""


class NoAnswerError(Exception):
    """Nothing came within the time limit."""


def ask_program(command: Sequence[str], seconds: float) -> Answer:
    """A program that hangs inside the kernel cannot even be killed: then it is left behind."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except FileNotFoundError:
        return Answer(trouble=f"{command[0]} is not installed")
    except OSError as error:
        return Answer(trouble=f"{command[0]} cannot be started: {error.strerror}")
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return Answer(trouble=f"{command[0]} did not answer within {seconds:g} s")
    said = out.decode("utf-8", "replace")
    if process.returncode:
        words = first_line(said) or first_line(err.decode("utf-8", "replace"))
        return Answer(trouble=words or f"{command[0]} ended with code {process.returncode}")
    return Answer(text=said)


def first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:_LONGEST_LINE] if lines else ""


class _Box(Generic[Value]):
    value: Value
    error: Exception | None = None


def in_time(action: Callable[[], Value], seconds: float) -> Value:
    """`action` in a thread of its own, left behind where it takes too long: a system call cannot be stopped."""
    box: _Box[Value] = _Box()

    def act() -> None:
        try:
            box.value = action()
        except Exception as error:
            box.error = error

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise NoAnswerError(f"no answer within {seconds:g} s")
    if box.error is not None:
        raise box.error
    return box.value
