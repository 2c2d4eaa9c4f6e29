"""What people call the fields of their rows. Earlier names say more than later ones."""

from __future__ import annotations

import re

QUESTIONS = (
    "instruction",
    "prompt",
    "question",
    "user",
    "human",
    "problem",
    "request",
    "query",
    "utterance",
    "message",
    "input",
    "source",
    "text",
    "sentence",
    "task",
)
ANSWERS = (
    "response",
    "output",
    "answer",
    "completion",
    "assistant",
    "target",
    "solution",
    "reply",
    "chosen",
    "cypher",
    "sql",
    "json",
    "typescript",
    "code",
    "query",
    "reference",
    "gold",
    "expected",
    "result",
    "translation",
    "summary",
    "label",
)
CONTEXTS = ("context", "schema", "input", "passage", "document", "background", "tables", "table", "ddl", "evidence")
SYSTEMS = ("system", "system_prompt", "system_message")
CHATS = ("messages", "conversations", "conversation", "chat", "dialogue", "dialog", "turns", "chosen")
# Fields about a row, not of it. Only asked where no name tells the roles.
_ABOUT = frozenset(
    (
        *("id", "uuid", "guid", "key", "index", "idx", "hash", "url", "link", "name", "author", "license"),
        *("date", "time", "timestamp", "created", "updated", "lang", "language", "locale", "database", "db"),
        *("split", "category", "type", "tag", "tags", "topic", "score", "rating", "difficulty", "rejected"),
    )
)
_EXACT, _PART = 100, 50


def split_name(name: str) -> list[str]:
    """`sqlPrompt`, `sql-prompt`, `SQL Prompt` -> sql, prompt."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    return [word for word in re.split(r"[^a-z0-9]+", spaced.lower()) if word]


def rate_name(name: str, known: tuple[str, ...]) -> int:
    """How well a field's name fits a role: 0 is not at all; the whole name says more than a part of it."""
    words = split_name(name)
    whole = "_".join(words)
    if whole in known:
        return _EXACT - known.index(whole)
    # The last word is what a name is: a sql_prompt is a prompt, a prompt_id is none.
    return _PART - known.index(words[-1]) if words and words[-1] in known else 0


def is_about_row(name: str) -> bool:
    words = split_name(name)
    return bool(words) and (words[-1] in _ABOUT or words[0] in ("is", "has", "num"))
