"""SQLite databases in memory, closed to everything but reading: what runs on them is hostile.

Each layer would do alone: the authorizer (no writing, no ATTACH, no PRAGMA, no extension), limits of lengths and
depths, a count of steps, a limit of SQLite's memory. The process around them has limits of its own, and is killed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.quality.sql_facts import Schema, Value
from launcher.quality.sql_needs import Rows

if TYPE_CHECKING:
    import apsw

MAX_STEPS = 5_000_000  # of SQLite's machine, for one statement on one database: about a third of a second
_STEPS_A_CALL = 5_000
MAX_RESULT_BYTES = 8 * 2**20
_MAX_VALUE_BYTES = 1_000_000
_FORBIDDEN_FUNCTIONS = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"}
Authorizer = Callable[[int, str | None, str | None, str | None, str | None], int]
_FIXED_RANDOM = 4_611_686_018_427_387_903


class CannotRunError(Exception):
    """SQLite's refusal, or ours, in a sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    rows: list[tuple[Value, ...]]
    num_columns: int
    complete: bool  # False: there are more rows than were asked for


class Database:
    """One database: built from a row's context, filled, and then only read."""

    def __init__(self, context: str, *, is_known: bool = False) -> None:
        """`is_known`: the same context was let pass once, and asking about each of its steps again takes long."""
        import apsw

        self._connection = _open()
        self._steps_left = MAX_STEPS
        self._statements: list[int] = []  # those of the latest run, by their numbers of columns
        self._connection.set_progress_handler(self._count_steps, _STEPS_A_CALL)
        self._connection.authorizer = None if is_known else _authorize_building
        try:
            self._connection.execute(context)
        except (apsw.Error, UnicodeError, MemoryError) as error:
            raise CannotRunError(_format(error)) from None
        self.has_rows = self._connection.total_changes() > 0  # the row's context brings some
        self._connection.authorizer = None  # what follows until it is closed to writing is ours

    @property
    def connection(self) -> apsw.Connection:
        return self._connection

    def fill(self, schema: Schema, rows: Rows) -> None:
        """What a CHECK, a key or a NOT NULL refuses is left out."""
        import apsw

        for name, table in schema.items():
            if self.has_rows:
                self._connection.execute(f"DELETE FROM {_quote(table.name)}")
            names = ", ".join(_quote(column.name) for column in table.columns.values())
            places = ", ".join("?" for _ in table.columns)
            sql = f"INSERT OR IGNORE INTO {_quote(table.name)} ({names}) VALUES ({places})"
            if rows[name]:
                try:
                    self._connection.executemany(sql, [tuple(row.values()) for row in rows[name]])
                except (apsw.Error, OverflowError) as error:  # a table that takes no such rows: STRICT, for one
                    raise CannotRunError(_format(error)) from None

    def close_to_writing(self, *, may_read_rowid: bool = False) -> None:
        """From here on a column in double quotes that does not exist is an error, not a text."""
        import apsw

        for setting in (apsw.SQLITE_DBCONFIG_DQS_DML, apsw.SQLITE_DBCONFIG_DQS_DDL):
            self._connection.config(setting, 0)
        self._connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
        self._connection.authorizer = _make_reading_authorizer(may_read_rowid)
        self._connection.exec_trace = self._note_statement

    def run(self, sql: str, max_rows: int) -> Result:
        """Rows beyond those asked for are counted, not kept: a result without end is found out by its steps."""
        import apsw

        self._steps_left, self._statements = MAX_STEPS, []
        rows: list[tuple[Value, ...]] = []
        size = 0
        try:
            cursor = self._connection.execute(sql, can_cache=False)
            for row in cursor:
                if len(rows) > max_rows:
                    continue
                rows.append(row)
                size += sum(len(value) for value in row if isinstance(value, str | bytes))
                if size > MAX_RESULT_BYTES:
                    cursor.close(True)
                    break
        except (apsw.Error, UnicodeError, MemoryError, OverflowError, RecursionError) as error:
            raise CannotRunError(_format(error)) from None
        if size > MAX_RESULT_BYTES:
            raise CannotRunError("its result is larger than any that was asked for")
        if not self._statements:
            raise CannotRunError("it holds no statement")
        return Result(rows=rows, num_columns=self._statements[0], complete=len(rows) <= max_rows)

    @contextmanager
    def reversed_scans(self) -> Iterator[None]:
        """Tables are read from the other end: what changes then was never asked for."""
        import apsw

        self._connection.config(apsw.SQLITE_DBCONFIG_REVERSE_SCANORDER, 1)
        try:
            yield
        finally:
            self._connection.config(apsw.SQLITE_DBCONFIG_REVERSE_SCANORDER, 0)

    def close(self) -> None:
        self._connection.close(True)

    def _count_steps(self) -> bool:
        self._steps_left -= _STEPS_A_CALL
        return self._steps_left < 0

    def _note_statement(self, cursor: apsw.Cursor, _sql: str, _bindings: object) -> bool:
        """False stops: a second statement, or one that is no query."""
        description = cursor.get_description()
        self._statements.append(len(description))
        return len(self._statements) == 1 and cursor.is_readonly and not cursor.is_explain and bool(description)


def _make_reading_authorizer(may_read_rowid: bool) -> Authorizer:
    """Called for every column that a statement reads, so it is quick."""
    import apsw

    reading, calling, refused = apsw.SQLITE_READ, apsw.SQLITE_FUNCTION, apsw.SQLITE_DENY
    harmless = (apsw.SQLITE_SELECT, apsw.SQLITE_RECURSIVE)

    def authorize(action: int, one: str | None, two: str | None, _: str | None, __: str | None) -> int:
        if action == reading:
            hidden = one is not None and one.lower().startswith(("sqlite_", "pragma_", "dbstat"))
            return refused if hidden or (two == "ROWID" and not may_read_rowid) else 0
        if action == calling:
            return refused if (two or "").lower() in _FORBIDDEN_FUNCTIONS else 0
        return 0 if action in harmless else refused

    return authorize


def _authorize_building(action: int, one: str | None, two: str | None, _: str | None, __: str | None) -> int:
    """A row's context makes and fills tables; whatever reaches beyond its database is refused."""
    import apsw

    refused = (apsw.SQLITE_ATTACH, apsw.SQLITE_DETACH, apsw.SQLITE_PRAGMA, apsw.SQLITE_CREATE_VTABLE)
    hostile = action == apsw.SQLITE_FUNCTION and (two or one or "").lower() in _FORBIDDEN_FUNCTIONS
    return apsw.SQLITE_DENY if action in refused or hostile else apsw.SQLITE_OK


def _open() -> apsw.Connection:
    import apsw

    connection = apsw.Connection(":memory:", statementcachesize=0)
    limits = {
        apsw.SQLITE_LIMIT_LENGTH: _MAX_VALUE_BYTES,
        apsw.SQLITE_LIMIT_SQL_LENGTH: _MAX_VALUE_BYTES,
        apsw.SQLITE_LIMIT_COLUMN: 500,
        apsw.SQLITE_LIMIT_EXPR_DEPTH: 300,
        apsw.SQLITE_LIMIT_COMPOUND_SELECT: 60,
        apsw.SQLITE_LIMIT_VDBE_OP: 100_000,
        apsw.SQLITE_LIMIT_ATTACHED: 0,
        apsw.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 500,
        apsw.SQLITE_LIMIT_WORKER_THREADS: 0,
        apsw.SQLITE_LIMIT_TRIGGER_DEPTH: 5,
    }
    for limit, value in limits.items():
        connection.limit(limit, value)
    connection.config(apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0)
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_TRIGGER, 0)
    connection.create_scalar_function("random", _not_random, 0)
    return connection


def _not_random(*_: object) -> int:
    """The same each time, so that a verdict is."""
    return _FIXED_RANDOM


def _format(error: BaseException) -> str:
    import apsw

    if isinstance(error, apsw.InterruptError):
        return "it runs without an end in sight"
    if isinstance(error, apsw.AuthError):
        return f"it does more than read the row's tables ({error})"
    if isinstance(error, apsw.ExecTraceAbort):
        return "it is not one query"
    if isinstance(error, MemoryError | apsw.NoMemError | apsw.TooBigError):
        return "it takes more memory than any answer needs"
    return str(error).removeprefix("SQLError: ") or type(error).__name__


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
