"""Names in the styles of the languages, and helpers for English phrases."""

from __future__ import annotations

from collections.abc import Sequence


def pascal(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' and not words.startswith(('uni', 'use', 'uti')) else 'a'} {words}"


def join_words(items: Sequence[str], last: str = "and") -> str:
    """Join words: `a, b and c`."""
    return f"{', '.join(items[:-1])} {last} {items[-1]}" if len(items) > 1 else items[0]
