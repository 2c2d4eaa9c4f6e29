"""Gathers from a statement what rows would tell it from a similar one: its conditions, groups, limits and joins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from launcher.quality.sql_facts import Condition, Facts, GroupCondition, Operator, Place, Schema, Value
from launcher.quality.sql_keys import is_whole

if TYPE_CHECKING:
    from sqlglot import exp

_MAX_DIGITS = 18  # of a whole number that SQLite keeps as such
_OPERATORS: dict[str, Operator] = {
    "EQ": "=", "Is": "=", "NEQ": "<>", "LT": "<", "LTE": "<=", "GT": ">", "GTE": ">=", "Like": "like", "ILike": "like",
}  # fmt: skip
_FLIPPED: dict[Operator, Operator] = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def gather_facts(statement: exp.Expr, schema: Schema) -> Facts:
    """What the statement compares with what. Names it does not know are left out: running it will tell. Of a statement
    of a shape that nobody thought of nothing is gathered: it is judged on plain rows."""
    try:
        return _gather(statement, schema)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return Facts()


def _gather(statement: exp.Expr, schema: Schema) -> Facts:
    from sqlglot import exp

    places = _Places(statement, schema)
    conditions: list[Condition] = []
    groups: list[GroupCondition] = []
    links: list[tuple[Place, Place]] = []
    for node in statement.find_all(exp.Predicate):
        for condition in _conditions_of(node, places):
            if isinstance(condition, Condition):
                conditions.append(condition)
            else:
                groups.append(condition)
        links += _links_of(node, places)
    limits = [int(limit.expression.this) for limit in statement.find_all(exp.Limit) if is_whole(limit.expression)]
    return Facts(
        tables=tuple(places.tables),
        conditions=tuple(conditions),
        groups=tuple(groups),
        limits=tuple(limits),
        links=tuple(links),
    )


class _Places:
    """Which column of which table a name means; a bare name may mean that of several tables."""

    def __init__(self, statement: exp.Expr, schema: Schema) -> None:
        from sqlglot import exp

        self._schema = schema
        self._aliases: dict[str, list[str]] = {}
        for table in statement.find_all(exp.Table):
            name = table.name.lower()
            if name in schema:
                self._aliases.setdefault(table.alias_or_name.lower(), []).append(name)
        self.tables = list(dict.fromkeys(name for names in self._aliases.values() for name in names))

    def find(self, column: exp.Column) -> list[Place]:
        tables = self._aliases.get(column.table.lower(), []) if column.table else self.tables
        name = column.name.lower()
        return [(table, name) for table in dict.fromkeys(tables) if name in self._schema[table].columns]


def _conditions_of(node: exp.Expr, places: _Places) -> Iterator[Condition | GroupCondition]:
    from sqlglot import exp

    outer = node.find_ancestor(exp.Not, exp.Query)
    negated = isinstance(outer, exp.Not) and outer.this.unnest() is node
    compared = _take_apart(node)
    if compared is None:
        return
    side, operator, right = compared
    if any(part.find(exp.Column, exp.Query, exp.AggFunc) for part in right) or side.find(exp.Query):
        return
    if len(right) == 1 and isinstance(right[0], exp.Null):
        yield from _compare(side, "null", (), negated, places)
    elif values := tuple(value for part in right for value in _values_of(part)):
        yield from _compare(side, operator, values, negated, places)


def _take_apart(node: exp.Expr) -> tuple[exp.Expr, Operator, list[exp.Expr]] | None:
    """The side that is looked at, and what it is compared with."""
    from sqlglot import exp

    if isinstance(node, exp.Between):
        return node.this, "between", [node.args["low"], node.args["high"]]
    if isinstance(node, exp.In):
        return None if node.args.get("query") else (node.this, "in", node.expressions)
    operator = _OPERATORS.get(type(node).__name__)
    if operator is None:
        return None
    if node.this.find(exp.Column, exp.AggFunc):
        return node.this, operator, [node.expression]
    return node.expression, _FLIPPED.get(operator, operator), [node.this]


def _compare(
    side: exp.Expr, operator: Operator, values: tuple[Value, ...], negated: bool, places: _Places
) -> Iterator[Condition | GroupCondition]:
    from sqlglot import exp

    side = side.unnest()
    column = side.find(exp.Column)
    aggregate = side.find(exp.AggFunc)
    if aggregate is not None:
        found = places.find(column) if column is not None and not isinstance(aggregate, exp.Count) else []
        for number in values:
            if isinstance(number, int | float):
                yield GroupCondition(place=found[0] if found else None, operator=operator, value=number)
        return
    if column is None:
        return
    for place in places.find(column):
        known = operator if _is_as_good_as(side, column) else "other"
        yield Condition(place=place, operator=known, values=values, negated=negated)


def _is_as_good_as(side: exp.Expr, column: exp.Column) -> bool:
    """LOWER(x), CAST(x AS ...): the same edges, near enough."""
    from sqlglot import exp

    while isinstance(side, exp.Lower | exp.Upper | exp.Trim | exp.Cast | exp.Coalesce | exp.Round | exp.Paren):
        side = side.this
    return side is column


def _values_of(node: exp.Expr) -> Iterator[Value]:
    from sqlglot import exp

    for literal in node.find_all(exp.Literal, exp.Boolean):
        if isinstance(literal, exp.Boolean):
            yield int(literal.this)
        elif literal.is_string:
            yield str(literal.this)
        else:
            sign = -1 if isinstance(literal.parent, exp.Neg) else 1
            text = str(literal.this)
            try:
                yield sign * (int(text) if text.isdigit() and len(text) < _MAX_DIGITS else float(text))
            except ValueError:  # 0x1F and the like
                continue


def _links_of(node: exp.Expr, places: _Places) -> Iterator[tuple[Place, Place]]:
    """a.x = b.y, and x IN (SELECT y ...)."""
    from sqlglot import exp

    if isinstance(node, exp.EQ):
        left, right = node.this.unnest(), node.expression.unnest()
    elif isinstance(node, exp.In) and node.args.get("query"):
        query = node.args["query"].unnest()
        outputs = query.selects if isinstance(query, exp.Query) else []
        if len(outputs) != 1:
            return
        left, right = node.this.unnest(), outputs[0].unalias()
    else:
        return
    if isinstance(left, exp.Column) and isinstance(right, exp.Column):
        for one in places.find(left):
            for other in places.find(right):
                if one[0] != other[0]:
                    yield one, other
