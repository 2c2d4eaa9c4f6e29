"""Rewriting of Cypher queries for the engine of execution matches, where it differs from Neo4j.

The engine may match two relationships of one MATCH to the same edge, and it compares two values only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from launcher.judges.cypher.lexer import Kind, Token, match_brackets, token_at, words
from launcher.judges.cypher.patterns import find_chains

CLAUSES = words("MATCH OPTIONAL WHERE UNWIND CALL UNION")  # besides RETURN and WITH
_COMPARISONS = ("<", "<=", ">", ">=", "=", "<>")


def may_reuse_edges(tokens: Sequence[Token]) -> bool:
    """Return whether the engine, unlike Neo4j, may match two relationships of one MATCH to the same edge."""
    return any(
        not (group.end and one.is_separable(tokens) and other.is_separable(tokens))
        for group in _group_arrows(tokens)
        for one, other in group.find_pairs()
    )


@dataclass(kw_only=True, slots=True)
class _ArrowGroup:
    """Relationships of one MATCH or of one pattern that is a predicate; in Neo4j, no two of them are the same edge."""

    arrows: list[_GroupedArrow]
    end: int  # after the patterns of a MATCH; 0 for other patterns

    def find_pairs(self) -> Iterator[tuple[_GroupedArrow, _GroupedArrow]]:
        """Yield the pairs whose types overlap."""
        for one, other in combinations(self.arrows, 2):
            if not one.types or not other.types or one.types & other.types:
                yield one, other


@dataclass(frozen=True, kw_only=True, slots=True)
class _GroupedArrow:
    start: int  # of its bracket
    variable: str
    types: frozenset[str]
    is_long: bool

    def is_separable(self, tokens: Sequence[Token]) -> bool:
        """Return whether a condition can compare the relationship with others."""
        return not self.is_long and tokens[self.start].is_mark("[")


def _group_arrows(tokens: Sequence[Token]) -> list[_ArrowGroup]:
    groups: list[_ArrowGroup] = []
    previous = 0
    for chain in find_chains(tokens, match_brackets(tokens)):
        between = tokens[previous : chain.start]
        is_test = is_predicate(tokens, chain.start)
        is_match = not is_test and token_at(tokens, chain.start - 1).is_word("MATCH")
        if is_test or not groups or any(token.is_word("MATCH", "EXISTS", "COUNT", "NOT") for token in between):
            groups.append(_ArrowGroup(arrows=[], end=-1 if is_match else 0))
        group, previous = groups[-1], chain.end
        for arrow in chain.arrows:
            element = arrow.element
            group.arrows.append(
                _GroupedArrow(
                    start=element.start,
                    variable=element.variable,
                    types=frozenset(() if element.denied else element.names),
                    is_long=arrow.is_long,
                )
            )
        if group.end:
            group.end = 0 if token_at(tokens, chain.end).is_mark(")") else chain.end
    return groups


def separate_edges(tokens: Sequence[Token]) -> Sequence[Token]:
    """Add conditions that relationships of one MATCH are different edges, as in Neo4j: `id(r) <> id(s)`."""
    names: dict[int, str] = {}  # of relationships, by the index of their bracket
    added: dict[int, list[Token]] = {}  # tokens by the index that they are written before
    for group in _group_arrows(tokens):
        conditions: list[Token] = []
        for pair in group.find_pairs():
            if not group.end or not all(arrow.is_separable(tokens) for arrow in pair):
                continue
            for arrow in pair:
                if arrow.start not in names:
                    names[arrow.start] = arrow.variable or f"edge_{arrow.start}"
                    if not arrow.variable:
                        added[arrow.start + 1] = [Token(Kind.NAME, names[arrow.start])]
            one, other = (_make_identity(names[arrow.start]) for arrow in pair)
            conditions += [*([Token(Kind.NAME, "AND")] if conditions else []), *one, Token(Kind.MARK, "<>"), *other]
        if not conditions:
            continue
        if token_at(tokens, group.end).is_word("WHERE"):
            added[group.end + 1] = [*conditions, Token(Kind.NAME, "AND"), Token(Kind.MARK, "(")]
            added.setdefault(_find_clause_end(tokens, group.end + 1), []).insert(0, Token(Kind.MARK, ")"))
        else:
            added.setdefault(group.end, []).extend([Token(Kind.NAME, "WHERE"), *conditions])
    if not added:
        return tokens
    return [part for index in range(len(tokens) + 1) for part in (*added.get(index, ()), *tokens[index : index + 1])]


def split_comparisons(tokens: Sequence[Token]) -> Sequence[Token]:
    """Write `1990 <= f.year <= 2000` as two conditions: the engine compares two values only."""
    split: list[Token] = []
    for index, token in enumerate(tokens):
        split.append(token)
        middle = tokens[index - 3 : index] if token_at(tokens, index - 2).is_mark(".") else tokens[index - 1 : index]
        first = index - len(middle) - 1
        is_chained = token.is_mark(*_COMPARISONS) and token_at(tokens, first).is_mark(*_COMPARISONS)
        before = token_at(tokens, first - (4 if token_at(tokens, first - 2).is_mark(".") else 2))
        is_simple = before.is_word("WHERE", "AND", "OR") or (before.is_mark("(") and not middle[0].is_mark(")"))
        if is_chained and is_simple:
            split[-1:] = [Token(Kind.NAME, "AND"), *middle, token]
    return split


def _make_identity(name: str) -> list[Token]:
    return [Token(Kind.NAME, "id"), Token(Kind.MARK, "("), Token(Kind.NAME, name), Token(Kind.MARK, ")")]


def _find_clause_end(tokens: Sequence[Token], start: int) -> int:
    """Return the index after a WHERE's condition that begins at `start`."""
    depth = 0
    for index in range(start, len(tokens)):
        token, before = tokens[index], token_at(tokens, index - 1)
        depth += token.is_mark("(", "[", "{") - token.is_mark(")", "]", "}")
        is_clause = token.is_word("RETURN", "WITH", *CLAUSES) and not before.is_word("STARTS", "ENDS")
        if depth < 0 or (depth == 0 and is_clause and not before.is_mark(".", ":")):
            return index
    return len(tokens)


def is_predicate(tokens: Sequence[Token], index: int) -> bool:
    """Return whether a pattern is a predicate: `WHERE (a)-[:R]->(b)`."""
    return token_at(tokens, index - 1).is_word("WHERE", "AND", "OR", "XOR", "NOT")
