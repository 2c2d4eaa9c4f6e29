"""Normal form of a Cypher query: queries that differ only in spelling become the same text.

Normalized are keyword case, whitespace, quotes, variable names, the direction in which a pattern is written, aliases
of returned columns, the order of conditions joined by AND or OR, and the order of IN lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from launcher.judges.cypher.lexer import Kind, Token, match_brackets, render_token, strip_end, token_at, words
from launcher.judges.cypher.patterns import Arrow, Chain, find_chains

_CLAUSES = words(
    "MATCH OPTIONAL WITH RETURN UNWIND CALL UNION CREATE MERGE DELETE DETACH SET REMOVE FOREACH WHERE ORDER SKIP "
    "LIMIT OFFSET"
)
_LONGEST_ALIASED = 60  # tokens; a hostile answer could repeat a longer one a thousand times
_SAME_WORDS = {"ASCENDING": "ASC", "DESCENDING": "DESC", "OFFSET": "SKIP"}


def normalize_query(tokens: Sequence[Token]) -> str:
    """Return the normal form of a query."""
    tokens = _orient(strip_end(tokens))
    tokens = _drop_unused(_resolve_aliases(tokens))
    variables = find_variables(tokens)
    tokens = [_normalize_token(tokens, index, variables) for index in range(len(tokens))]
    tokens = [token for token in tokens if token.text != "ASC"]  # the default
    # First without variables, so that they are numbered in the same order; then again with their new names.
    tokens = _sort_conditions(_sort_lists(tokens), variables)
    tokens = _rename(tokens, variables)
    return " ".join(map(render_token, _sort_conditions(tokens, ())))


def find_variables(tokens: Sequence[Token]) -> frozenset[str]:
    """Return the variables of a query: the names that patterns, AS, YIELD and list comprehensions introduce."""
    variables: set[str] = set()
    for chain in find_chains(tokens, match_brackets(tokens)):
        variables.update(node.variable for node in chain.nodes)
        variables.update(arrow.element.variable for arrow in chain.arrows)
    for index, token in enumerate(tokens):
        before, following = token_at(tokens, index - 1), token_at(tokens, index + 1)
        if not token.is_name or before.is_mark(".", ":"):
            continue
        is_loop = following.is_word("IN") and before.is_mark("(", "[")
        is_path = following.is_mark("=") and before.is_word("MATCH")
        if before.is_word("AS", "YIELD") or is_loop or is_path:
            variables.add(token.text)
    return frozenset(variables - {""})


def is_variable(tokens: Sequence[Token], index: int, variables: Collection[str]) -> bool:
    """Return whether a name is used as a variable, and not as a property, label, key or function."""
    token, before, following = tokens[index], token_at(tokens, index - 1), token_at(tokens, index + 1)
    if not token.is_name or token.text not in variables or before.is_mark(".") or following.is_mark("("):
        return False
    if before.is_mark(":"):
        return token_at(tokens, index - 2).is_name and token_at(tokens, index - 3).is_mark("{", ",")
    return not (following.is_mark(":") and before.is_mark("{", ","))


def _orient(tokens: Sequence[Token]) -> list[Token]:
    """Write each pattern forward or backward, whichever text sorts first; named and quantified paths are unchanged."""
    oriented: list[Token] = []
    done = 0
    for chain in find_chains(tokens, match_brackets(tokens)):
        oriented += tokens[done : chain.start]
        done = chain.end
        is_free = all(_is_plain(tokens, arrow) for arrow in chain.arrows) and not _is_path(tokens, chain)
        forward, backward = tokens[chain.start : chain.end], _reverse(tokens, chain) if is_free else None
        oriented += backward if backward is not None and _shape(backward) < _shape(forward) else forward
    return oriented + list(tokens[done:])


def _is_plain(tokens: Sequence[Token], arrow: Arrow) -> bool:
    return tokens[arrow.end - 1].is_mark("-", ">")  # no quantifier after it


def _is_path(tokens: Sequence[Token], chain: Chain) -> bool:
    before = token_at(tokens, chain.start - 1)
    return before.is_mark("=") or (before.is_mark("(") and token_at(tokens, chain.start - 2).is_name)


def _reverse(tokens: Sequence[Token], chain: Chain) -> list[Token]:
    dash, left, right = Token(Kind.MARK, "-"), Token(Kind.MARK, "<"), Token(Kind.MARK, ">")
    reversed_tokens = list(tokens[chain.nodes[-1].start : chain.nodes[-1].end])
    for node, arrow in zip(reversed(chain.nodes[:-1]), reversed(chain.arrows), strict=True):
        reversed_tokens += [left] * arrow.right + [dash]
        reversed_tokens += tokens[arrow.element.start : arrow.element.end]
        reversed_tokens += [dash] + [right] * arrow.left
        reversed_tokens += tokens[node.start : node.end]
    return reversed_tokens


def _shape(tokens: Sequence[Token]) -> list[str]:
    """Return the texts of all tokens except variables."""
    variables = find_variables(tokens)
    return [render_token(token) for at, token in enumerate(tokens) if not is_variable(tokens, at, variables)]


def _resolve_aliases(tokens: Sequence[Token]) -> list[Token]:
    """Replace aliases of the last RETURN with their expressions, except in a UNION, where column names matter."""
    start = _last_return(tokens)
    if start is None or any(token.is_word("UNION") for token in tokens):
        return list(tokens)
    items_end = _next_at_level(tokens, start + 1, lambda token: token.is_word("ORDER", "SKIP", "LIMIT", "OFFSET"))
    resolved, aliases, at = list(tokens[: start + 1]), {}, start + 1
    while at < items_end:
        end = _next_at_level(tokens, at, lambda token: token.is_mark(","), items_end)
        item = list(tokens[at:end])
        if 2 < len(item) < _LONGEST_ALIASED and item[-2].is_word("AS") and item[-1].is_name:
            aliases[item[-1].text] = item[1:-2] if item[0].is_word("DISTINCT") else item[:-2]
            item = item[:-2]
        resolved += item + list(tokens[end : end + 1] if end < items_end else ())
        at = end + 1
    for index in range(items_end, len(tokens)):
        is_alias = is_variable(tokens, index, aliases) and not token_at(tokens, index + 1).is_mark(".")
        resolved += aliases[tokens[index].text] if is_alias else [tokens[index]]
    return resolved


def _last_return(tokens: Sequence[Token]) -> int | None:
    depth, last = 0, None
    for index, token in enumerate(tokens):
        depth += token.is_mark("(", "[", "{") - token.is_mark(")", "]", "}")
        if depth == 0 and token.is_word("RETURN"):
            last = index
    return last


def _next_at_level(tokens: Sequence[Token], at: int, matches: Callable[[Token], bool], end: int | None = None) -> int:
    """Return the index of the next matching token at the same bracket level, or `end`."""
    depth, end = 0, len(tokens) if end is None else end
    while at < end:
        if depth == 0 and matches(tokens[at]):
            return at
        depth += tokens[at].is_mark("(", "[", "{") - tokens[at].is_mark(")", "]", "}")
        if depth < 0:
            return at
        at += 1
    return end


def _drop_unused(tokens: Sequence[Token]) -> list[Token]:
    """Remove unused variables: `[r:R]` becomes `[:R]`."""
    if any(
        token_at(tokens, at).is_word("RETURN", "WITH") and token_at(tokens, at + 1).is_mark("*")
        for at in range(len(tokens))
    ):
        return list(tokens)
    variables = find_variables(tokens)
    counts = Counter(tokens[at].text for at in range(len(tokens)) if is_variable(tokens, at, variables))
    unused = set()
    for chain in find_chains(tokens, match_brackets(tokens)):
        for element in (*chain.nodes, *(arrow.element for arrow in chain.arrows)):
            if element.variable and counts[element.variable] == 1:
                unused.add(element.start + 1)
    return [token for index, token in enumerate(tokens) if index not in unused]


def _normalize_token(tokens: Sequence[Token], index: int, variables: Collection[str]) -> Token:
    """Return the normal form of a token: keywords in upper case, functions in lower case, `1.50` as `1.5`."""
    token, before, following = tokens[index], token_at(tokens, index - 1), token_at(tokens, index + 1)
    if token.kind is Kind.NUMBER and "." in token.text and token.text[-1].isdigit():
        return Token(Kind.NUMBER, repr(float(token.text)))
    if token.kind is Kind.QUOTED:
        return Token(Kind.NAME, token.text)
    if token.kind is not Kind.NAME or is_variable(tokens, index, variables):
        return token
    is_call = following.is_mark("(") and token.text.upper() not in _CLAUSES and not before.is_mark(":", "|", "&")
    if is_call and not token.is_word("AND", "OR", "XOR", "NOT", "IN"):
        return Token(Kind.NAME, token.text.lower())
    if before.is_mark(".", ":", "|", "&", "!") or (following.is_mark(":") and before.is_mark("{", ",")):
        return token  # properties, labels and keys are case-sensitive
    word = token.text.upper()
    return Token(Kind.NAME, _SAME_WORDS.get(word, word))


def _sort_lists(tokens: Sequence[Token]) -> list[Token]:
    """Sort the literals of IN lists."""
    sorted_tokens, pairs = list(tokens), match_brackets(tokens)
    for index, close in pairs.items():
        if not tokens[index].is_mark("[") or not token_at(tokens, index - 1).is_word("IN"):
            continue
        literals, commas = tokens[index + 1 : close : 2], tokens[index + 2 : close : 2]
        if all(one.kind in (Kind.STRING, Kind.NUMBER) for one in literals) and all(one.is_mark(",") for one in commas):
            sorted_tokens[index + 1 : close : 2] = sorted(literals, key=render_token)
    return sorted_tokens


def _sort_conditions(tokens: Sequence[Token], variables: Collection[str]) -> list[Token]:
    """Sort the conditions of each WHERE that are joined only by AND or only by OR; variable names do not affect it."""
    arranged, at = list(tokens), 0
    while at < len(arranged):
        if arranged[at].is_word("WHERE") and not token_at(arranged, at - 1).is_mark("."):
            end = _next_at_level(arranged, at + 1, lambda token: token.is_word(*_CLAUSES) or token.is_mark("|"))
            arranged[at + 1 : end] = _sort_joined(arranged[at + 1 : end], variables)
        at += 1
    return arranged


def _sort_joined(tokens: list[Token], variables: Collection[str]) -> list[Token]:
    for word, others in (("AND", ("OR", "XOR", "CASE")), ("OR", ("AND", "XOR", "CASE"))):
        if _next_at_level(tokens, 0, _is_one_of(*others)) < len(tokens):
            continue
        parts, at = [], 0
        while at <= len(tokens):
            end = _next_at_level(tokens, at, _is_one_of(word))
            parts.append(tokens[at:end])
            at = end + 1
        parts.sort(key=lambda part: [_blank(part, index, variables) for index in range(len(part))])
        return [token for part in parts for token in (Token(Kind.NAME, word), *part)][1:]
    return tokens


def _is_one_of(*words: str) -> Callable[[Token], bool]:
    return lambda token: token.is_word(*words)


def _blank(tokens: Sequence[Token], index: int, variables: Collection[str]) -> str:
    return "" if is_variable(tokens, index, variables) else render_token(tokens[index])


def _rename(tokens: Sequence[Token], variables: Collection[str]) -> list[Token]:
    names: dict[str, str] = {}
    renamed = []
    for index, token in enumerate(tokens):
        if is_variable(tokens, index, variables):
            renamed.append(Token(Kind.NAME, names.setdefault(token.text, f"v{len(names) + 1}")))
        else:
            renamed.append(token)
    return renamed
