"""Files and folders that a user names for output, checked before any work is done for them."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from launcher.core.errors import InputError, hint_for
from launcher.core.run_paths import find_run_entry

_REPLACEABLE = {"eval.json", "eval-partial.json", "report.md"}  # what commands write into a run directory themselves


def check_output_file(text: str, flag: str) -> Path:
    """Return the file that a flag names, or the target of a link; raise InputError if it cannot be written.

    Writing replaces the file by a rename, which would also replace a device or a pipe: those are refused.
    """
    path = _parse(text, flag, "./- is a file called -; without a file, the result is printed")
    if text.endswith("/") or os.path.isdir(path):  # noqa: PTH112  (unlike is_dir, never raises)
        raise _make_error(flag, text, "it is a folder", f"name a file in it: {path / 'FILE'}")
    try:
        kind = Path(text).stat()  # not of `path`: /dev/stdout may lead to a file without a name
    except OSError as error:  # mostly because there is none yet, which the parent's check accepts
        if _is_link(path):  # a loop
            raise _make_error(flag, text, f"{path} is a link that cannot be followed", "") from error
    else:
        if not stat.S_ISREG(kind.st_mode):
            raise _make_error(flag, text, "it is a device, a pipe or a socket, and not a regular file", "")
        if _is_own_output(kind):
            raise _make_error(flag, text, "this command prints to it", "")
        if _is_run_record(path):
            raise _make_error(flag, text, "it is a record of a run, which would be lost", "")
        if not os.access(path, os.W_OK):
            raise _make_error(flag, text, "it is write-protected", f"allow it with chmod u+w, or pass another {flag}")
    _check_folder(path.parent, flag, text, path.name)
    return path


def check_output_folder(text: str, flag: str) -> Path:
    """Return the folder that a flag names, which need not exist yet; raise InputError if no file can be written there.

    Nothing is created. A new folder must be possible in the nearest folder above it that exists.
    """
    path = _parse(text, flag, "./- is a folder called -")
    existing = path
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    _check_folder(existing, flag, text, "new")
    return path


def _parse(text: str, flag: str, hint_for_dash: str) -> Path:
    """Return the path, with links followed if it is one; refuse the empty text of an unset variable, and a dash."""
    if not text.strip():
        raise InputError(f"{flag}: the path is empty", hint=f"give a path, or omit {flag}")
    if text == "-":
        raise InputError(f"{flag} -: stdout is not supported here", hint=hint_for_dash)
    return Path(os.path.realpath(text) if _is_link(text) else text)


def _is_link(path: str | Path) -> bool:
    return os.path.islink(path)  # noqa: PTH114  (unlike is_symlink, never raises)


def _is_run_record(path: Path) -> bool:
    entry = find_run_entry(path)
    return entry is not None and entry not in _REPLACEABLE


def _is_own_output(kind: os.stat_result) -> bool:
    """Return whether a file is this process's stdout or stderr, as /dev/stdout is: a rename would cut it off."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(kind, os.fstat(descriptor)):
                return True
    return False


def _check_folder(folder: Path, flag: str, text: str, name: str) -> None:
    """Raise InputError unless a file can be created in the folder: permissions alone do not tell, least of all root."""
    if not os.path.lexists(folder):
        raise _make_error(flag, text, f"the folder {folder} does not exist", f"create it, or pass another {flag}")
    if not os.path.isdir(folder):  # noqa: PTH112  (unlike is_dir, never raises)
        raise _make_error(flag, text, f"{folder} is not a folder", "")
    trial = folder / f".{name}.{os.getpid()}.tmp"
    try:
        trial.unlink(missing_ok=True)
        trial.open("xb").close()
        trial.unlink()
    except OSError as error:
        raise _make_error(flag, text, f"cannot write to {folder}: {error.strerror}", hint_for(error, flag)) from None


def _make_error(flag: str, text: str, problem: str, hint: str) -> InputError:
    return InputError(f"{flag} {text}: {problem}", hint=hint or f"pass another {flag}")
