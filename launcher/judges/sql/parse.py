"""Parse SQL with sqlglot: the statements of a text and their kind."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import sqlglot
from sqlglot import TokenType, exp, tokenize
from sqlglot.errors import SqlglotError

from launcher.core.errors import first_line

DIALECT = "sqlite"
_VOLATILE = re.compile(
    r"\brandom(?:blob)?\s*\(|\bcurrent_(?:date|time|timestamp)\b|'now'|\bnow\s*\("
    r"|\b(?:date|time|datetime|julianday|unixepoch)\s*\(\s*\)|\bstrftime\s*\(\s*'[^']*'\s*\)",
    re.IGNORECASE,
)
_DATE_FUNCTION = re.compile(r"(?:strftime|date|datetime|julianday|unixepoch)\s*\(", re.IGNORECASE)
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}(?![^ T])")
_COLOR = re.compile(r"\x1b\[\d+m")
# The kinds that count as SQL: sqlglot parses `no idea` as a column with an alias.
_STATEMENT_KINDS = (
    exp.Query, exp.Values, exp.Insert, exp.Update, exp.Delete, exp.Merge, exp.Create, exp.Drop, exp.Alter,
    exp.TruncateTable, exp.Pragma, exp.Attach, exp.Detach, exp.Transaction, exp.Commit, exp.Rollback, exp.Analyze,
)  # fmt: skip
_ROWID = re.compile(r"\b(?:rowid|oid|_rowid_)\b", re.IGNORECASE)


class SqlParseError(Exception):
    """A text is not SQL; the message says why."""


def parse_statements(sql: str, names: Sequence[str] = ()) -> list[exp.Expr]:
    """Parse the statements of a text; if that fails, quote `names` that sqlglot takes for keywords and try again."""
    try:
        return _read(sql)
    except SqlParseError:
        quoted = _quote_names(sql, {name.lower() for name in names})
        if quoted is None or quoted == sql:
            raise
        return _read(quoted)


def _read(sql: str) -> list[exp.Expr]:
    try:
        parsed = sqlglot.parse(sql, dialect=DIALECT)
    except SqlglotError as error:
        raise SqlParseError(_COLOR.sub("", first_line(error))) from None
    except RecursionError:
        raise SqlParseError("it is nested too deeply") from None
    statements = [
        statement for statement in parsed if statement is not None and not isinstance(statement, exp.Semicolon)
    ]
    for statement in statements:
        if isinstance(statement, exp.Select) and not statement.expressions:
            raise SqlParseError("SELECT without columns")
        if isinstance(statement, exp.Command) or not isinstance(statement, _STATEMENT_KINDS):
            raise SqlParseError("it is not an SQL statement")
    return statements


def split_statements(sql: str) -> list[str]:
    """Return the text of each statement."""
    ends = [token.start for token in tokenize(sql, dialect=DIALECT) if token.token_type == TokenType.SEMICOLON]
    starts = [0, *(end + 1 for end in ends)]
    pieces = [sql[start:end] for start, end in zip(starts, [*ends, len(sql)], strict=True)]
    return [piece for piece in pieces if tokenize(piece, dialect=DIALECT)]


def _quote_names(sql: str, names: set[str]) -> str | None:
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


def is_same_query(one: exp.Expr | None, other: exp.Expr) -> bool:
    """Return whether two statements differ only in whitespace, comments, quoting and letter case."""
    if one is None:
        return False
    return one == other or _without_quotes(one) == _without_quotes(other)


def _without_quotes(statement: exp.Expr) -> exp.Expr:
    bare = statement.copy()
    for name in bare.find_all(exp.Identifier):
        name.set("this", name.name.lower())
        name.set("quoted", False)
    return bare


def find_volatile(sql: str) -> str:
    """Return the part of a statement that is not deterministic, such as RANDOM(); empty if there is none."""
    match = _VOLATILE.search(sql)
    return match[0] if match else ""


def find_rowid(statement: exp.Expr, text: str, names: Sequence[str]) -> str:
    """Return the implicit rowid column that a statement uses; empty if it uses none.

    Every SQLite table has it, although no CREATE TABLE declares it.
    """
    if not _ROWID.search(text):
        return ""
    rowid_names = {"rowid", "oid", "_rowid_"} - {name.lower() for name in names}
    aliases = {alias.alias.lower() for alias in statement.find_all(exp.Alias)}
    aliases |= {column.name.lower() for alias in statement.find_all(exp.TableAlias) for column in alias.columns}
    used = (column.name for column in statement.find_all(exp.Column) if column.name.lower() in rowid_names - aliases)
    return next(used, "")


def find_date_columns(statement: exp.Expr) -> Iterator[str]:
    """Yield the names of columns that are arguments of a date function or compared with the literal of a date."""
    for predicate in statement.find_all(exp.Predicate):
        sides = list(predicate.iter_expressions())
        if any(isinstance(side, exp.Literal) and side.is_string and _DATE.match(side.name) for side in sides):
            yield from (side.name.lower() for side in sides if isinstance(side, exp.Column))
    for call in statement.find_all(exp.Func):
        if _DATE_FUNCTION.match(call.sql(dialect=DIALECT)):
            yield from (column.name.lower() for column in call.find_all(exp.Column))


def is_integer_literal(node: exp.Expr | None) -> bool:
    """Return whether a node is a non-negative integer literal."""
    return isinstance(node, exp.Literal) and not node.is_string and str(node.this).isdigit()
