"""Check a query against its graph schema: labels, types, properties of bound variables, and directions.

A variable has the labels of its patterns or, without any, those that its relationships connect in the schema. If they
are unknown, only names that occur nowhere in the schema are reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.judges.cypher.lexer import Kind, Token, find_enclosing_brackets, match_brackets, token_at, words
from launcher.judges.cypher.patterns import Arrow, Chain, Element, find_chains, read_keys
from launcher.judges.cypher.schema import GraphSchema

# Components of dates, durations and points, which are not properties of nodes.
_COMPONENTS = words(
    "year quarter month week weekyear dayofquarter quarterday day dayofweek weekday ordinalday hour minute second "
    "millisecond microsecond nanosecond timezone offset offsetminutes offsetseconds epochmillis epochseconds years "
    "quarters quartersofyear months monthsofyear monthsofquarter weeks days daysofweek hours minutes minutesofhour "
    "seconds secondsofminute milliseconds millisecondsofsecond microseconds microsecondsofsecond nanoseconds "
    "nanosecondsofsecond x y z longitude latitude height crs srid"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SchemaFaults:
    """Messages about a query's schema violations: unknown names, and directions that no link of the schema has."""

    names: tuple[str, ...]
    directions: tuple[str, ...]


@dataclass(slots=True)
class _Scope:
    """The labels of nodes and types of relationships that the variables in one part of a UNION are bound to."""

    nodes: dict[str, set[str]] = field(default_factory=dict)  # empty: a node without a known label
    relationships: dict[str, set[str]] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)  # may be bound to anything


def find_schema_faults(tokens: Sequence[Token], schema: GraphSchema) -> SchemaFaults:
    """Return the schema violations of a query."""
    names: list[str] = []
    directions: list[str] = []
    spare = _spare_names(tokens)
    for part in _split_parts(tokens):
        scope = _Scope()
        pairs = match_brackets(part)
        chains = find_chains(part, pairs)
        _bind(part, chains, scope)
        names += _name_faults(part, chains, schema)
        directions += _direction_faults(chains, scope, schema)
        _infer(chains, scope, schema)
        names += _property_faults(part, pairs, chains, scope, schema, spare)
    return SchemaFaults(names=tuple(dict.fromkeys(names)), directions=tuple(dict.fromkeys(directions)))


def _split_parts(tokens: Sequence[Token]) -> list[Sequence[Token]]:
    """Split a query at each UNION, after which no variable is bound; variables stay bound after a WITH."""
    cuts = [index for index, token in enumerate(tokens) if token.is_word("UNION")]
    return [tokens[start:end] for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]


def _spare_names(tokens: Sequence[Token]) -> frozenset[str]:
    """Return the keys of a query's map literals and map projections, which need not be properties in the schema."""
    pairs = match_brackets(tokens)
    keys = {key for index in pairs if tokens[index].is_mark("{") for key in read_keys(tokens, pairs, index)}
    keys |= {
        tokens[index].text
        for index in range(2, len(tokens))
        if tokens[index].is_name and tokens[index - 1].is_mark(".") and tokens[index - 2].is_mark("{", ",")
    }
    return frozenset(keys)


def _bind(part: Sequence[Token], chains: Iterable[Chain], scope: _Scope) -> None:
    for chain in chains:
        for node in chain.nodes:
            if node.variable:
                scope.nodes.setdefault(node.variable, set()).update(node.names)
        for arrow in chain.arrows:
            if arrow.element.variable:
                scope.relationships.setdefault(arrow.element.variable, set()).update(arrow.element.names)
                if arrow.is_long:
                    scope.open.add(arrow.element.variable)
    inside = {index for chain in chains for index in range(chain.start, chain.end)}
    is_last = False  # after RETURN, `a.name AS a` does not rebind a
    for index, token in enumerate(part):
        if index in inside or not token.is_name:
            continue
        is_last = (is_last or token.is_word("RETURN")) and not token.is_word("WITH", "MATCH")
        is_loop = token_at(part, index + 1).is_word("IN") and token_at(part, index - 1).is_mark("(", "[")
        if is_loop or token_at(part, index - 1).is_word("YIELD"):
            scope.open.add(token.text)
        elif token_at(part, index - 1).is_word("AS") and not (is_last and token.text in scope.nodes):
            _alias(part, index, scope)
        elif token.text in scope.nodes and token_at(part, index + 1).is_mark(":"):
            scope.nodes[token.text].update(_read_labels(part, index + 1))


def _read_labels(part: Sequence[Token], at: int) -> list[str]:
    """Return the labels in an expression such as `a:A:B` or `a:A|B` outside of a pattern."""
    labels = []
    while token_at(part, at).is_mark(":", "&", "|") and token_at(part, at + 1).is_name:
        labels.append(part[at + 1].text)
        at += 2
    return labels


def _alias(part: Sequence[Token], index: int, scope: _Scope) -> None:
    """Bind `b` in `a AS b` to the labels or types of `a`; an alias of any other expression may be bound to anything."""
    new, source, before = part[index].text, token_at(part, index - 2), token_at(part, index - 3)
    is_plain = source.is_name and (before.is_mark(",") or before.is_word("WITH", "DISTINCT", "RETURN"))
    if is_plain and source.text in scope.nodes:
        scope.nodes.setdefault(new, set()).update(scope.nodes[source.text])
    elif is_plain and source.text in scope.relationships:
        scope.relationships.setdefault(new, set()).update(scope.relationships[source.text])
    else:
        scope.open.add(new)


def _name_faults(part: Sequence[Token], chains: Iterable[Chain], schema: GraphSchema) -> Iterable[str]:
    inside: set[int] = set()
    holders = find_enclosing_brackets(part)
    for chain in chains:
        inside.update(range(chain.start, chain.end))
        for node in chain.nodes:
            yield from (f"no label {name}" for name in (*node.names, *node.denied) if name not in schema.nodes)
        for arrow in chain.arrows:
            used = (*arrow.element.names, *arrow.element.denied)
            yield from (f"no relationship type {name}" for name in used if name not in schema.relationships)
    for index, token in enumerate(part):
        if index in inside or not token.is_name or token_at(part, index - 1).is_mark("{", ".", "$", ":", "|", "&"):
            continue
        is_key = holders[index] == "{" and token_at(part, index - 1).is_mark(",")  # `, key: value` of a map
        if token_at(part, index + 1).is_mark(":") and not is_key:
            known = {*schema.nodes, *schema.relationships}
            yield from (f"no label {name}" for name in _read_labels(part, index + 1) if name not in known)


def _direction_faults(chains: Iterable[Chain], scope: _Scope, schema: GraphSchema) -> Iterable[str]:
    if not schema.links:
        return
    for chain in chains:
        for left, arrow, right in zip(chain.nodes, chain.arrows, chain.nodes[1:], strict=False):
            first, second = _labels(left, scope, schema), _labels(right, scope, schema)
            kinds = [name for name in arrow.element.names if name in schema.relationships]
            if len(kinds) != len(arrow.element.names):
                continue  # reported as an unknown name
            forward = arrow.right and not arrow.left
            backward = arrow.left and not arrow.right
            fits = (not backward and _joins(schema, first, kinds, second, arrow)) or (
                not forward and _joins(schema, second, kinds, first, arrow)
            )
            if not fits:
                yield _describe(first, kinds, second, backward=backward, directed=forward or backward)


def _labels(node: Element, scope: _Scope, schema: GraphSchema) -> frozenset[str]:
    """Return a node's labels that the schema has, written in this pattern or elsewhere for the same variable."""
    said = set(node.names) | scope.nodes.get(node.variable, set())
    return frozenset(said & set(schema.nodes))


def _joins(schema: GraphSchema, first: frozenset[str], kinds: list[str], second: frozenset[str], arrow: Arrow) -> bool:
    leaving = [link for link in schema.links if (not first or link[0] in first) and (not kinds or link[1] in kinds)]
    if not arrow.is_long:
        return any(not second or link[2] in second for link in leaving)
    arriving = [link for link in schema.links if (not second or link[2] in second) and (not kinds or link[1] in kinds)]
    return bool(leaving) and bool(arriving)


def _describe(
    first: frozenset[str], kinds: list[str], second: frozenset[str], *, backward: bool, directed: bool
) -> str:
    source, target = (second, first) if backward else (first, second)
    written = [f"(:{'|'.join(sorted(side))})" if side else "()" for side in (source, target)]
    return f"no {written[0]}-[{':' + '|'.join(kinds) if kinds else ''}]-{'>' if directed else ''}{written[1]}"


def _infer(chains: Iterable[Chain], scope: _Scope, schema: GraphSchema) -> None:
    """Infer the labels of unlabelled nodes from their relationships; two passes cover chains of such nodes."""
    for _ in range(2):
        for chain in chains:
            for left, arrow, right in zip(chain.nodes, chain.arrows, chain.nodes[1:], strict=False):
                if arrow.element.names and not arrow.is_long:
                    _infer_end(left, arrow, right, scope, schema, at_start=not arrow.left)
                    _infer_end(right, arrow, left, scope, schema, at_start=not arrow.right)


def _infer_end(
    node: Element, arrow: Arrow, other: Element, scope: _Scope, schema: GraphSchema, *, at_start: bool
) -> None:
    known = scope.nodes.get(node.variable)
    if known is None or known:
        return
    undirected = arrow.left == arrow.right
    there = _labels(other, scope, schema)
    labels: set[str] = set()
    for source, kind, target in schema.links:
        if kind not in arrow.element.names:
            continue
        if (at_start or undirected) and (not there or target in there):
            labels.add(source)
        if (not at_start or undirected) and (not there or source in there):
            labels.add(target)
    known.update(labels)


def _property_faults(
    part: Sequence[Token],
    pairs: Mapping[int, int],
    chains: Iterable[Chain],
    scope: _Scope,
    schema: GraphSchema,
    spare: frozenset[str],
) -> Iterable[str]:
    for chain in chains:
        for node in chain.nodes:
            owners = set(node.names) | scope.nodes.get(node.variable, set())
            yield from _unknown(node.keys, owners, schema.nodes)
        for arrow in chain.arrows:
            yield from _unknown(arrow.element.keys, set(arrow.element.names), schema.relationships)
    everything = {name for one in (*schema.nodes.values(), *schema.relationships.values()) for name in one}
    for variable, name in _accesses(part, pairs):
        owned = scope.nodes.get(variable), scope.relationships.get(variable)
        if variable in scope.open or owned == (None, None):
            if name not in everything and name not in spare and name.lower() not in _COMPONENTS:
                yield f"no property {name}"
        elif owned[0] is not None:
            yield from _unknown((name,), owned[0], schema.nodes)
        else:
            yield from _unknown((name,), owned[1] or set(), schema.relationships)


def _unknown(keys: Iterable[str], owners: set[str], known: Mapping[str, Mapping[str, str]]) -> Iterable[str]:
    """Yield a message for each property that none of its possible owners has; unknown owners are reported elsewhere."""
    owners = owners & set(known) if owners else set(known)
    for key in keys:
        if owners and not any(key in known[owner] for owner in owners):
            of = f" of {'|'.join(sorted(owners))}" if len(owners) < 4 else ""
            yield f"no property {key}{of}"


def _accesses(part: Sequence[Token], pairs: Mapping[int, int]) -> Iterable[tuple[str, str]]:
    """Yield variable and property of `a.name`, `a['name']` and `a {.name}`, but not of `a.b.name` or function names."""
    for index, token in enumerate(part):
        if not token.is_name or token_at(part, index - 1).is_mark(".", ":", "$"):
            continue
        following = token_at(part, index + 1)
        if following.is_mark(".") and token_at(part, index + 2).is_name:
            if not _is_function(part, index):
                yield token.text, part[index + 2].text
        elif following.is_mark("[") and token_at(part, index + 2).kind is Kind.STRING:
            if token_at(part, index + 3).is_mark("]"):
                yield token.text, part[index + 2].text
        elif following.is_mark("{") and index + 1 in pairs and not token.is_word("EXISTS", "COUNT", "COLLECT", "CALL"):
            for at in range(index + 2, pairs[index + 1]):
                if part[at].is_mark(".") and part[at - 1].is_mark("{", ",") and token_at(part, at + 1).is_name:
                    yield token.text, part[at + 1].text


def _is_function(part: Sequence[Token], index: int) -> bool:
    """Return whether a name begins a function or procedure: `apoc.text.join(`, or `db.labels` after CALL."""
    at = index
    while token_at(part, at + 1).is_mark(".") and token_at(part, at + 2).is_name:
        at += 2
    return token_at(part, at + 1).is_mark("(") or token_at(part, index - 1).is_word("CALL")
