"""Hints for files of rows that cannot be read as they are."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


def hint_encoding(path: Path) -> str:
    """Return how to convert a file to UTF-8, guessing its encoding from the first bytes."""
    with path.open("rb") as file:
        head = file.read(100)
    zeros, quarter = (head[::2].count(0), head[1::2].count(0)), len(head) // 4
    is_utf16 = head.startswith(UTF16_BOMS) or max(zeros) > quarter
    if not is_utf16 and any(byte < 32 and byte not in b"\t\r\n" for byte in head):
        return "it is a binary file: is it the right one?"
    name = "WINDOWS-1252" if not is_utf16 else "UTF-32" if min(zeros) > quarter // 2 else "UTF-16"
    if is_utf16 and not head.startswith(UTF16_BOMS):
        name += "LE" if zeros[0] < zeros[1] else "BE"
    guess = "" if is_utf16 else ", if it is from Windows or Excel (Latin-1 is the same for letters)"
    source = shlex.quote(str(path))
    target = shlex.quote(str(path.with_stem(f"{path.stem}_utf8")))
    return f"save the file as UTF-8: iconv -f {name} -t UTF-8 {source} > {target}{guess}"


def hint_joining(folder: Path, files: Sequence[str]) -> str:
    """Return how to make one file of those in a folder; empty if they have different formats or there is only one."""
    suffixes = {Path(name).suffix for name in files}
    if len(files) < 2 or len(suffixes) > 1:
        return ""
    if suffixes == {".jsonl"}:
        return f"rows are read from one file; to join all of these: cat {shlex.quote(str(folder))}/*.jsonl > rows.jsonl"
    return "rows are read from one file: join the files first if the rows are in several"
