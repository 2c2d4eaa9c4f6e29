"""By what a statement sorts, and where it stops: which rows of its result are tied, and which may be missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.quality.sql_facts import Keyed
from launcher.quality.sql_reading import DIALECT

if TYPE_CHECKING:
    from sqlglot import exp


def is_whole(node: exp.Expr | None) -> bool:
    from sqlglot import exp

    return isinstance(node, exp.Literal) and not node.is_string and str(node.this).isdigit()


def make_keyed(statement: exp.Expr) -> Keyed | None:
    """None: nobody can say which of its rows are tied. Without SQL: none is before another."""
    from sqlglot import exp

    if not isinstance(statement, exp.Select | exp.SetOperation):
        return None
    limit, offset = statement.args.get("limit"), statement.args.get("offset")
    if limit is not None and (not isinstance(limit, exp.Limit) or not is_whole(limit.expression)):
        return None
    if offset is not None and not is_whole(offset.expression):
        return None
    if limit is None and offset is None and statement.args.get("order") is None:
        return Keyed(sql="", keys=(), num_added=0, offset=0, limit=None)
    bare = statement.copy()
    bare.set("limit", None)
    bare.set("offset", None)
    keys = _add_keys(bare)
    if keys is None:
        return None
    return Keyed(
        sql=bare.sql(dialect=DIALECT),
        keys=tuple(keys),
        num_added=sum(1 for key in keys if key < 0),
        offset=int(offset.expression.this) if offset is not None else 0,
        limit=int(limit.expression.this) if limit is not None else None,
    )


def _add_keys(statement: exp.Select | exp.SetOperation) -> list[int] | None:
    """Columns that are sorted by, added where the statement does not show them."""
    from sqlglot import exp

    order = statement.args.get("order")
    if order is None:
        return []
    outputs = statement.selects
    if any(ordered.find(exp.Collate) for ordered in order.expressions):
        return None
    starred = any(output.is_star for output in outputs)
    sources = [output.unalias().sql(dialect=DIALECT).lower() for output in outputs]
    names = [output.alias_or_name.lower() for output in outputs]
    keys: list[int] = []
    added: list[exp.Expr] = []
    for ordered in order.expressions:
        expression = ordered.this.unnest()
        text = expression.sql(dialect=DIALECT).lower()
        bare_name = expression.name.lower() if isinstance(expression, exp.Column) and not expression.table else None
        if is_whole(expression):
            if starred:
                return None
            keys.append(int(expression.this) - 1)
        elif not starred and bare_name in names:
            keys.append(names.index(bare_name or ""))
        elif not starred and text in sources:
            keys.append(sources.index(text))
        elif isinstance(statement, exp.Select) and not statement.args.get("distinct"):
            added.append(expression.copy())
            keys.append(-len(added))
        else:
            return None
    num_added = len(added)
    if isinstance(statement, exp.Select):
        for number, expression in enumerate(added):
            statement.select(exp.alias_(expression, f"sort_key_{number}"), copy=False)
    return [key if key >= 0 else -(num_added + key + 1) for key in keys]
