"""Parse the Cypher of a row, and check every label, type, direction and property against the row's schema."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

_DESCRIBED = re.compile(r"^(\w+) \{(.*)\}$", re.MULTILINE)
_RELATIONSHIP = re.compile(r"^\(:(\w+)\)-\[:(\w+)\]->\(:(\w+)\)$", re.MULTILINE)
_NODE = r"\((?:(\w+))?(?::(\w+))?(?: \{([^}]*)\})?\)"
_PATTERN = re.compile(rf"(?={_NODE}(<?)-\[(\w*):(\w+)(?:\*[\d.]*)?\]-(>?){_NODE})")
_NODE_PATTERN = re.compile(_NODE)
_ACCESS = re.compile(r"\b([a-z]\w*)\.([A-Za-z]\w*)")
_STRING = re.compile(r"'[^']*'|\"[^\"]*\"")


@dataclass(frozen=True)
class Schema:
    properties: Mapping[str, Mapping[str, str]]  # of a label or a type: name -> type
    relationships: frozenset[tuple[str, str, str]]


def check_row(row: Mapping[str, str]) -> None:
    check_schema_use(row)
    check_syntax(row["cypher"])


def load_schema(text: str) -> Schema:
    properties = {
        match[1]: dict(entry.split(": ") for entry in match[2].split(", ")) for match in _DESCRIBED.finditer(text)
    }
    return Schema(properties, frozenset((m[1], m[2], m[3]) for m in _RELATIONSHIP.finditer(text)))


def check_schema_use(row: Mapping[str, str]) -> None:
    schema, cypher = load_schema(row["schema"]), _STRING.sub("''", row["cypher"])
    labels = _read_labels(cypher, schema)
    used = 0
    for source, kind, target in _read_patterns(cypher, labels):
        used += 1
        if (source, kind, target) not in schema.relationships:
            raise ValueError(f"no (:{source})-[:{kind}]->(:{target}) in the schema: {row['cypher']}")
    if used != len(re.findall(r"\[\w*:", cypher)):
        raise ValueError(f"a relationship was not understood: {row['cypher']}")
    for variable, name in _ACCESS.findall(cypher):
        _check_property(schema, labels, variable, name, row["cypher"])


def _check_property(schema: Schema, labels: Mapping[str, str], variable: str, name: str, cypher: str) -> None:
    owner = labels.get(variable)
    known = schema.properties.get(owner or "", {})
    if owner is None and name == "year" and any("DATE" in types.values() for types in schema.properties.values()):
        return  # the year of a date: node.property.year
    if name not in known:
        raise ValueError(f"{variable}.{name} is not in the schema: {cypher}")


def _read_labels(cypher: str, schema: Schema) -> dict[str, str]:
    """Return the label or type of each variable, which is unique in a query."""
    labels: dict[str, str] = {}
    for match in _NODE_PATTERN.finditer(cypher):
        variable, label, inside = match.groups()
        if label and label not in schema.properties:
            raise ValueError(f"no label {label} in the schema: {cypher}")
        if variable and label and labels.setdefault(variable, label) != label:
            raise ValueError(f"{variable} stands for two labels: {cypher}")
        for name in re.findall(r"(\w+):", inside or ""):
            if name not in schema.properties[label]:
                raise ValueError(f"no property {name} of {label}: {cypher}")
    for match in _PATTERN.finditer(cypher):
        if match[5]:
            labels[match[5]] = match[6]
    return labels


def _read_patterns(cypher: str, labels: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield source label, type and target label, in the direction of the arrow."""
    for match in _PATTERN.finditer(cypher):
        first, second = match[2] or labels.get(match[1], "?"), match[9] or labels.get(match[8], "?")
        if bool(match[4]) == bool(match[7]):
            raise ValueError(f"a relationship without one direction: {cypher}")
        yield (second, match[6], first) if match[4] else (first, match[6], second)


@cache
def _dialect() -> Any:
    from graphglot.dialect.neo4j import Neo4j  # type: ignore[import-untyped]  # only checking needs the parser

    return Neo4j()


# graphglot 0.14 parses `x IN [...] AND y` as `x IN ([...] AND y)` and then rejects the list in AND.
_MISTAKEN = frozenset({"boolean-operand-type"})


def check_syntax(cypher: str) -> None:
    """Check grammar and variables with graphglot, which accepts a query that returns nothing."""
    if not re.fullmatch(r"MATCH .+ RETURN .+", cypher):
        raise ValueError(f"not a MATCH with a RETURN: {cypher}")
    result = _dialect().validate(cypher)
    faults = [fault.message for fault in result.diagnostics or () if fault.feature_id not in _MISTAKEN]
    if result.error or faults or not result.expressions:
        raise ValueError(f"{result.error or faults or result.stage}: {cypher}")


_CONDITION = re.compile(
    r"\b\w+\.p(?:\.year)? (?:(?:[<>=]+|CONTAINS|STARTS WITH|ENDS WITH) (?:''|1|date\(''\)|true|false)"
    r"|IS (?:NOT )?NULL|IN \[[^\]]*\])"
)


def pieces_of(cypher: str) -> frozenset[str]:
    """Return the parts of a query, its frame and its conditions, with names and literals blanked.

    Queries of known parts parse alike unless a name is a keyword, so a quick check may skip them.
    """
    blank = re.sub(r"\b\d+(\.\d+)?\b", "1", _STRING.sub("''", cypher))
    blank = re.sub(r"(?<=:)[A-Za-z]\w*", "L", re.sub(r"\b[a-z]2?\b", "v", blank))
    blank = re.sub(r"(?<=\.)(?!year\b)[A-Za-z]\w*|\b\w+(?=: '')", "p", blank)
    return frozenset({_CONDITION.sub("C", blank), *(found.partition(".")[2] for found in _CONDITION.findall(blank))})
