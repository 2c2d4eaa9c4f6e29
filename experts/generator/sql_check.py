"""Run the SQL of a row in SQLite, on its own tables, filled with a few rows of each column's type."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping

_LINES = 3
_VALUES: dict[str, tuple[str | int | float, ...]] = {
    "INTEGER": (1, 2, 3),
    "REAL": (0.5, 12.25, 900.0),
    "DATE": ("2006-01-31", "2014-06-15", "2025-12-01"),
    "BOOLEAN": (0, 1, 1),
    "TEXT": ("alpha", "beta", "gamma"),
}


def check_row(row: Mapping[str, str]) -> None:
    """Check a row; raises sqlite3.Error if SQLite rejects it, ValueError if the result is not a table."""
    sql = row["sql"]
    if not re.fullmatch(r"SELECT [^;]*;", sql, re.DOTALL):
        raise ValueError(f"not one SELECT: {sql}")
    if '"' in sql:
        raise ValueError(f"SQLite reads a misspelt column in double quotes as text: {sql}")
    with sqlite3.connect(":memory:") as connection:
        connection.executescript(row["sql_context"])
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            _fill(connection, table)
        if connection.execute("PRAGMA foreign_key_check").fetchall():
            raise ValueError(f"foreign keys lead nowhere: {row['sql_context']}")
        cursor = connection.execute(sql)
        cursor.fetchall()
    if not cursor.description:
        raise ValueError(f"no columns come back: {sql}")
    connection.close()


def _fill(connection: sqlite3.Connection, table: str) -> None:
    columns = [(name, kind) for _, name, kind, *_ in connection.execute(f"PRAGMA table_info({table})")]
    places = ", ".join("?" for _ in columns)
    for line in range(_LINES):
        values = [_VALUES[kind][line] for _, kind in columns]
        connection.execute(f"INSERT INTO {table} VALUES ({places})", values)
