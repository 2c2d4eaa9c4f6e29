"""Control tokens, such as `<|im_end|>`: only a template writes them. In the fields of a row they are ordinary text.

Fields are escaped before they are rendered, so that a rendered text contains control tokens only where the template put
them. `TextEncoder` encodes an escaped one as ordinary text; `unescape` restores the text of the row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from tokenizers import AddedToken, Tokenizer

from launcher.corpus.conversations import Conversation, Message
from launcher.corpus.rows import Json

_OPEN, _CLOSE = "⦃launcher:", "⦄"
_ESCAPED = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")


@dataclass(frozen=True)
class ControlTokens:
    """The texts of control tokens, longest first."""

    names: tuple[str, ...] = ()

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Regular expression that matches any control token."""
        return re.compile(_make_regex(self.names) if self.names else r"(?!)")

    @cached_property
    def _escapes(self) -> dict[str, str]:
        return {name: f"{_OPEN}{index}{_CLOSE}" for index, name in enumerate(self.names)}

    def escape(self, conversation: Conversation) -> Conversation:
        """Return the conversation with the control tokens in its texts escaped."""
        messages = tuple(map(self._escape_message, conversation.messages))
        if conversation.tools:
            return Conversation(messages, tuple(map(self._escape_json, conversation.tools)))
        return conversation if messages == conversation.messages else Conversation(messages)

    def _escape_message(self, message: Message) -> Message:
        if message.tool_calls or message.keys:
            calls = tuple(map(self._escape_json, message.tool_calls))
            keys = {name: self.escape_text(text) for name, text in message.keys.items()}
            message = replace(message, tool_calls=calls, keys=keys)
        if not (self.pattern.search(message.content) or self.pattern.search(message.context)):
            return message
        return replace(message, content=self.escape_text(message.content), context=self.escape_text(message.context))

    def _escape_json(self, value: Json) -> Json:
        if isinstance(value, str):
            return self.escape_text(value)
        if isinstance(value, list):
            return [self._escape_json(item) for item in value]
        if isinstance(value, dict):
            return {self.escape_text(key): self._escape_json(item) for key, item in value.items()}
        return value

    def escape_text(self, text: str) -> str:
        """Return the text with its control tokens escaped."""
        return self.pattern.sub(lambda found: self._escapes[found[0]], text)

    def unescape(self, text: str) -> str:
        """Return the text as it was before `escape_text`."""
        return _ESCAPED.sub(lambda found: self._name(int(found[1]), found[0]), text) if _OPEN in text else text

    def _name(self, index: int, escape: str) -> str:
        return self.names[index] if index < len(self.names) else escape

    def rename(self, text: str, names: Mapping[str, str]) -> str:
        """Rename the control tokens that the template wrote, and unescape those that come from fields."""
        return self.unescape(self.pattern.sub(lambda found: names[found[0]], text))


def has_escape(text: str) -> bool:
    """Return whether a rendered text contains an escaped control token, which comes from a field of the row."""
    return _OPEN in text


def find_control_tokens(tokenizer: Tokenizer, written: str) -> ControlTokens:
    """Return a tokenizer's control tokens: its special tokens, and its other added tokens that `written` contains.

    `written` is text that a template writes around messages. Words such as `user` are no control tokens, even if they
    are added tokens.
    """
    used = set(tokenizer.encode(written, add_special_tokens=False).ids)
    added = get_added_tokens(tokenizer).items()
    names = {t.content for number, t in added if t.special or (number in used and not t.content.isalnum())}
    return ControlTokens(tuple(sorted(names, key=lambda name: (-len(name), name))))


def get_added_tokens(tokenizer: Tokenizer) -> dict[int, AddedToken]:
    """Return the added tokens by id, without whitespace tokens such as Gemma's."""
    added = tokenizer.get_added_tokens_decoder()
    return {number: token for number, token in added.items() if token.content.strip("\u2581 \t\r\n")}


def _make_regex(names: Iterable[str]) -> str:
    """Return a regular expression that matches the longest possible name; a trie, because there may be a thousand."""
    branches: dict[str, list[str]] = {}
    for name in names:
        branches.setdefault(name[:1], []).append(name[1:])
    is_end = "" in branches
    parts = [re.escape(letter) + _make_regex(rest) for letter, rest in branches.items() if letter]
    if not parts:
        return ""
    joined = parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"
    return f"(?:{joined})?" if is_end else joined
