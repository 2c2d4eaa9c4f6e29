"""Marks around the texts of messages, which locate these texts in a rendered conversation."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from launcher.corpus.rows import Json

MARK = re.compile("⦅([0-9]+)([<>])⦆")  # printable, so that no way of writing JSON changes it


def marks_of(number: int) -> set[str]:
    """Return the two marks with this number: the one before a text and the one after it."""
    return {f"⦅{number}<⦆", f"⦅{number}>⦆"}


@dataclass(slots=True)
class Marker:
    """Puts numbered marks around texts; `owners` has the message index of each number, or -1 for a tool."""

    owners: list[int] = field(default_factory=list)

    def mark(self, text: str, owner: int) -> str:
        """Put marks around a text, but not around outer whitespace and thoughts, which templates may drop."""
        thoughts = text.rfind("</think>") + len("</think>") if "</think>" in text else 0
        core = text[thoughts:].strip()
        if not core:
            return text
        start = text.index(core, thoughts)
        number, end = len(self.owners), start + len(core)
        self.owners.append(owner)
        return f"{text[:start]}⦅{number}<⦆{core}⦅{number}>⦆{text[end:]}"

    def mark_json(self, value: Json, owner: int) -> Json:
        """Mark all strings in a JSON value; in an object without strings, its first key."""
        if isinstance(value, str):
            return self.mark(value, owner)
        if isinstance(value, list):
            return [self.mark_json(item, owner) for item in value]
        if isinstance(value, dict):
            marked = {key: self.mark_json(item, owner) for key, item in value.items()}
            if value and marked == value:
                first, *others = marked
                marked = {self.mark(first, owner): marked[first], **{key: marked[key] for key in others}}
            return marked
        return value

    def mark_tool(self, tool: Any) -> Json:
        """Put marks around the name of a tool only, because templates may test other values of its definition."""
        if isinstance(tool.get("function"), dict):
            return {**tool, "function": self.mark_tool(tool["function"])}
        return {**tool, "name": self.mark(tool["name"], -1)} if isinstance(tool.get("name"), str) else tool
