"""Bounded reading of the files of a run directory, which may be damaged, foreign or hostile.

A file is read only if it is a regular one (a pipe or a device may never end) and not larger than a limit. Numbers that
no run can have are refused here, so that sums, dates and loops over them need no checks of their own.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from launcher.core.errors import InputError
from launcher.core.units import MIB

MAX_JSON_BYTES = 16 * MIB
MAX_RESULT_BYTES = 256 * MIB  # answers of an evaluation
_MAX_LINE_BYTES = 4 * MIB  # of metrics.jsonl
DAMAGED = "it was edited or damaged, or another version wrote it"  # hint of errors
MAX_COUNT = 2**64
MAX_STEPS = 10**9
MAX_VALUE = 1e40  # FP32 ends at 3.4e38

T = TypeVar("T")


_WORD_START = re.compile(r"(?<=[a-z])(?=[A-Z])")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; raises OSError for anything else, such as a pipe, without waiting for it."""
    return os.fdopen(_open(path, os.O_RDONLY), "rb")


def open_log(path: Path) -> BinaryIO:
    """Open or create a regular file for unbuffered appending; raises OSError for a symbolic link, pipe or device."""
    return os.fdopen(_open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW), "ab", buffering=0)


def _open(path: Path, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "not a regular file")
    return descriptor


def check_regular_files(folder: Path) -> None:
    """Refuse a folder with pipes or devices in it, before a library opens them; raises InputError."""
    for file in sorted(folder.iterdir()):
        if not file.is_file() and not file.is_dir():
            raise InputError(f"{file}: not a regular file", hint="it was damaged or replaced; delete it")


def read_text(path: Path, max_bytes: int = MAX_JSON_BYTES) -> str:
    """Read a UTF-8 file of at most `max_bytes`; raises InputError."""
    try:
        with open_regular(path) as file:
            is_small = os.fstat(file.fileno()).st_size <= max_bytes
            content = file.read(max_bytes + 1) if is_small else b""
        if not is_small or len(content) > max_bytes:  # it may have grown
            raise InputError(f"{path}: cannot be read: it is larger than {max_bytes // MIB} MiB")
        return content.decode("utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: cannot be read: it is not UTF-8", hint=DAMAGED) from None


def read_lines(path: Path, max_bytes: int | None) -> Iterator[str]:
    """Yield the complete lines of a UTF-8 file, of at most `max_bytes` if given; raises InputError."""
    try:
        with open_regular(path) as file:
            if max_bytes is not None and os.fstat(file.fileno()).st_size > max_bytes:
                raise InputError(f"{path}: cannot be read: it is larger than {max_bytes // MIB} MiB")
            while (line := file.readline(_MAX_LINE_BYTES)).endswith(b"\n"):
                yield line[:-1].decode("utf-8")
            if len(line) == _MAX_LINE_BYTES:
                raise InputError(
                    f"{path}: cannot be read: a line has more than {_MAX_LINE_BYTES // MIB} MiB", hint=DAMAGED
                )
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: cannot be read: it is not UTF-8", hint=DAMAGED) from None


def load_model(kind: type[T], path: Path) -> T:
    """Read a JSON file as a pydantic model or a dataclass; raises InputError."""
    return parse_model(kind, read_text(path), path)


def load_model_or_none(kind: type[T], path: Path) -> T | None:
    """Read a JSON file as a pydantic model or a dataclass; None if it is missing, unreadable or invalid."""
    try:
        return load_model(kind, path)
    except InputError:
        return None


def parse_model(kind: type[T], text: str, path: Path) -> T:
    """Parse a JSON text as a pydantic model or a dataclass; `path` is for the message of the InputError."""
    invalid = f"{path}: not a valid {_WORD_START.sub(' ', kind.__name__).lower()}"
    try:
        value: T = TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        what = f"{invalid} ({error.error_count()} problems; first: {where}: {first['msg']})"
        raise InputError(what, hint=DAMAGED) from None
    except (ValueError, RecursionError, ArithmeticError):
        raise InputError(invalid, hint=DAMAGED) from None
    for where, number in _walk_numbers(value):
        if not is_plausible(number):
            raise InputError(f"{invalid} ({where} is not a plausible number)", hint=DAMAGED)
    return value


def is_plausible(number: float) -> bool:
    """Whether a number can come from a run: finite, and small enough that sums do not overflow."""
    return abs(number) <= MAX_COUNT if isinstance(number, int) else math.isfinite(number) and abs(number) <= MAX_VALUE


def _walk_numbers(value: Any, where: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, int | float):
        yield where, value
    elif isinstance(value, BaseModel):
        for name, below in value.__dict__.items():
            yield from _walk_numbers(below, f"{where}.{name}" if where else name)
    elif isinstance(value, Mapping):
        for name, below in value.items():
            yield from _walk_numbers(below, f"{where}.{name}" if where else str(name))
    elif isinstance(value, list | tuple):
        for below in value:
            yield from _walk_numbers(below, where)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _walk_numbers(getattr(value, field.name), field.name)
