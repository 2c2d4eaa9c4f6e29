"""Hints for files that cannot be read or written."""

from __future__ import annotations

import errno
import os

import pytest

from launcher.core.errors import InputError, Problem, hint_for


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.EACCES, "no permission"),
        (errno.EROFS, "read-only"),
        (errno.ENOTDIR, "not a folder"),
        (errno.ENOSPC, "the disk is full"),
        (errno.EIO, ""),
    ],
)
def test_hint_names_the_cause(number: int, hint: str) -> None:
    assert hint in hint_for(OSError(number, os.strerror(number)))
    assert hint in hint_for(RuntimeError(f"Error while serializing: I/O error (os error {number})"))
    assert bool(hint) == bool(hint_for(OSError(number, "")))
    assert "disk" not in hint_for(OSError(errno.EACCES, "Permission denied"))
    assert bool(hint) == hint_for(OSError(number, ""), "--runs-dir").endswith("choose another folder with --runs-dir")


def test_own_errors_keep_their_hint() -> None:
    assert hint_for(InputError("x", hint="do this")) == "do this"


def test_many_problems_are_cut() -> None:
    problems = tuple(Problem(where="key", what=f"wrong {number}") for number in range(200_000))
    lines = str(InputError("wrong", problems)).splitlines()
    assert len(lines) == 52
    assert lines[-1] == "  199,950 more"
