"""Generate small graphs on which different queries return different rows: values are near the queries' literals."""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from enum import StrEnum

from launcher.judges.cypher.lexer import Kind, Token, match_brackets, token_at
from launcher.judges.cypher.patterns import find_chains
from launcher.judges.cypher.schema import GraphSchema

Value = str | int | float | bool | date | datetime | tuple[str, ...] | None
Literals = Mapping[str, Sequence[Token]]  # by property: the literals it is compared with

_TYPES = {
    "STRING": "STRING",
    "INTEGER": "INT64",
    "LONG": "INT64",
    "INT": "INT64",
    "FLOAT": "DOUBLE",
    "DOUBLE": "DOUBLE",
    "NUMBER": "DOUBLE",
    "BOOLEAN": "BOOLEAN",
    "BOOL": "BOOLEAN",
    "DATE": "DATE",
    "DATE_TIME": "TIMESTAMP",
    "DATETIME": "TIMESTAMP",
    "LOCAL_DATE_TIME": "TIMESTAMP",
    "LOCALDATETIME": "TIMESTAMP",
    "LIST": "STRING[]",
    "STRINGARRAY": "STRING[]",
}
_NUM_NODES = 12
_NUM_EDGES = 14  # per link: enough for nodes with none, one and many
_KEY = "_i"
# Of the first five, two differ by case only, one begins with a space, and their order without case is another one.
_WORDS = (
    "Amber", "amber", "birch", " Coral", "Delta", "Ember", "Fjord", "Grove", "Hazel", "Inlet", "Jade", "Kelp", "Lotus",
    "Maple",
)  # fmt: skip
_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)")


class Variety(StrEnum):
    """How much the values of a property vary; each variety exposes differences of queries that the others hide."""

    DISTINCT = "distinct"  # no ties
    MIXED = "mixed"  # ties and missing values
    ALIKE = "alike"  # one value is mean, minimum and maximum


_VARIETIES = (Variety.DISTINCT, Variety.MIXED, Variety.DISTINCT, Variety.MIXED, Variety.ALIKE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """Tables of a test graph: labels and relationship types that two queries use, with the engine's column types."""

    nodes: Mapping[str, Mapping[str, str]]
    relationships: Mapping[str, Mapping[str, str]]
    links: tuple[tuple[str, str, str], ...]


def make_tables(schema: GraphSchema, queries: Sequence[Sequence[Token]]) -> Tables:
    """Return tables for the labels and types that the queries name, or for all of them if a pattern names none."""
    named = {token.text for query in queries for token in query if token.is_name}
    labels, kinds = named & set(schema.nodes), named & set(schema.relationships)
    everything = any(_has_open_arrow(query) for query in queries)
    links = sorted(link for link in schema.links if everything or link[1] in kinds)
    labels |= {label for link in links for label in (link[0], link[2])}
    if any(map(_has_open_node, queries)) or not (links or labels):
        labels = set(schema.nodes)
    return Tables(
        nodes={label: _columns(schema.nodes[label], named) for label in sorted(labels)},
        relationships={kind: _columns(schema.relationships[kind], named) for kind in sorted({it[1] for it in links})},
        links=tuple(links),
    )


def _has_open_arrow(tokens: Sequence[Token]) -> bool:
    chains = find_chains(tokens, match_brackets(tokens))
    return any(not arrow.element.names for chain in chains for arrow in chain.arrows)


def _has_open_node(tokens: Sequence[Token]) -> bool:
    """Return whether a pattern of the query is a single node without label or relationship, which matches all nodes."""
    chains = find_chains(tokens, match_brackets(tokens))
    known = {node.variable for chain in chains for node in chain.nodes if node.names or chain.arrows}
    return any(not chain.arrows and chain.nodes[0].variable not in known for chain in chains)


def _columns(properties: Mapping[str, str], named: Collection[str]) -> dict[str, str]:
    return {name: _TYPES[kind] for name, kind in properties.items() if name in named and kind in _TYPES}


def find_literals(queries: Sequence[Sequence[Token]]) -> dict[str, list[Token]]:
    """Return the literals that each property is compared with."""
    found: dict[str, list[Token]] = {}
    for tokens in queries:
        for index, token in enumerate(tokens):
            is_key = token_at(tokens, index + 1).is_mark(":") and token_at(tokens, index - 1).is_mark("{", ",")
            if not token.is_name or not (is_key or token_at(tokens, index - 1).is_mark(".")):
                continue
            for at in range(index + 1, min(index + 24, len(tokens))):
                is_joint = tokens[at].is_word("AND", "OR", "RETURN", "WITH", "MATCH")
                if tokens[at].is_mark("}") or (is_joint and not tokens[at - 1].is_word("STARTS", "ENDS")):
                    break
                if tokens[at].kind in (Kind.STRING, Kind.NUMBER) or tokens[at].is_word("NULL", "TRUE", "FALSE"):
                    found.setdefault(token.text, []).append(tokens[at])
    return found


def render_setup(
    tables: Tables,
    literals: Literals,
    *,
    number: int,
    seed: int,
    is_reversed: bool,
    empty: Collection[str] = (),
) -> list[str]:
    """Return the statements that create one graph; `is_reversed` reverses insertion, labels in `empty` get no nodes."""
    variety = _VARIETIES[number % len(_VARIETIES)]
    dice = random.Random(f"{seed} {number}")
    statements = [_render_node_table(label, columns) for label, columns in tables.nodes.items()]
    statements += [_render_relationship_table(kind, tables) for kind in tables.relationships]
    for label, columns in tables.nodes.items():
        if label in empty:
            continue
        rows = _make_rows(dice, columns, literals, _NUM_NODES, variety)
        rows = [{_KEY: key, **row} for key, row in enumerate(rows)]
        rows = rows[::-1] if is_reversed else rows
        statements.append("CREATE " + ", ".join(f"(:{_quote(label)} {_render_map(row)})" for row in rows))
    for link in tables.links:
        if link[0] in empty or link[2] in empty:
            continue
        ends = _make_ends(dice, is_loop=link[0] == link[2])
        rows = _make_rows(dice, tables.relationships[link[1]], literals, len(ends), variety)
        edges = list(zip(ends, rows, strict=True))
        statements.append(_render_edges(link, edges[::-1] if is_reversed else edges))
    return statements


def _make_rows(
    dice: random.Random, columns: Mapping[str, str], literals: Literals, number: int, variety: Variety
) -> list[dict[str, Value]]:
    """Return rows of property values in random order; some satisfy all conditions of the queries at once."""
    values = {name: _make_values(dice, kind, literals.get(name, ()), number, variety) for name, kind in columns.items()}
    rows = [{name: values[name][at] for name in columns} for at in range(number)]
    dice.shuffle(rows)
    return rows


def _make_ends(dice: random.Random, *, is_loop: bool) -> list[tuple[int, int]]:
    """Return edges as pairs of node numbers: nodes have no, one or many edges, and long paths if the link is a loop."""
    chain = [(at, at + 1) for at in range(_NUM_NODES - 2)] if is_loop else []
    number = 3 if is_loop else _NUM_EDGES
    ends = chain + [(dice.randrange(_NUM_NODES - 1), dice.randrange(1, _NUM_NODES)) for _ in range(number)]
    return ends + ends[-3:]  # duplicate edges


def _render_edges(link: tuple[str, str, str], edges: Sequence[tuple[tuple[int, int], Mapping[str, Value]]]) -> str:
    """Return one UNWIND statement that creates all edges of a link; their ends and properties are in lists."""
    source, kind, target = link
    ends = [_render_value([edge[0][side] for edge in edges]) for side in (0, 1)]
    columns = {name: _render_value([edge[1][name] for edge in edges]) for name in edges[0][1]}
    row = ", ".join(f"{_quote(name)}: {values}[k]" for name, values in columns.items())
    return (
        f"UNWIND {_render_value(list(range(1, len(edges) + 1)))} AS k "
        f"MATCH (a:{_quote(source)}), (b:{_quote(target)}) WHERE a.{_KEY} = {ends[0]}[k] AND b.{_KEY} = {ends[1]}[k] "
        f"CREATE (a)-[:{_quote(kind)} {{{row}}}]->(b)"
    )


def _render_node_table(label: str, columns: Mapping[str, str]) -> str:
    described = "".join(f", {_quote(name)} {kind}" for name, kind in columns.items())
    return f"CREATE NODE TABLE {_quote(label)}({_KEY} INT64 PRIMARY KEY{described})"


def _render_relationship_table(kind: str, tables: Tables) -> str:
    ends = ", ".join(f"FROM {_quote(link[0])} TO {_quote(link[2])}" for link in tables.links if link[1] == kind)
    described = "".join(f", {_quote(name)} {type_}" for name, type_ in tables.relationships[kind].items())
    return f"CREATE REL TABLE {_quote(kind)}({ends}{described})"


def _make_values(
    dice: random.Random, kind: str, literals: Sequence[Token], number: int, variety: Variety
) -> list[Value]:
    """Return the values of a property for all rows; as `variety` defines, some are near the literals, equal or NULL."""
    near, far = _near(kind, literals), _far(dice, kind)
    dice.shuffle(near)
    if variety is Variety.ALIKE:
        return [(near or far)[0]] * number
    if variety is Variety.DISTINCT:
        pool = list(dict.fromkeys(near))[: number // 2]
        dice.shuffle(far)
        pool += [value for value in far if value not in pool]
        return (pool * number)[:number]
    values = [dice.choice(near) for _ in range(number // 2)] if near else []
    values += [None if dice.random() < 0.25 else dice.choice(far[:5]) for _ in range(number - len(values))]
    return values


def _near(kind: str, literals: Sequence[Token]) -> list[Value]:
    found: list[Value] = []
    for literal in literals[:6]:
        text = literal.text
        if literal.is_word("NULL"):
            found.append(None)
            continue
        match kind:
            case "STRING" if literal.kind is Kind.STRING:
                found += [text, text, f"{text}x", f"x{text}", f"x{text}x", text.swapcase(), f" {text}", f"{text} "]
            case "STRING[]":
                found += [(text, "Amber"), ("Birch", text), (text,), ("Coral",)]
            case "BOOLEAN":
                found.append(literal.is_word("TRUE"))
            case "INT64" | "DOUBLE" if literal.kind is Kind.NUMBER and text.replace(".", "", 1).isdigit():
                number = float(text) if "." in text or kind == "DOUBLE" else int(text)
                if abs(number) < 2**53:
                    found += [number, number, number + 1, number - 1]
            case "DATE" | "TIMESTAMP":
                found += _near_dates(kind, text)
    return [int(value) if kind == "INT64" and isinstance(value, float) else value for value in found]


def _near_dates(kind: str, text: str) -> list[Value]:
    match = _DATE.match(text)
    try:
        if match:
            day = datetime(int(match[1]), int(match[2]), int(match[3]))
        elif re.fullmatch(r"(1[5-9]|20)\d\d", text):
            day = datetime(int(text), 6, 15)
        else:
            return []
        moved = [day, day + timedelta(days=1), day - timedelta(days=1), day + timedelta(days=366)]
    except (ValueError, OverflowError):
        return []
    return [one.date() if kind == "DATE" else one for one in moved]


def _far(dice: random.Random, kind: str) -> list[Value]:
    match kind:
        case "STRING":
            return [*_WORDS]
        case "STRING[]":
            return [(word, _WORDS[at]) for at, word in enumerate(reversed(_WORDS))]
        case "INT64":
            return [dice.randrange(at * 40, at * 40 + 40) for at in range(14)]
        case "DOUBLE":
            return [dice.randrange(at * 40, at * 40 + 40) + 0.5 for at in range(14)]
        case "BOOLEAN":
            return [True, False]
        case "DATE":
            return [date(1990 + 3 * at, 1 + at % 12, 3 + at) for at in range(14)]
        case _:
            return [datetime(1990 + 3 * at, 1 + at % 12, 3 + at) for at in range(14)]


def _render_map(row: Mapping[str, Value]) -> str:
    return "{" + ", ".join(f"{_quote(name)}: {_render_value(value)}" for name, value in row.items()) + "}"


def _render_value(value: Value | Sequence[Value]) -> str:
    match value:
        case None:
            return "NULL"
        case bool():
            return str(value).lower()
        case datetime():
            return f"timestamp('{value.isoformat()}')"
        case date():
            return f"date('{value.isoformat()}')"
        case str():
            escaped = value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")
            return f"'{escaped}'"
        case list() | tuple():
            return "[" + ", ".join(map(_render_value, value)) + "]"
    return repr(value)


def _quote(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
