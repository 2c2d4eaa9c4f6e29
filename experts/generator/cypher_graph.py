"""The graph of a row: some labels, properties and relationship types of a domain, in one of several styles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experts.generator.dice import Dice
from experts.generator.domains import Domain, Entity, Field, Link
from experts.generator.naming import camel, pascal

_TYPES = {"int": "INTEGER", "year": "INTEGER", "money": "FLOAT", "rating": "FLOAT", "date": "DATE", "bool": "BOOLEAN"}


@dataclass(frozen=True)
class Node:
    entity: Entity
    fields: tuple[Field, ...]
    is_camel: bool

    @property
    def label(self) -> str:
        return pascal(self.entity.name)

    @property
    def variable(self) -> str:
        return self.entity.name[0]

    @property
    def key(self) -> str:
        return self.property(self.entity.key)

    def property(self, field: Field) -> str:
        return camel(field.name) if self.is_camel else field.name


@dataclass(frozen=True)
class Edge:
    """A relationship type. Its direction is the schema's choice: WROTE one way, WRITTEN_BY the other."""

    link: Link
    source: Node  # in the domain's direction
    target: Node
    reversed: bool

    @property
    def type(self) -> str:
        return self.link.backward if self.reversed else self.link.forward

    @property
    def fields(self) -> tuple[Field, ...]:
        return self.link.record.fields if self.link.record else ()

    def arrow(self, inside: str, from_source: bool) -> str:
        """Return the pattern between two nodes, from the source to the target or the other way round."""
        return f"-[{inside}]->" if from_source != self.reversed else f"<-[{inside}]-"

    def pattern(self, source: str, target: str, variable: str = "", from_source: bool = True) -> str:
        """`(source)-[:TYPE]->(target)`; with `from_source` off, the target is written first."""
        first, second = (source, target) if from_source else (target, source)
        return f"({first}){self.arrow(f'{variable}:{self.type}', from_source)}({second})"

    def render(self) -> str:
        first, second = (self.target, self.source) if self.reversed else (self.source, self.target)
        return f"(:{first.label})-[:{self.type}]->(:{second.label})"


@dataclass(frozen=True)
class Graph:
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    def render(self) -> str:
        lines = ["Node properties:", *(f"{node.label} {_braces(node, node.fields)}" for node in self.nodes)]
        described = [f"{edge.type} {_braces(edge.source, edge.fields)}" for edge in self.edges if edge.fields]
        lines += ["Relationship properties:", *described] if described else []
        return "\n".join([*lines, "Relationships:", *(edge.render() for edge in self.edges)])

    def edge_of(self, link: Link) -> Edge:
        return next(edge for edge in self.edges if edge.link is link)


@dataclass(frozen=True)
class Subject:
    """Subject of a question: a node, or the two ends of an edge, seen from either side."""

    graph: Graph
    edge: Edge
    near: Node
    far: Node

    @property
    def from_source(self) -> bool:
        return self.near is self.edge.source

    @property
    def verb(self) -> str:
        """The verb between near and far: `authors that wrote books`, `books written by authors`."""
        link = self.edge.link
        return f"that {link.active}" if self.from_source else link.passive

    @property
    def has_many(self) -> bool:
        """Whether near may have several of far: a book has one author, so counting them makes no sense."""
        return self.edge.link.record is not None or self.from_source

    @property
    def names(self) -> tuple[str, str]:
        """Variables of near and far, different from each other."""
        near, far = self.near.variable, self.far.variable
        return (near, far) if near != far else (near, far + "2")

    def pattern(self, near: str, far: str, relation: str = "") -> str:
        """Return the pattern from near to far; `near` and `far` are the texts in the parentheses."""
        source, target = (near, far) if self.from_source else (far, near)
        return self.edge.pattern(source, target, relation, self.from_source)

    def full_pattern(self, relation: str = "") -> str:
        near, far = self.names
        return self.pattern(f"{near}:{self.near.label}", f"{far}:{self.far.label}", relation)


def _braces(names: Node, fields: Sequence[Field]) -> str:
    return "{" + ", ".join(f"{names.property(field)}: {_TYPES.get(field.kind, 'STRING')}" for field in fields) + "}"


def draw_graph(dice: Dice, domain: Domain, links: Sequence[Link]) -> Graph:
    """Draw a graph with the given links and the entities at their ends."""
    is_camel = dice.chance(0.5)
    ends = {name for link in links for name in (link.source, link.target)}
    entities = [entity for entity in domain.entities if entity.name in ends]
    nodes = {entity.name: Node(entity, _draw_fields(dice, entity), is_camel) for entity in entities}
    edges = [Edge(link, nodes[link.source], nodes[link.target], dice.chance(0.4)) for link in dice.shuffle(links)]
    return Graph(tuple(dice.shuffle([nodes[entity.name] for entity in entities])), tuple(edges))


def _draw_fields(dice: Dice, entity: Entity) -> tuple[Field, ...]:
    return (entity.key, *dice.subset(entity.fields[1:], dice.between(2, 4)))
