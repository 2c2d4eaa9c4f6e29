"""Answers come bare or as one fenced block of Markdown. With anything around the block it is not an answer."""

from __future__ import annotations

import re

_FENCED = re.compile(r"\s*(?P<fence>`{3,})[ \t]*[\w+#.-]*[ \t]*\r?\n(?P<text>.*?)\s*(?P=fence)\s*", re.S)


def unfence(answer: str) -> str:
    """The inside of the block; the answer as it is where it is not one."""
    if not answer.lstrip().startswith("```"):
        return answer
    match = _FENCED.fullmatch(answer)
    return match["text"] if match and "```" not in match["text"] else answer
