"""Reads SQL with sqlglot: how many statements, and of what kind. What is not SQL is told apart here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlglot import exp

DIALECT = "sqlite"
_VOLATILE = re.compile(
    r"\brandom(?:blob)?\s*\(|\bcurrent_(?:date|time|timestamp)\b|'now'|\bnow\s*\("
    r"|\b(?:date|time|datetime|julianday|unixepoch)\s*\(\s*\)|\bstrftime\s*\(\s*'[^']*'\s*\)",
    re.IGNORECASE,
)
_ROWID = re.compile(r"\b(?:rowid|oid|_rowid_)\b", re.IGNORECASE)


class NotReadableError(Exception):
    """What is wrong with it, in a sentence."""


def read_statements(sql: str, names: Sequence[str] = ()) -> list[exp.Expr]:
    """Statements in order. Names of the row's tables and columns that sqlglot takes for keywords are quoted for it."""
    try:
        return _read(sql)
    except NotReadableError:
        quoted = _quote_names(sql, {name.lower() for name in names})
        if quoted is None or quoted == sql:
            raise
        return _read(quoted)


def _read(sql: str) -> list[exp.Expr]:
    import sqlglot
    from sqlglot import exp
    from sqlglot.errors import SqlglotError

    try:
        parsed = sqlglot.parse(sql, dialect=DIALECT)
    except SqlglotError as error:
        raise NotReadableError(_first_line(str(error))) from None
    except RecursionError:
        raise NotReadableError("it is nested too deeply") from None
    found = [statement for statement in parsed if statement is not None and not isinstance(statement, exp.Semicolon)]
    for statement in found:
        if isinstance(statement, exp.Select) and not statement.expressions:
            raise NotReadableError("SELECT of nothing")
        if isinstance(statement, exp.Command) or not isinstance(statement, _statement_kinds()):
            raise NotReadableError("it is no statement of SQL")
    return found


def split_statements(sql: str) -> list[str]:
    """The text of each statement, as it was written."""
    from sqlglot import TokenType, tokenize

    ends = [token.start for token in tokenize(sql, dialect=DIALECT) if token.token_type == TokenType.SEMICOLON]
    starts = [0, *(end + 1 for end in ends)]
    pieces = [sql[start:end] for start, end in zip(starts, [*ends, len(sql)], strict=True)]
    return [piece for piece in pieces if tokenize(piece, dialect=DIALECT)]


def _statement_kinds() -> tuple[type[exp.Expr], ...]:
    """sqlglot reads `no idea` as a column with an alias."""
    from sqlglot import exp

    return (
        exp.Query, exp.Values, exp.Insert, exp.Update, exp.Delete, exp.Merge, exp.Create, exp.Drop, exp.Alter,
        exp.TruncateTable, exp.Pragma, exp.Attach, exp.Detach, exp.Transaction, exp.Commit, exp.Rollback, exp.Analyze,
    )  # fmt: skip


def _first_line(message: str) -> str:
    return re.sub(r"\x1b\[\d+m", "", message.split("\n")[0])


def _quote_names(sql: str, names: set[str]) -> str | None:
    from sqlglot import TokenType, tokenize
    from sqlglot.errors import SqlglotError

    try:
        tokens = tokenize(sql, dialect=DIALECT)
    except SqlglotError:
        return None
    pieces, end = [], 0
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        called = following is not None and following.token_type == TokenType.L_PAREN
        plain = token.token_type in (TokenType.VAR, TokenType.IDENTIFIER, TokenType.STRING)
        if token.text.lower() in names and not plain and not called:
            pieces += [sql[end : token.start], f'"{token.text}"']
            end = token.end + 1
    return "".join([*pieces, sql[end:]])


def is_query(statement: exp.Expr) -> bool:
    from sqlglot import exp

    return isinstance(statement, exp.Query)


def is_same_writing(one: exp.Expr | None, other: exp.Expr) -> bool:
    """But for spaces, comments, quotes around names and the case of letters."""
    if one is None:
        return False
    return one == other or _without_quotes(one) == _without_quotes(other)


def _without_quotes(statement: exp.Expr) -> exp.Expr:
    from sqlglot import exp

    bare = statement.copy()
    for name in bare.find_all(exp.Identifier):
        name.set("this", name.name.lower())
        name.set("quoted", False)
    return bare


def describe(statement: exp.Expr) -> str:
    """The kind of a statement, in the word of SQL."""
    return statement.key.upper()


def find_volatile(sql: str) -> str:
    """What in a statement gives something else each time, as it is written there."""
    match = _VOLATILE.search(sql)
    return match[0] if match else ""


def find_rowid(statement: exp.Expr, text: str, names: Sequence[str]) -> str:
    """SQLite's own name of a row's number, which every table answers to though no CREATE TABLE tells of it."""
    from sqlglot import exp

    if not _ROWID.search(text):
        return ""
    own = {"rowid", "oid", "_rowid_"} - {name.lower() for name in names}
    made = {alias.alias.lower() for alias in statement.find_all(exp.Alias)}
    made |= {column.name.lower() for alias in statement.find_all(exp.TableAlias) for column in alias.columns}
    found = (column.name for column in statement.find_all(exp.Column) if column.name.lower() in own - made)
    return next(found, "")
