"""Rows that bring broken JSON and want it whole: what of it must be in the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal

from launcher.quality.json_values import Json, Path, format_path, is_equal, read_leaves

# One line of order, then the text: `Repair this JSON:`, `Fix the JSON so that it fits the schema:`.
_ORDER = re.compile(r"\s*[^\n{\[]*\b(?:repair|fix|correct|broken|invalid|malformed)\b[^\n{\[]*:\s*(?=[{\[\"'])", re.I)


def find_broken(instruction: str) -> str | None:
    """The broken text; None where the row asks for something else."""
    match = _ORDER.match(instruction)
    return instruction[match.end() :] if match else None


def find_lost(broken: str, reference: Json, answer: Json) -> str:
    """The first value that the broken text has and the reference keeps, but not the answer; empty if there is none.

    Which values can be had from a broken text is told by the reference: those whose key and whose spelling stand in it.
    So nobody has to guess how it was meant, and what the reference had to make up (a field that was missing, the right
    type) may be made up otherwise."""
    for path, value in read_leaves(reference):
        keys = [part for part in path if isinstance(part, str)]
        is_there = (not keys or keys[-1] in broken) and any(spelling in broken for spelling in _spell(value))
        if is_there and not _has(answer, path, value):
            return format_path(path)
    return ""


def _spell(value: Json) -> Iterator[str]:
    if isinstance(value, str):
        yield value
        yield json.dumps(value)[1:-1]
    elif value is None or isinstance(value, bool):
        yield json.dumps(value)
        yield str(value)  # as Python spells it
    elif isinstance(value, int | Decimal):
        yield str(value)
    else:
        yield "{" if isinstance(value, dict) else "["


def _has(tree: Json, path: Path, value: Json) -> bool:
    try:
        for part in path:
            tree = tree[part]  # type: ignore[index]
    except (KeyError, IndexError, TypeError):
        return False
    return is_equal(tree, value)
