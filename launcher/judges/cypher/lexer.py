"""Lexer of Cypher, used by the schema check, normalization and execution.

It accepts any text; the syntax checker validates the grammar.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Kinds of tokens."""

    NAME = "name"  # including keywords: Cypher reserves hardly any word
    QUOTED = "quoted"  # `a name`
    STRING = "string"
    NUMBER = "number"
    PARAMETER = "parameter"
    MARK = "mark"


@dataclass(frozen=True, slots=True)
class Token:
    """A token; `text` is a name without backticks, the value of a string, or the source text."""

    kind: Kind
    text: str

    @property
    def is_name(self) -> bool:
        """Return whether the token is a name, quoted or not."""
        return self.kind in _NAMES

    def is_word(self, *words: str) -> bool:
        """Return whether the token is one of the keywords, given in upper case."""
        return self.kind is Kind.NAME and self.text.upper() in words

    def is_mark(self, *marks: str) -> bool:
        """Return whether the token is one of the punctuation marks."""
        return self.text in marks and self.kind is Kind.MARK  # in this order: most texts are no such mark


_NAMES = (Kind.NAME, Kind.QUOTED)
_KINDS = {str(kind): kind for kind in Kind}  # a lookup takes a third of the time of a call of Kind
_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*(?:[^*]|\*(?!/))*\*/)
    |(?P<name>[^\W\d]\w*)
    |`(?P<quoted>(?:[^`]|``)*)`
    |'(?P<single>(?:[^'\\]|\\.)*)'
    |"(?P<double>(?:[^"\\]|\\.)*)"
    |(?P<number>0[xo][0-9a-fA-F]+|(?:\d+(?:\.\d+)?|(?<!\.)\.\d+)(?:[eE][+-]?\d+)?)
    |(?P<parameter>\$(?:\w+|`[^`]*`))
    |(?P<mark><=|>=|<>|=~|\+=|\.\.|\|\||::|.)""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_QUOTES = ("'", '"', "`")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


def words(text: str) -> frozenset[str]:
    """Return the set of words of a text."""
    return frozenset(text.split())


END = Token(Kind.MARK, "")  # returned for positions outside the text


def split_tokens(text: str) -> tuple[Token, ...]:
    """Tokenize a text in linear time. An unclosed quote or comment becomes one token up to the end."""
    tokens: list[Token] = []
    for match in _TOKEN.finditer(text):
        group = match.lastgroup
        if group == "space":
            continue
        value = match[group or 0]
        is_open = value in _QUOTES or text.startswith("/*", match.start())
        if group == "mark" and is_open:
            return (*tokens, Token(Kind.MARK, text[match.start() :]))
        match group:
            case "quoted":
                tokens.append(Token(Kind.QUOTED, value.replace("``", "`")))
            case "single" | "double":
                tokens.append(Token(Kind.STRING, _ESCAPE.sub(_unescape, value)))
            case _:
                tokens.append(Token(_KINDS[group or "mark"], value))
    return tuple(tokens)


def _unescape(match: re.Match[str]) -> str:
    escaped = match[1]
    return chr(int(escaped[1:], 16)) if len(escaped) == 5 else _ESCAPED.get(escaped, escaped)


def token_at(tokens: Sequence[Token], index: int) -> Token:
    """Return the token at an index, or END outside the text."""
    return tokens[index] if 0 <= index < len(tokens) else END


_PAIRS = {"(": ")", "[": "]", "{": "}"}


def match_brackets(tokens: Sequence[Token]) -> dict[int, int]:
    """Map opening brackets to closing ones; unmatched brackets are left out."""
    pairs: dict[int, int] = {}
    open_brackets: list[int] = []
    for index, token in enumerate(tokens):
        if token.is_mark("(", "[", "{"):
            open_brackets.append(index)
        elif token.is_mark(")", "]", "}") and open_brackets and _PAIRS[tokens[open_brackets[-1]].text] == token.text:
            pairs[open_brackets.pop()] = index
    return pairs


def find_enclosing_brackets(tokens: Sequence[Token]) -> list[str]:
    """Return the innermost bracket around each token: `(`, `[`, `{`, or nothing."""
    holders, open_brackets = [], [""]
    for token in tokens:
        if token.is_mark(")", "]", "}") and len(open_brackets) > 1:
            open_brackets.pop()
        holders.append(open_brackets[-1])
        if token.is_mark("(", "[", "{"):
            open_brackets.append(token.text)
    return holders


def strip_end(tokens: Sequence[Token]) -> list[Token]:
    """Return the tokens without trailing semicolons."""
    stripped = list(tokens)
    while stripped and stripped[-1].is_mark(";"):
        stripped.pop()
    return stripped


def render_token(token: Token) -> str:
    """Return the source text of a token."""
    if token.kind is Kind.STRING:
        escaped = token.text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")
        return f"'{escaped}'"
    if token.kind is Kind.QUOTED:
        return "`" + token.text.replace("`", "``") + "`"
    return token.text
