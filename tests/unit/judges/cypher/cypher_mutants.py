"""Mutated queries: equivalent ones, different ones, and ones that violate the schema."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

from launcher.judges.cypher.lexer import Kind, Token, match_brackets, render_token, split_tokens, token_at
from launcher.judges.cypher.patterns import find_chains
from launcher.judges.cypher.schema import GraphSchema


def same_meaning(query: str) -> Iterator[str]:
    """Written in another way: the judge has to see through all of these."""
    names = sorted(set(re.findall(r"[(\[](\w+)[:)]", query)))
    renamed = query
    for number, name in enumerate(names):
        renamed = re.sub(rf"(?<![\w.:'])\b{name}\b(?=[.:),\s\]]|$)(?!: ')", f"thing{number}", renamed)
    yield renamed
    yield re.sub(r"\b(MATCH|WHERE|RETURN|AND|WITH|AS|ORDER BY|LIMIT|DISTINCT)\b", lambda m: m[0].lower(), query) + ";"
    yield query.replace(" WHERE ", "\n  WHERE ").replace(" RETURN ", "\nRETURN  ")
    if "'" in query and '"' not in query:
        yield query.replace("'", '"')
    yield re.sub(r"RETURN ([\w.]+)(?=$|,)", r"RETURN \1 AS column_1", query)
    flipped = re.sub(r"MATCH (\([^()]*\))-(\[[^\]]*\])->(\([^()]*\))", r"MATCH \3<-\2-\1", query)
    if flipped != query:
        yield flipped
    inlined = re.sub(r"\((\w+):(\w+) \{(\w+): ('[^']*')\}\)(.*?) RETURN", r"(\1:\2)\5 WHERE \1.\3 = \4 RETURN", query)
    if inlined != query and query.count("WHERE") == 0 and "({" not in query and re.search(r"\(\w+:\w+ \{", query):
        yield inlined
    between = re.sub(r"(\w+\.\w+) >= (\d+) AND \1 <= (\d+)", r"\2 <= \1 AND \1 <= \3", query)
    if between != query:
        yield between


_OTHER = {
    ">=": ">",
    "<=": "<",
    ">": ">=",
    "<": "<=",
    "=": "<>",
    "<>": "=",
}


def other_meaning(query: str) -> Iterator[str]:
    """Close to the query, and wrong: an operator, a value, a condition, a column, an order, an aggregate."""
    for operator, other in _OTHER.items():
        changed = re.sub(rf"(?<=[\w)]) {re.escape(operator)} ", f" {other} ", query, count=1)
        if changed != query:
            yield changed
    for pattern, new in (
        (r" AND .+?(?= RETURN| AND| \})", ""),
        (r"\bDESC\b", ""),
        (r"(ORDER BY \w+\.\w+\b)(?! DESC)", r"\1 DESC"),
        (r"\bLIMIT (\d+)", lambda m: f"LIMIT {int(m[1]) + 1}"),
        (r"count\(DISTINCT ", "count("),
        (r"\bmax\(", "min("),
        (r"\bmin\(", "max("),
        (r"\bsum\(", "avg("),
        (r"\bavg\(", "sum("),
        (r"\bSTARTS WITH\b", "ENDS WITH"),
        (r"\bENDS WITH\b", "CONTAINS"),
        (r"\bCONTAINS\b", "STARTS WITH"),
        (r"\bIS NULL\b", "IS NOT NULL"),
        (r"\bIS NOT NULL\b", "IS NULL"),
        (r"\bNOT \(", "("),
        (r"= true\b", "= false"),
        (r"= false\b", "= true"),
        (r"(?<=[=H ]) '([^']{3,})'(?!\))", r" '\1ly'"),
        (r"\bOPTIONAL MATCH\b", "MATCH"),
        (r"RETURN (\w+\.\w+), ", "RETURN "),
        (r"\*1\.\.(\d)", r"*2..\1"),
    ):
        changed = re.sub(pattern, new, query, count=1)
        if changed != query:
            yield changed


def wrong_names(query: str, schema: GraphSchema, dice: random.Random) -> Iterator[tuple[str, str]]:
    """What was put in (`label`, `type`, `property`, `foreign`: of another label), and the query with it."""
    tokens = split_tokens(query)
    yield from _foreign_property(tokens, schema)
    places = list(_name_places(tokens))
    dice.shuffle(places)
    seen = set()
    for kind, index in places:
        if kind in seen:
            continue
        seen.add(kind)
        name = tokens[index].text
        known = set(schema.nodes) if kind == "label" else set(schema.relationships) if kind == "type" else None
        wrong = {"label": f"{name}s", "type": f"{name}_TO", "property": f"{name}Value"}[kind]
        if known is None or wrong not in known:
            yield kind, _with(tokens, index, wrong)


def _foreign_property(tokens: tuple[Token, ...], schema: GraphSchema) -> Iterator[tuple[str, str]]:
    """`movie.born`: the graph has such a property, but not there."""
    labels: dict[str, set[str]] = {}
    for chain in find_chains(tokens, match_brackets(tokens)):
        for node in chain.nodes:
            labels.setdefault(node.variable, set()).update(node.names)
    for kind, index in _name_places(tokens):
        owners = labels.get(tokens[index - 2].text, set()) if kind == "property" else set()
        if len(owners) != 1 or not owners <= set(schema.nodes):
            continue
        own = schema.nodes[next(iter(owners))]
        others = sorted({name for properties in schema.nodes.values() for name in properties} - set(own))
        if others:
            yield "foreign", _with(tokens, index, others[0])
            return


def wrong_directions(query: str, schema: GraphSchema) -> Iterator[str]:
    """An arrow turned round, where the schema has no relationship that way."""
    tokens = split_tokens(query)
    labels = {}
    for chain in find_chains(tokens, match_brackets(tokens)):
        labels.update({node.variable: node.names[0] for node in chain.nodes if node.variable and node.names})
    for chain in find_chains(tokens, match_brackets(tokens)):
        for left, arrow, right in zip(chain.nodes, chain.arrows, chain.nodes[1:], strict=False):
            first = left.names[0] if left.names else labels.get(left.variable)
            second = right.names[0] if right.names else labels.get(right.variable)
            if arrow.left == arrow.right or not first or not second or len(arrow.element.names) != 1:
                continue
            source, target = (second, first) if arrow.left else (first, second)
            kind = arrow.element.names[0]
            is_right, is_symmetric = (source, kind, target) in schema.links, (target, kind, source) in schema.links
            if not is_right or is_symmetric:
                continue
            inside = tokens[arrow.element.start : arrow.element.end]
            dash, less, more = (Token(Kind.MARK, mark) for mark in "-<>")
            turned = [dash, *inside, dash, more] if arrow.left else [less, dash, *inside, dash]
            yield render_tokens([*tokens[: arrow.start], *turned, *tokens[arrow.end :]])


def _name_places(tokens: tuple[Token, ...]) -> Iterator[tuple[str, int]]:
    for chain in find_chains(tokens, match_brackets(tokens)):
        for node in chain.nodes:
            yield from (("label", at) for at in range(node.start, node.end) if _is_first_name(tokens, at, node.names))
        for arrow in chain.arrows:
            span = range(arrow.element.start, arrow.element.end)
            yield from (("type", at) for at in span if _is_first_name(tokens, at, arrow.element.names))
    for index, token in enumerate(tokens):
        is_access = token.is_name and token_at(tokens, index - 1).is_mark(".") and token_at(tokens, index - 2).is_name
        is_chained = token_at(tokens, index - 3).is_mark(".") or token_at(tokens, index + 1).is_mark("(")
        if is_access and not is_chained:
            yield "property", index


def _is_first_name(tokens: tuple[Token, ...], index: int, names: tuple[str, ...]) -> bool:
    return tokens[index].is_name and tokens[index].text in names[:1] and tokens[index - 1].is_mark(":")


def _with(tokens: tuple[Token, ...], index: int, name: str) -> str:
    return render_tokens([*tokens[:index], Token(Kind.NAME, name), *tokens[index + 1 :]])


def render_tokens(tokens: Sequence[Token]) -> str:
    """Cypher again, one space between tokens, and none inside an arrow or a name with dots."""
    text = ""
    for index, token in enumerate(tokens):
        glued = index > 0 and (
            (token.is_mark("-", ">") and tokens[index - 1].is_mark("-", "<", "]"))
            or token.is_mark(".")
            or tokens[index - 1].is_mark(".")
            or (token.is_mark("[", "(") and tokens[index - 1].is_mark("-"))
        )
        text += ("" if glued or not text else " ") + render_token(token)
    return text
