"""A query in normal form: what is written differently and means the same becomes the same text.

Case of keywords, spaces, quotes, names of variables, the reading direction of a pattern, aliases of what is returned,
the order of conditions that AND or OR joins and of a list that IN looks into.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from launcher.quality.cypher_patterns import Arrow, Chain, find_chains
from launcher.quality.cypher_tokens import Kind, Token, match_brackets, render_token, strip_end, token_at, words

_CLAUSES = words(
    "MATCH OPTIONAL WITH RETURN UNWIND CALL UNION CREATE MERGE DELETE DETACH SET REMOVE FOREACH WHERE ORDER SKIP "
    "LIMIT OFFSET"
)
_LONGEST_ALIASED = 60  # tokens; nobody orders by a longer one, but a hostile answer could do so a thousand times
_SAME_WORDS = {"ASCENDING": "ASC", "DESCENDING": "DESC", "OFFSET": "SKIP"}


def normalise(tokens: Sequence[Token]) -> str:
    tokens = _orient(strip_end(tokens))
    tokens = _drop_unused(_resolve_aliases(tokens))
    variables = find_variables(tokens)
    tokens = [_write_words(tokens, index, variables) for index in range(len(tokens))]
    tokens = [token for token in tokens if token.text != "ASC"]  # what ORDER BY does unasked
    # Once by what does not depend on names, so that names are given in the same order; once more with the names.
    tokens = _sort_conditions(_sort_lists(tokens), variables)
    tokens = _rename(tokens, variables)
    return " ".join(map(render_token, _sort_conditions(tokens, ())))


def find_variables(tokens: Sequence[Token]) -> frozenset[str]:
    """Names that a pattern, AS, UNWIND or a list's loop brings in; any other name is a keyword, or belongs to a dot."""
    found: set[str] = set()
    for chain in find_chains(tokens, match_brackets(tokens)):
        found.update(node.variable for node in chain.nodes)
        found.update(arrow.element.variable for arrow in chain.arrows)
    for index, token in enumerate(tokens):
        before, following = token_at(tokens, index - 1), token_at(tokens, index + 1)
        if not token.is_name or before.is_mark(".", ":"):
            continue
        is_loop = following.is_word("IN") and before.is_mark("(", "[")
        is_path = following.is_mark("=") and before.is_word("MATCH")
        if before.is_word("AS", "YIELD") or is_loop or is_path:
            found.add(token.text)
    return frozenset(found - {""})


def is_variable(tokens: Sequence[Token], index: int, variables: Collection[str]) -> bool:
    """Not where the same name is a property, a label, a map's key or a function."""
    token, before, following = tokens[index], token_at(tokens, index - 1), token_at(tokens, index + 1)
    if not token.is_name or token.text not in variables or before.is_mark(".") or following.is_mark("("):
        return False
    if before.is_mark(":"):
        return token_at(tokens, index - 2).is_name and token_at(tokens, index - 3).is_mark("{", ",")
    return not (following.is_mark(":") and before.is_mark("{", ","))


def _orient(tokens: Sequence[Token]) -> list[Token]:
    """Of a pattern's two reading directions, the one whose text comes first. A path that has a name is left alone."""
    oriented: list[Token] = []
    done = 0
    for chain in find_chains(tokens, match_brackets(tokens)):
        oriented += tokens[done : chain.start]
        done = chain.end
        is_free = all(_is_plain(tokens, arrow) for arrow in chain.arrows) and not _is_path(tokens, chain)
        forward, backward = tokens[chain.start : chain.end], _reverse(tokens, chain) if is_free else None
        turn = backward is not None and _shape(backward) < _shape(forward)
        oriented += backward if turn and backward is not None else forward
    return oriented + list(tokens[done:])


def _is_plain(tokens: Sequence[Token], arrow: Arrow) -> bool:
    return tokens[arrow.end - 1].is_mark("-", ">")  # no quantifier behind it


def _is_path(tokens: Sequence[Token], chain: Chain) -> bool:
    before = token_at(tokens, chain.start - 1)
    return before.is_mark("=") or (before.is_mark("(") and token_at(tokens, chain.start - 2).is_name)


def _reverse(tokens: Sequence[Token], chain: Chain) -> list[Token]:
    dash, left, right = Token(Kind.MARK, "-"), Token(Kind.MARK, "<"), Token(Kind.MARK, ">")
    turned = list(tokens[chain.nodes[-1].start : chain.nodes[-1].end])
    for node, arrow in zip(reversed(chain.nodes[:-1]), reversed(chain.arrows), strict=True):
        turned += [left] * arrow.right + [dash]
        turned += tokens[arrow.element.start : arrow.element.end]
        turned += [dash] + [right] * arrow.left
        turned += tokens[node.start : node.end]
    return turned


def _shape(tokens: Sequence[Token]) -> list[str]:
    """Without the variables, which may be called anything."""
    variables = find_variables(tokens)
    return [render_token(token) for at, token in enumerate(tokens) if not is_variable(tokens, at, variables)]


def _resolve_aliases(tokens: Sequence[Token]) -> list[Token]:
    """`RETURN a.name AS name ORDER BY name` is `RETURN a.name ORDER BY a.name`. In a UNION, names of columns count."""
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
    depth, found = 0, None
    for index, token in enumerate(tokens):
        depth += token.is_mark("(", "[", "{") - token.is_mark(")", "]", "}")
        if depth == 0 and token.is_word("RETURN"):
            found = index
    return found


def _next_at_level(tokens: Sequence[Token], at: int, wanted: Callable[[Token], bool], end: int | None = None) -> int:
    """Index of the next token that is wanted and stands in no bracket opened since; `end` where there is none."""
    depth, end = 0, len(tokens) if end is None else end
    while at < end:
        if depth == 0 and wanted(tokens[at]):
            return at
        depth += tokens[at].is_mark("(", "[", "{") - tokens[at].is_mark(")", "]", "}")
        if depth < 0:
            return at
        at += 1
    return end


def _drop_unused(tokens: Sequence[Token]) -> list[Token]:
    """`[r:R]` is `[:R]` where nobody speaks of r."""
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


def _write_words(tokens: Sequence[Token], index: int, variables: Collection[str]) -> Token:
    """Keywords in capitals, functions in small letters, numbers without idle zeros, names without idle backticks."""
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
        return token  # a property, a label, a key: their case counts
    word = token.text.upper()
    return Token(Kind.NAME, _SAME_WORDS.get(word, word))


def _sort_lists(tokens: Sequence[Token]) -> list[Token]:
    """`IN ['b', 'a']`, if there is nothing but literals."""
    sorted_tokens, pairs = list(tokens), match_brackets(tokens)
    for index, close in pairs.items():
        if not tokens[index].is_mark("[") or not token_at(tokens, index - 1).is_word("IN"):
            continue
        literals, commas = tokens[index + 1 : close : 2], tokens[index + 2 : close : 2]
        if all(one.kind in (Kind.STRING, Kind.NUMBER) for one in literals) and all(one.is_mark(",") for one in commas):
            sorted_tokens[index + 1 : close : 2] = sorted(literals, key=render_token)
    return sorted_tokens


def _sort_conditions(tokens: Sequence[Token], variables: Collection[str]) -> list[Token]:
    """Behind each WHERE, what AND joins (or OR, if it alone does) is sorted, by its text without variables."""
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
