"""Mutated reference queries: different results, unknown names, or only another spelling."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial

import sqlglot
from sqlglot import exp

from launcher.judges.base import ReferenceRow
from tests.conftest import ROOT

SAMPLE = ROOT / "experts" / "sql" / "sample"
Mutant = tuple[str, str]  # what was done, SQL


def load_rows(every: int = 1) -> list[ReferenceRow]:
    lines = [line for part in ("train", "validation", "test") for line in (SAMPLE / f"{part}.jsonl").open()]
    rows = [json.loads(line) for line in lines[::every]]
    return [
        ReferenceRow(instruction=row["sql_prompt"], context=row["sql_context"], reference=row["sql"]) for row in rows
    ]


def read(sql: str) -> exp.Expr:
    return sqlglot.parse_one(sql.replace("JOIN grant ", 'JOIN "grant" '), dialect="sqlite")


def write(tree: exp.Expr) -> str:
    return tree.sql(dialect="sqlite")


def columns_of(context: str) -> dict[str, dict[str, str]]:
    """By table: columns and their types."""
    tables = {}
    for create in sqlglot.parse(context.replace("TABLE grant ", 'TABLE "grant" '), dialect="sqlite"):
        assert create is not None
        tables[create.find(exp.Table).name] = {  # type: ignore[union-attr]
            column.name: column.args["kind"].sql() for column in create.find_all(exp.ColumnDef)
        }
    return tables


def make_mutants(row: ReferenceRow) -> Iterator[Mutant]:
    """Yield queries that ask for something else than the reference.

    Mutations that never change the meaning are left out, each with its reason; mutants that happen to be equivalent
    count as missed.
    """
    gold = read(row.reference)
    known = {write(gold)}
    for name, mutate in _MUTATIONS.items():
        count = len(list(mutate(gold.copy(), row.context)))
        for number in range(count):
            tree = gold.copy()
            for at, change in enumerate(mutate(tree, row.context)):
                if at == number:
                    change()
                    break
            sql = write(tree)
            if sql not in known:
                known.add(sql)
                yield name, sql


Change = Callable[[], object]
Mutation = Callable[[exp.Expr, str], Iterator[Change]]


def _operator(tree: exp.Expr, _: str) -> Iterator[Change]:
    others = {
        exp.GT: (exp.GTE, exp.LT), exp.GTE: (exp.GT, exp.LTE), exp.LT: (exp.LTE, exp.GT), exp.LTE: (exp.LT, exp.GTE),
        exp.EQ: (exp.NEQ,), exp.NEQ: (exp.EQ,),
    }  # fmt: skip
    for node in tree.find_all(exp.GT, exp.GTE, exp.LT, exp.LTE, exp.EQ, exp.NEQ):
        for other in others[type(node)]:
            yield partial(node.replace, other(this=node.this.copy(), expression=node.expression.copy()))


def _literal(tree: exp.Expr, _: str) -> Iterator[Change]:
    for node in tree.find_all(exp.Literal):
        if isinstance(node.parent, exp.Limit | exp.Select):  # SELECT 1 of an EXISTS means nothing
            continue
        text = str(node.this)
        if not node.is_string:
            number = float(text) if "." in text else int(text)
            for changed in (number + 1, number - 1, number * 10):
                if changed != number:
                    yield partial(node.replace, exp.Literal.number(changed))
        elif isinstance(node.parent, exp.Like):
            for changed_text in (text.removeprefix("%"), text.removesuffix("%"), f"%{text}", f"{text}%"):
                if changed_text.replace("%%", "%") not in (text, ""):
                    new = changed_text.replace("%%", "%")
                    yield partial(node.replace, exp.Literal.string(new))
        else:
            year = f"{int(text[:4]) + 1}{text[4:]}" if text[:4].isdigit() and text[4:5] == "-" else f"{text}s"
            yield partial(node.replace, exp.Literal.string(year))
            yield partial(node.replace, exp.Literal.string(text.upper() + "?"))


def _column(tree: exp.Expr, context: str) -> Iterator[Change]:
    """Another column of the same table and type. Not inside COUNT, which counts rows whatever the column."""
    tables = columns_of(context)
    aliases = {table.alias_or_name: table.name for table in tree.find_all(exp.Table)}
    for node in tree.find_all(exp.Column):
        if isinstance(node.parent, exp.Count) or node.find_ancestor(exp.Group, exp.Join):
            continue
        table = aliases[node.table] if node.table else next(iter(tree.find_all(exp.Table))).name
        kinds = tables.get(table, {})
        others = [name for name, kind in kinds.items() if name != node.name and kind == kinds.get(node.name)]
        for other in others[:2]:
            yield partial(node.set, "this", exp.to_identifier(other))


def _aggregate(tree: exp.Expr, _: str) -> Iterator[Change]:
    others = {exp.Avg: exp.Sum, exp.Sum: exp.Avg, exp.Max: exp.Min, exp.Min: exp.Max}
    for node in tree.find_all(*others):
        yield partial(node.replace, others[type(node)](this=node.this.copy()))
        yield partial(node.replace, exp.Count(this=node.this.copy()))
    for node in tree.find_all(exp.Count):
        if isinstance(node.this, exp.Distinct):
            yield partial(node.set, "this", node.this.expressions[0].copy())
        elif tree.find(exp.Join) and any(join.side == "LEFT" for join in tree.find_all(exp.Join)):
            yield partial(node.set, "this", exp.Star())


def _drop_condition(tree: exp.Expr, _: str) -> Iterator[Change]:
    for node in tree.find_all(exp.And, exp.Or):
        yield partial(node.replace, node.left.copy())
        yield partial(node.replace, node.right.copy())
    for select in tree.find_all(exp.Select):
        for clause in ("where", "having"):
            if select.args.get(clause):
                yield partial(select.set, clause, None)


def _connective(tree: exp.Expr, _: str) -> Iterator[Change]:
    for node in tree.find_all(exp.And, exp.Or):
        other = exp.Or if isinstance(node, exp.And) else exp.And
        yield partial(node.replace, other(this=node.left.copy(), expression=node.right.copy()))


def _order(tree: exp.Expr, _: str) -> Iterator[Change]:
    for node in tree.find_all(exp.Ordered):
        yield partial(node.set, "desc", not node.args.get("desc"))
    if tree.args.get("order"):
        yield partial(tree.set, "order", None)


def _limit(tree: exp.Expr, _: str) -> Iterator[Change]:
    limit = tree.args.get("limit")
    if limit is not None:
        number = int(limit.expression.this)
        yield partial(tree.set, "limit", None)
        for changed in (number + 1, number - 1):
            yield partial(limit.set, "expression", exp.Literal.number(changed))


def _join(tree: exp.Expr, context: str) -> Iterator[Change]:
    """INNER to LEFT only where no WHERE and no other ON speaks of the joined table: that would refuse NULLs."""
    joins = list(tree.find_all(exp.Join))
    aliases = {table.alias_or_name: table.name for table in tree.find_all(exp.Table)}
    for join in joins:
        if join.side == "LEFT":
            yield partial(join.set, "side", None)
            continue
        alias = join.alias_or_name
        where = tree.args.get("where")
        later = [other.args["on"] for other in joins if other is not join]
        spoken = [node for clause in (where, *later) if clause for node in clause.find_all(exp.Column)]
        if not any(column.table == alias for column in spoken):
            yield partial(join.set, "side", "LEFT")
    if len(joins) == 1:  # the child's own id instead of its parent's
        for column in joins[0].args["on"].find_all(exp.Column):
            own = next(iter(columns_of(context)[aliases[column.table]]))
            if column.name != own:
                yield partial(column.set, "this", exp.to_identifier(own))


def _distinct(tree: exp.Expr, _: str) -> Iterator[Change]:
    if not isinstance(tree, exp.Select):
        return
    if tree.args.get("distinct"):
        yield partial(tree.set, "distinct", None)
    elif not tree.args.get("group") and not tree.expressions[0].find(exp.AggFunc):
        yield partial(tree.distinct, copy=False)


def _negation(tree: exp.Expr, _: str) -> Iterator[Change]:
    for negated in tree.find_all(exp.Not):
        yield partial(negated.replace, negated.this.copy())
    for node in tree.find_all(exp.Like, exp.In, exp.Between, exp.Is):
        if not isinstance(node.parent, exp.Not):
            yield partial(node.replace, exp.not_(node.copy()))


def _group(tree: exp.Expr, _: str) -> Iterator[Change]:
    group = tree.args.get("group")
    if group is None:
        return
    column = group.expressions[0]
    shown = [output for output in tree.expressions if isinstance(output, exp.Column)]
    if column.name != shown[0].name:
        yield partial(group.set, "expressions", [shown[0].copy()])
    yield partial(tree.set, "group", None)


def _projection(tree: exp.Expr, _: str) -> Iterator[Change]:
    outputs = tree.expressions
    if len(outputs) > 1:
        yield partial(tree.set, "expressions", outputs[:-1])
        yield partial(tree.set, "expressions", [outputs[1], outputs[0], *outputs[2:]])
    yield partial(tree.set, "expressions", [*outputs, outputs[0].copy()])


_MUTATIONS: dict[str, Mutation] = {
    "operator": _operator, "literal": _literal, "column": _column, "aggregate": _aggregate,
    "dropped condition": _drop_condition, "AND and OR": _connective, "order": _order, "limit": _limit, "join": _join,
    "DISTINCT": _distinct, "negation": _negation, "group": _group, "projection": _projection,
}  # fmt: skip


def make_hallucinations(row: ReferenceRow) -> Iterator[Mutant]:
    """Each name in turn replaced by one that no table has, bare and in double quotes, which SQLite reads as text."""
    gold = read(row.reference)
    for kind in (exp.Table, exp.Column):
        for number, _ in enumerate(gold.find_all(kind)):
            for invented in ("customer_rating", "rowid", "name_"):
                for quoted in (False, True):
                    tree = gold.copy()
                    node = list(tree.find_all(kind))[number]
                    node.set("this", exp.to_identifier(invented, quoted=quoted))
                    yield kind.__name__, write(tree)


def make_rewrites(row: ReferenceRow) -> Iterator[Mutant]:
    """The same question asked in other words."""
    gold = read(row.reference)
    yield "as it is", row.reference
    yield "without semicolon", row.reference.rstrip(";")
    yield "in a fence", f"```sql\n{row.reference}\n```"
    yield "commented", f"-- the answer\n{row.reference} -- done"
    yield "pretty", gold.sql(dialect="sqlite", pretty=True)
    yield "lower keywords", _lower_keywords(row.reference)
    yield "quoted", gold.sql(dialect="sqlite", identify=True)
    yield "aliased columns", _alias_outputs(gold.copy())
    yield "operands", _swap_operands(gold.copy())
    yield "joins", _swap_joins(gold.copy())
    if not gold.args.get("order"):
        yield "subquery", f"SELECT * FROM ({row.reference.rstrip(';')})"
    yield "other aliases", _rename_aliases(gold.copy())


def _lower_keywords(sql: str) -> str:
    pieces = sql.split("'")
    return "'".join(piece if at % 2 else piece.lower() for at, piece in enumerate(pieces))


def _alias_outputs(tree: exp.Expr) -> str:
    outputs = [exp.alias_(output.copy(), f"c{at}") for at, output in enumerate(tree.expressions)]
    tree.set("expressions", outputs)
    return write(tree)


def _swap_operands(tree: exp.Expr) -> str:
    """a AND b -> b AND a; x < 5 -> 5 > x; BETWEEN -> two comparisons."""
    flipped = {exp.GT: exp.LT, exp.LT: exp.GT, exp.GTE: exp.LTE, exp.LTE: exp.GTE, exp.EQ: exp.EQ, exp.NEQ: exp.NEQ}
    for both in list(tree.find_all(exp.And, exp.Or)):
        left, right = both.left.copy(), both.right.copy()
        both.set("this", right)
        both.set("expression", left)
    for node in list(tree.find_all(*flipped)):
        node.replace(flipped[type(node)](this=node.expression.copy(), expression=node.this.copy()))
    for between in list(tree.find_all(exp.Between)):
        low = exp.GTE(this=between.this.copy(), expression=between.args["low"].copy())
        high = exp.LTE(this=between.this.copy(), expression=between.args["high"].copy())
        between.replace(exp.paren(exp.and_(low, high)))
    return write(tree)


def _swap_joins(tree: exp.Expr) -> str:
    joins = tree.args.get("joins") or []
    source = tree.args["from_"] if "from_" in tree.args else tree.args["from"]
    if len(joins) == 1 and not joins[0].side:
        first, second = source.this.copy(), joins[0].this.copy()
        source.set("this", second)
        joins[0].set("this", first)
    return write(tree)


def _rename_aliases(tree: exp.Expr) -> str:
    names = {table.alias for table in tree.find_all(exp.Table) if table.alias}
    for alias in tree.find_all(exp.TableAlias):
        if alias.name in names:
            alias.set("this", exp.to_identifier(f"the_{alias.name}"))
    for column in tree.find_all(exp.Column):
        if column.table in names:
            column.set("table", exp.to_identifier(f"the_{column.table}"))
    return write(tree)
