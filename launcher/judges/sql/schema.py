"""The schema of a row's tables as SQLite reports it: types, keys, foreign keys and CHECK constraints."""

from __future__ import annotations

import apsw
from sqlglot import exp

from launcher.judges.sql.parse import SqlParseError, parse_statements
from launcher.judges.sql.query_analysis import (
    Column,
    ColumnKind,
    ColumnRef,
    Condition,
    Schema,
    Table,
    analyze_query,
)

_KINDS: tuple[tuple[str, ColumnKind], ...] = (
    ("BOOL", "bool"), ("DATETIME", "datetime"), ("TIMESTAMP", "datetime"), ("DATE", "date"), ("TIME", "time"),
    ("CHAR", "text"), ("TEXT", "text"), ("CLOB", "text"), ("ENUM", "text"), ("STRING", "text"), ("UUID", "text"),
    ("JSON", "text"), ("INT", "int"), ("YEAR", "int"), ("SERIAL", "int"), ("REAL", "real"), ("FLOA", "real"),
    ("DOUB", "real"), ("DEC", "real"), ("NUM", "real"), ("MONEY", "real"),
)  # fmt: skip


def probe_schema(connection: apsw.Connection) -> Schema:
    """Read the schema from SQLite, before the authorizer forbids it."""
    names = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
    )
    return {str(name).lower(): _probe_table(connection, str(name)) for (name,) in names.fetchall()}


def _probe_table(connection: apsw.Connection, name: str) -> Table:
    columns = connection.execute('SELECT name, type, "notnull", pk, hidden FROM pragma_table_xinfo(?)', (name,))
    described = [row for row in columns.fetchall() if row[4] == 0]  # generated columns are computed
    keys = [str(row[0]).lower() for row in described if row[3]]
    unique, has_composite_key = ({keys[0]} if len(keys) == 1 else set()), len(keys) > 1
    for index, is_unique in connection.execute('SELECT name, "unique" FROM pragma_index_list(?)', (name,)).fetchall():
        parts = connection.execute("SELECT name FROM pragma_index_info(?)", (index,)).fetchall()
        if is_unique and len(parts) == 1:
            unique.add(str(parts[0][0]).lower())
        has_composite_key |= bool(is_unique) and len(parts) > 1
    return Table(
        name=name,
        columns={
            str(column).lower(): Column(
                name=str(column),
                kind=_parse_kind(str(kind)),
                nullable=not required and not key,
                unique=str(column).lower() in unique,
            )
            for column, kind, required, key, _ in described
        },
        parents=_probe_parents(connection, name),
        has_composite_key=has_composite_key,
    )


def _probe_parents(connection: apsw.Connection, name: str) -> dict[str, ColumnRef]:
    references = connection.execute('SELECT "from", "table", "to" FROM pragma_foreign_key_list(?)', (name,)).fetchall()
    parents: dict[str, ColumnRef] = {}
    for column, table, target in references:
        if target is None:  # REFERENCES t without a column means its primary key
            keys = connection.execute("SELECT name FROM pragma_table_info(?) WHERE pk = 1", (table,)).fetchall()
            target = keys[0][0] if keys else None
        if target is not None:
            parents[str(column).lower()] = (str(table).lower(), str(target).lower())
    return parents


def _parse_kind(declared: str) -> ColumnKind:
    upper = declared.upper()
    return next((kind for word, kind in _KINDS if word in upper), "text")


def find_checks(context: str, schema: Schema) -> list[Condition]:
    """Return CHECK constraints as conditions; rows that violate a CHECK are not inserted."""
    try:
        statements = parse_statements(context)
    except SqlParseError:
        return []
    conditions: list[Condition] = []
    for statement in statements:
        if isinstance(statement, exp.Create) and (table := statement.find(exp.Table)):
            own = (one for one in analyze_query(statement, schema).conditions if one.column[0] == table.name.lower())
            conditions += [condition for condition in own if condition.operator != "other"]
    return conditions
