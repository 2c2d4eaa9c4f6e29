"""Patterns of a query, `(a:A)-[r:R]->(b:B)`: positions, names and directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.judges.cypher.lexer import Kind, Token, token_at, words

# After one of these, a bracket may open a pattern; after any other name it contains function arguments.
_BEFORE_PATTERN = words(
    "MATCH WHERE AND OR XOR NOT MERGE CREATE RETURN WITH IN WHEN THEN ELSE CASE ON SHORTEST PATH PATHS ACYCLIC TRAIL "
    "WALK GROUP GROUPS RELATIONSHIPS ELEMENTS INSERT UNWIND BY DISTINCT SET DELETE"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Element:
    """A node or relationship of a pattern. Negated labels (`!A`) are not in `names` but in `denied`."""

    start: int  # of its bracket, or of an arrow without one
    end: int  # after its closing bracket
    variable: str
    names: tuple[str, ...]  # labels or types
    denied: tuple[str, ...]
    keys: tuple[str, ...]  # of its property map


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrow:
    """A relationship between two nodes of a pattern."""

    element: Element
    start: int
    end: int
    left: bool  # <-
    right: bool  # ->
    is_long: bool  # variable length: *1..3 or a quantifier


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """A pattern of a Cypher query: its nodes and the relationships between them."""

    nodes: tuple[Element, ...]
    arrows: tuple[Arrow, ...]

    @property
    def start(self) -> int:
        """Index of the first token of the pattern."""
        return self.nodes[0].start

    @property
    def end(self) -> int:
        """Index after the last token of the pattern."""
        return self.nodes[-1].end


def find_chains(tokens: Sequence[Token], pairs: Mapping[int, int]) -> list[Chain]:
    """Return all patterns of a query. `(a)` alone is one only where Cypher requires a pattern, as after MATCH."""
    chains: list[Chain] = []
    index = 0
    while index < len(tokens):
        chain = _read_chain(tokens, pairs, index) if tokens[index].is_mark("(") else None
        if chain is None:
            index += 1
            continue
        chains.append(chain)
        index = chain.end
    return chains


def _read_chain(tokens: Sequence[Token], pairs: Mapping[int, int], index: int) -> Chain | None:
    before = token_at(tokens, index - 1)
    if before.is_name and before.text.upper() not in _BEFORE_PATTERN:
        return None
    node = _read_element(tokens, pairs, index)
    if node is None:
        return None
    nodes, arrows = [node], []
    while arrow := _read_arrow(tokens, pairs, nodes[-1].end):
        following = _read_element(tokens, pairs, arrow.end) if token_at(tokens, arrow.end).is_mark("(") else None
        if following is None:
            break
        arrows.append(arrow)
        nodes.append(following)
    is_bare = not arrows and not node.names and not node.denied and not node.keys
    if is_bare and not before.is_word("MATCH", "CREATE", "MERGE") and not before.is_mark(",", "="):
        return None  # a parenthesized variable
    return Chain(nodes=tuple(nodes), arrows=tuple(arrows))


def _read_element(tokens: Sequence[Token], pairs: Mapping[int, int], index: int) -> Element | None:
    """Parse a node or relationship such as `(a:A&B {key: 1} WHERE ...)`; None if the bracket has other content."""
    close = pairs.get(index)
    if close is None:
        return None
    at, variable = index + 1, ""
    if token_at(tokens, at).is_name and not token_at(tokens, at).is_word("IS", "WHERE"):
        variable, at = tokens[at].text, at + 1
    names: list[str] = []
    denied: list[str] = []
    if token_at(tokens, at).is_mark(":") or token_at(tokens, at).is_word("IS"):
        at = _read_label_expression(tokens, at + 1, close, names, denied)
    if token_at(tokens, at).is_mark("*"):
        at = _skip_length(tokens, at + 1)
    keys: tuple[str, ...] = ()
    if token_at(tokens, at).is_mark("{") and at in pairs:
        keys, at = read_keys(tokens, pairs, at), pairs[at] + 1
    if token_at(tokens, at).kind is Kind.PARAMETER:
        at += 1
    if at != close and not token_at(tokens, at).is_word("WHERE"):
        return None
    return Element(start=index, end=close + 1, variable=variable, names=tuple(names), denied=tuple(denied), keys=keys)


def _read_label_expression(tokens: Sequence[Token], at: int, close: int, names: list[str], denied: list[str]) -> int:
    """Parse a label expression such as `A:B` or `(A|B)&!C` into `names` and `denied`; return the index after it."""
    negated, start = False, at
    while at < close:
        token = tokens[at]
        if token.is_name and not token.is_word("WHERE") and (at == start or not tokens[at - 1].is_name):
            (denied if negated else names).append(token.text)
            negated = False
        elif token.is_mark("!"):
            negated = True
        elif not token.is_mark(":", "&", "|", "(", ")", "%"):
            break
        at += 1
    return at


def _skip_length(tokens: Sequence[Token], at: int) -> int:
    while token_at(tokens, at).kind is Kind.NUMBER or token_at(tokens, at).is_mark(".."):
        at += 1
    return at


def read_keys(tokens: Sequence[Token], pairs: Mapping[int, int], index: int) -> tuple[str, ...]:
    """Return the keys of a map, without those of nested maps."""
    keys, at = [], index + 1
    while at < pairs[index]:
        if tokens[at].is_name and token_at(tokens, at + 1).is_mark(":") and tokens[at - 1].is_mark("{", ","):
            keys.append(tokens[at].text)
        at = pairs.get(at, at) + 1
    return tuple(keys)


def _read_arrow(tokens: Sequence[Token], pairs: Mapping[int, int], index: int) -> Arrow | None:
    """Parse a relationship such as `-[...]->`, `<-[...]-` or `--`, with its quantifier; None if there is none."""
    at = index
    if token_at(tokens, at).is_mark("{", "+", "*") and token_at(tokens, at + 1).is_mark("-", "<"):
        at += 1
    left = token_at(tokens, at).is_mark("<")
    at += left
    if not token_at(tokens, at).is_mark("-"):
        return None
    at += 1
    element = Element(start=at, end=at, variable="", names=(), denied=(), keys=())
    is_long = False
    if token_at(tokens, at).is_mark("["):
        relationship = _read_element(tokens, pairs, at)
        if relationship is None:
            return None
        is_long = any(token.is_mark("*") for token in tokens[at : relationship.end])
        element, at = relationship, relationship.end
    if not token_at(tokens, at).is_mark("-"):
        return None
    at += 1
    right = token_at(tokens, at).is_mark(">")
    at += right
    if token_at(tokens, at).is_mark("+", "*", "{"):
        is_long, at = True, pairs.get(at, at) + 1
    return Arrow(element=element, start=index, end=at, left=left, right=right, is_long=is_long)
