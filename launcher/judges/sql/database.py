"""In-memory SQLite databases that are read-only for answers, which are hostile input.

Each layer suffices alone: the authorizer (no writes, ATTACH, PRAGMA or extensions), limits of lengths and depths, a
limit of VM steps, and a heap limit. The worker process has its own limits, and is killed if it exceeds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import apsw

from launcher.judges.sql.query_analysis import Schema, Value
from launcher.judges.sql.row_builder import Rows

MAX_STEPS = 5_000_000  # of SQLite's machine, for one statement on one database: about a third of a second
_STEPS_A_CALL = 5_000
MAX_RESULT_BYTES = 8 * 2**20
_MAX_VALUE_BYTES = 1_000_000
_FORBIDDEN_FUNCTIONS = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"}
Authorizer = Callable[[int, str | None, str | None, str | None, str | None], int]


class CannotRunError(Exception):
    """A statement cannot be run; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Rows of a query."""

    rows: list[tuple[Value, ...]]
    num_columns: int
    complete: bool  # False: there are more rows than requested


class Database:
    """An in-memory database: created from a row's context, filled, then read-only."""

    def __init__(self, context: str, *, is_known: bool = False) -> None:
        """Create the tables. `is_known` skips the authorizer, for a context that has passed it before."""
        self._connection = _open()
        self._random = Random()  # of RANDOM(): the same numbers for every statement, so that verdicts do not vary
        self._connection.create_scalar_function("random", lambda *_: self._random.getrandbits(64) - 2**63, 0)
        self._connection.create_scalar_function("randomblob", self._make_random_bytes, 1)
        self._steps_left = MAX_STEPS
        self._statements: list[int] = []  # column counts of the statements of the latest run
        self._connection.set_progress_handler(self._count_steps, _STEPS_A_CALL)
        self._connection.authorizer = None if is_known else _authorize_building
        try:
            self._connection.execute(context)
        except (apsw.Error, UnicodeError, MemoryError) as error:
            raise CannotRunError(_format(error)) from None
        self.has_rows = self._connection.total_changes() > 0  # the context inserts some
        self._connection.authorizer = None  # until it is read-only, all statements are ours

    @property
    def connection(self) -> apsw.Connection:
        """The SQLite connection."""
        return self._connection

    def fill(self, schema: Schema, rows: Rows) -> None:
        """Insert rows; those that violate a constraint are skipped."""
        for name, table in schema.items():
            if self.has_rows:
                self._connection.execute(f"DELETE FROM {_quote(table.name)}")
            names = ", ".join(_quote(column.name) for column in table.columns.values())
            placeholders = ", ".join("?" for _ in table.columns)
            sql = f"INSERT OR IGNORE INTO {_quote(table.name)} ({names}) VALUES ({placeholders})"
            if rows[name]:
                try:
                    self._connection.executemany(sql, [tuple(row.values()) for row in rows[name]])
                except (apsw.Error, OverflowError) as error:  # e.g. a STRICT table
                    raise CannotRunError(_format(error)) from None

    def make_read_only(self, *, may_read_rowid: bool = False) -> None:
        """Make the database read-only; an unknown name in double quotes is then an error instead of a string."""
        for setting in (apsw.SQLITE_DBCONFIG_DQS_DML, apsw.SQLITE_DBCONFIG_DQS_DDL):
            self._connection.config(setting, 0)
        self._connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
        self._connection.authorizer = _make_reading_authorizer(may_read_rowid)
        self._connection.exec_trace = self._note_statement

    def run(self, sql: str, max_rows: int) -> Result:
        """Run one query. Rows beyond `max_rows` are not kept; an endless result hits the step limit."""
        self._steps_left, self._statements = MAX_STEPS, []
        self._random.seed(0)
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
            raise CannotRunError("its result is too large")
        if not self._statements:
            raise CannotRunError("it contains no statement")
        return Result(rows=rows, num_columns=self._statements[0], complete=len(rows) <= max_rows)

    @contextmanager
    def reversed_scans(self) -> Iterator[None]:
        """Scan tables in reverse within this context, which reveals results that depend on an unspecified order."""
        self._connection.config(apsw.SQLITE_DBCONFIG_REVERSE_SCANORDER, 1)
        try:
            yield
        finally:
            self._connection.config(apsw.SQLITE_DBCONFIG_REVERSE_SCANORDER, 0)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close(True)

    def _make_random_bytes(self, *arguments: Any) -> Any:
        (size,) = arguments
        return self._random.randbytes(min(max(size, 1), _MAX_VALUE_BYTES) if isinstance(size, int) else 1)

    def _count_steps(self) -> bool:
        self._steps_left -= _STEPS_A_CALL
        return self._steps_left < 0

    def _note_statement(self, cursor: apsw.Cursor, _sql: str, _bindings: object) -> bool:
        """Note a statement that starts; return False, which aborts it, for a second one or one that is no query."""
        description = cursor.get_description()
        self._statements.append(len(description))
        return len(self._statements) == 1 and cursor.is_readonly and not cursor.is_explain and bool(description)


def _make_reading_authorizer(may_read_rowid: bool) -> Authorizer:
    """Return the authorizer of a read-only database. It is called for every column, so it must be fast."""
    read, function, deny = apsw.SQLITE_READ, apsw.SQLITE_FUNCTION, apsw.SQLITE_DENY
    allowed = (apsw.SQLITE_SELECT, apsw.SQLITE_RECURSIVE)

    def authorize(action: int, one: str | None, two: str | None, _: str | None, __: str | None) -> int:
        if action == read:
            hidden = one is not None and one.lower().startswith(("sqlite_", "pragma_", "dbstat"))
            return deny if hidden or (two == "ROWID" and not may_read_rowid) else 0
        if action == function:
            return deny if (two or "").lower() in _FORBIDDEN_FUNCTIONS else 0
        return 0 if action in allowed else deny

    return authorize


def _authorize_building(action: int, one: str | None, two: str | None, _: str | None, __: str | None) -> int:
    """Authorizer while tables are created: nothing outside the database may be accessed."""
    denied = (apsw.SQLITE_ATTACH, apsw.SQLITE_DETACH, apsw.SQLITE_PRAGMA, apsw.SQLITE_CREATE_VTABLE)
    hostile = action == apsw.SQLITE_FUNCTION and (two or one or "").lower() in _FORBIDDEN_FUNCTIONS
    return apsw.SQLITE_DENY if action in denied or hostile else apsw.SQLITE_OK


def _open() -> apsw.Connection:
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
    return connection


def _format(error: BaseException) -> str:
    if isinstance(error, apsw.InterruptError):
        return "it exceeds the step limit"
    if isinstance(error, apsw.AuthError):
        return f"it accesses more than the row's tables ({error})"
    if isinstance(error, apsw.ExecTraceAbort):
        return "it is not a single query"
    if isinstance(error, MemoryError | apsw.NoMemError | apsw.TooBigError):
        return "it exceeds the memory limit"
    return str(error).removeprefix("SQLError: ") or type(error).__name__


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
