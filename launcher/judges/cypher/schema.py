"""Graph schemas, parsed from the context of a row, which may be in one of several notations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

MAX_SCHEMA_CHARACTERS = 200_000


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSchema:
    """Labels and relationship types with their typed properties, and the labels that relationships connect."""

    nodes: Mapping[str, Mapping[str, str]]
    relationships: Mapping[str, Mapping[str, str]]
    links: frozenset[tuple[str, str, str]]  # (start label, type, end label)


_NAME = r"(?:`([^`]+)`|([\w ./-]+?))"
# With variables, and with properties of the relationship: (a:Person)-[k:KNOWS {since: INTEGER}]->(b:Person).
_LINK = re.compile(
    rf"\(\s*\w*\s*:\s*{_NAME}\s*\)\s*-\s*\[\s*\w*\s*:\s*{_NAME}\s*(?:\{{([^{{}}]*)\}}\s*)?\]\s*->\s*\(\s*\w*\s*:\s*{_NAME}\s*\)"
)
_LINK_OBJECT = re.compile(
    r"\{['\"]start['\"]: ?['\"]([^'\"]+)['\"], ?['\"]type['\"]: ?['\"]([^'\"]+)['\"], ?"
    r"['\"]end['\"]: ?['\"]([^'\"]+)['\"],? ?\}"
)
_BRACED = re.compile(r"(?:^|(?<=\}))[\s,*-]*:?`?([\w][\w ./-]*?)`? *\{([^{}]*)\}", re.MULTILINE)
_BULLET = re.compile(r"^\s*- \*\*`?(.+?)`?\*\*", re.MULTILINE)
_BULLET_PROPERTY = re.compile(r"^\s+- `([^`:]+)`?: *([A-Za-z_]\w*)", re.MULTILINE)
_OBJECT = re.compile(r"\{['\"]properties['\"]: ?\[(.*?)\], ?['\"](labels|type)['\"]: ?['\"]([^'\"]+)['\"]\}", re.DOTALL)
_OBJECT_PROPERTY = re.compile(
    r"['\"]property['\"]: ?['\"]([^'\"]+)['\"], ?['\"]type['\"]: ?['\"](\w+)|"
    r"['\"]type['\"]: ?['\"](\w+)['\"], ?['\"]property['\"]: ?['\"]([^'\"]+)"
)
_PROPERTY = re.compile(r"[`'\"]?([^\s`'\":,{}][^`'\":,{}]*)[`'\"]?\s*:\s*[`'\"]?([A-Za-z_]\w*)")
_ABOUT_RELATIONSHIPS = re.compile(r"^.*\brelationship.*propert.*$", re.MULTILINE | re.IGNORECASE)
_ABOUT_NODES = re.compile(r"^.*\bnode.*propert.*$", re.MULTILINE | re.IGNORECASE)


@lru_cache(maxsize=256)
def load_graph_schema(text: str) -> GraphSchema | None:
    """Parse a schema; None if the text contains none."""
    text = text[:MAX_SCHEMA_CHARACTERS]
    links = {tuple(_first(match, at) for at in (1, 3, 6)) for match in _LINK.finditer(text)}
    links |= {(match[1], match[2], match[3]) for match in _LINK_OBJECT.finditer(text)}
    nodes: dict[str, dict[str, str]] = {}
    relationships: dict[str, dict[str, str]] = {}
    plain = _LINK_OBJECT.sub("", _LINK.sub("", text))
    for owner, at, properties in (*_read_braced(plain), *_read_bullets(plain), *_read_objects(plain)):
        known = relationships if _is_relationship(plain, owner, at, links) else nodes
        known.setdefault(owner, {}).update(properties)
    for match in _LINK.finditer(text):
        relationships.setdefault(_first(match, 3), {}).update(_read_properties(match[5] or ""))
    for source, kind, target in links:
        nodes.setdefault(source, {})
        nodes.setdefault(target, {})
        relationships.setdefault(kind, {})
    if not nodes and not relationships:
        return None
    triples = frozenset((source, kind, target) for source, kind, target in links)
    return GraphSchema(nodes=nodes, relationships=relationships, links=triples)


def _first(match: re.Match[str], at: int) -> str:
    return match[at] or match[at + 1]


def _is_relationship(text: str, owner: str, at: int, links: set[tuple[str, ...]]) -> bool:
    """Return whether a schema entry is a relationship type: by the headline above it, or else by the schema's links."""
    nodes_at = max((match.start() for match in _ABOUT_NODES.finditer(text, 0, at)), default=-1)
    relationships_at = max((match.start() for match in _ABOUT_RELATIONSHIPS.finditer(text, 0, at)), default=-1)
    if nodes_at == relationships_at:
        return any(link[1] == owner for link in links) and not any(owner in (link[0], link[2]) for link in links)
    return relationships_at > nodes_at


_Described = list[tuple[str, int, dict[str, str]]]  # a label or type, its position, its properties


def _read_braced(text: str) -> _Described:
    """Parse schema entries like `Movie {title: STRING, released: INTEGER}`."""
    return [(match[1].strip(), match.start(1), _read_properties(match[2])) for match in _BRACED.finditer(text)]


def _read_properties(text: str) -> dict[str, str]:
    return {name.strip(): kind.upper() for name, kind in _PROPERTY.findall(text)}


def _read_bullets(text: str) -> _Described:
    """Parse schema entries like `- **Movie**`, followed by one line per property with an example."""
    described = []
    heads = list(_BULLET.finditer(text))
    for at, head in enumerate(heads):
        block = text[head.end() : heads[at + 1].start() if at + 1 < len(heads) else len(text)]
        properties = {name.strip(): kind.upper() for name, kind in _BULLET_PROPERTY.findall(block)}
        described.append((head[1], head.start(), properties))
    return described


def _read_objects(text: str) -> _Described:
    """Parse entries like `{'properties': [{'property': 'title', 'type': 'STRING'}], 'labels': 'Movie'}`."""
    return [
        (
            match[3],
            match.start(),
            {one[0] or one[3]: (one[1] or one[2]).upper() for one in _OBJECT_PROPERTY.findall(match[1])},
        )
        for match in _OBJECT.finditer(text)
    ]
