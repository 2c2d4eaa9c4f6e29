"""A reference query prepared for judging: test databases with generated rows, and its result on each of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from launcher.judges.sql.database import CannotRunError, Database
from launcher.judges.sql.parse import (
    DIALECT,
    SqlParseError,
    find_date_columns,
    find_rowid,
    find_volatile,
    parse_statements,
    split_statements,
)
from launcher.judges.sql.query_analysis import (
    Condition,
    QueryFacts,
    Schema,
    SortedQuery,
    analyze_query,
    find_row_bounds,
)
from launcher.judges.sql.result_match import Expected, make_expected, make_sorted_query
from launcher.judges.sql.row_builder import Rows, make_requirements
from launcher.judges.sql.row_generator import (
    make_boundary_rows,
    make_group_rows,
    make_look_alike_rows,
    make_mixed_rows,
    make_rows,
    make_tiny_rows,
)
from launcher.judges.sql.schema import find_checks, probe_schema

_MAX_REFERENCE_ROWS = 20_000
_CREATES = re.compile(r"\bCREATE\s+(?:TEMP\w*\s+)?TABLE\b", re.IGNORECASE)
_TINY_DATABASES = 24
_OTHER_DIALECTS = ("mysql", "postgres", "tsql")


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptedQuery:
    """A query whose result an answer may match; a reference may contain several, separated by semicolons."""

    sql: str
    statement: exp.Expr
    sorted_query: SortedQuery | None

    @property
    def has_order(self) -> bool:
        """Return whether the query sorts or limits its rows."""
        query = self.sorted_query
        return query is not None and bool(query.keys or query.limit is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class TestDatabase:
    """A test database, and the result of each query that counts as correct; None for a nondeterministic result."""

    sqlite: Database
    expected: tuple[Expected | None, ...]


class QueryFixture:
    """A reference query with its test databases, prepared once for many answers.

    `why_not_run` says why answers cannot be executed, `why_not_compared` why their results cannot be compared.
    """

    def __init__(self, context: str, reference: str) -> None:
        self.schema: Schema = {}
        self.accepted: tuple[AcceptedQuery, ...] = ()
        self.facts = QueryFacts()
        self.databases: list[TestDatabase] = []
        self.why_not_run = self.why_not_compared = ""
        self.is_volatile = False  # the reference returns something else each time
        self.reference_is_query = self.reference_is_readable = True
        self.num_references = 1
        self.reads_rowid = False
        self._checks: Sequence[Condition] = ()
        self._row_sets: Iterator[Rows | None] = iter(())
        self._context, self._has_rows = context, False
        if not _CREATES.search(context):
            self.why_not_run = "the row has no CREATE TABLE to run it on"
        else:
            self._open()
        self._read(reference)
        if not self.why_not_run and self.reference_is_query:
            self._run()

    @property
    def names(self) -> list[str]:
        """Names of all tables and columns."""
        return [*self.schema, *(column for table in self.schema.values() for column in table.columns)]

    def close(self) -> None:
        """Close all databases."""
        for database in self.databases:
            database.sqlite.close()
        self.databases = []

    def _open(self) -> None:
        """Load the schema of the row's tables, translated from another SQL dialect if SQLite cannot create them."""
        problem = ""
        for context in _translations(self._context):
            try:
                database = Database(context)
            except CannotRunError as error:
                problem = problem or str(error)
                continue
            self._context, self._has_rows = context, database.has_rows
            self.schema = probe_schema(database.connection)
            self._checks = find_checks(context, self.schema) if "check" in context.lower() else ()
            database.close()
            return
        self.why_not_run = f"SQLite cannot create the row's tables: {problem}"

    def _read(self, reference: str) -> None:
        try:
            statements = parse_statements(reference, self.names)
        except SqlParseError as error:
            self.why_not_compared = f"the reference cannot be parsed: {error}"
            self.reference_is_readable = False
            return
        self.num_references = len(statements)
        if not statements or not all(isinstance(statement, exp.Query) for statement in statements):
            self.reference_is_query = not statements
            self.why_not_compared = "the reference is not a query"
            return
        texts = split_statements(reference) if len(statements) > 1 else [reference]
        names = {name for statement in statements for name in find_date_columns(statement)}
        self.schema = {key: table.with_dates(names) for key, table in self.schema.items()}
        for statement in statements:
            self.facts = self.facts.join(analyze_query(statement, self.schema))
        self.reads_rowid = any(find_rowid(statement, reference, self.names) for statement in statements)
        if volatile := find_volatile(reference):
            self.is_volatile = True
            self.why_not_compared = f"the reference is not deterministic: {volatile}"
        self.accepted = tuple(
            AcceptedQuery(sql=text, statement=statement, sorted_query=_sorted_query_or_none(statement))
            for text, statement in zip(texts, statements, strict=True)
        )

    def _run(self) -> None:
        """Run the accepted queries on the first database, whose tables are empty, and drop those that fail."""
        needs = make_requirements(self.schema, self.facts, self._checks)
        self._row_sets = chain(make_rows(needs), (None,) if self._has_rows else ())
        for database in self.iterate_databases():
            problems = [_find_problem(database.sqlite, accepted) for accepted in self.accepted]
            running = [accepted for accepted, problem in zip(self.accepted, problems, strict=True) if problem is None]
            first = next(iter(problems), None)
            if first is not None and not running and not self.why_not_compared:
                self.why_not_compared = f"the reference does not run in SQLite: {first}"
            if len(running) < len(self.accepted):
                self.accepted = tuple(running)
                self.databases = [self._compute_expected(database.sqlite)]
            return
        self.why_not_run = "the row's tables cannot be filled"

    def iterate_databases(self) -> Iterator[TestDatabase]:
        """Yield the test databases, each created only when needed: the second one exposes most wrong answers."""
        position = 0
        while position < len(self.databases) or self._make_next_database():
            yield self.databases[position]
            position += 1

    def _make_next_database(self) -> bool:
        for rows in self._row_sets:
            database = self.make_database(rows)
            if database is not None:
                self.databases.append(database)
                return True
        return False

    def make_database(self, rows: Rows | None) -> TestDatabase | None:
        """Return a database with `rows` (None: those that the context inserts), or None if it cannot be created."""
        try:
            database = Database(self._context, is_known=True)
            if rows is not None:
                database.fill(self.schema, rows)
        except CannotRunError:
            return None
        database.make_read_only(may_read_rowid=self.reads_rowid)
        return self._compute_expected(database)

    def _compute_expected(self, database: Database) -> TestDatabase:
        return TestDatabase(sqlite=database, expected=tuple(_expect(database, accepted) for accepted in self.accepted))

    def make_targeted_databases(self, facts: QueryFacts) -> Iterator[TestDatabase]:
        """Yield more databases for an answer that is not written like the reference but has matched so far.

        They have rows at the boundaries of the answer's own conditions; some are tiny and random.
        """
        joined = self.facts.join(facts)
        needs = make_requirements(self.schema, joined, self._checks)
        row_sets = [
            make_mixed_rows(needs, seed=9, size=20, share=0.5, spread=5),
            make_mixed_rows(needs, seed=10, size=20, share=0.7, spread=200, lowest=-150),
            make_look_alike_rows(needs),
        ]
        if joined != self.facts:
            row_sets.append(make_boundary_rows(needs))
        if joined.groups != self.facts.groups:
            row_sets.append(make_group_rows(needs))
        for rows in (*row_sets, *make_tiny_rows(needs, range(4, _TINY_DATABASES))):
            database = self.make_database(rows)
            if database is not None:
                yield database

    def make_long_database(self, facts: QueryFacts, num_rows: int) -> TestDatabase | None:
        """Return a database with over `num_rows` rows per table, most satisfying all conditions; None if that fails."""
        needs = make_requirements(self.schema, self.facts.join(facts), self._checks)
        size = 3 * num_rows + 20  # tables that others refer to get half of it, and some values are NULL
        return self.make_database(make_mixed_rows(needs, seed=12, size=size, share=0.95, spread=10 * size))

    def find_added_bounds(self, statement: exp.Expr) -> list[exp.Literal]:
        """Return the numbers in an answer's LIMITs and comparisons of counts that no accepted query contains."""
        known = {literal.this for query in self.accepted for literal in query.statement.find_all(exp.Literal)}
        counts = any(query.statement.find(exp.Having) for query in self.accepted)
        return [
            bound
            for bound in find_row_bounds(statement)
            if bound.this not in known and not (counts and not isinstance(bound.parent, exp.Limit))
        ]


def _find_problem(database: Database, accepted: AcceptedQuery) -> CannotRunError | None:
    try:
        database.run(accepted.sql, _MAX_REFERENCE_ROWS)
    except CannotRunError as error:
        return error
    return None


def _sorted_query_or_none(statement: exp.Expr) -> SortedQuery | None:
    try:
        return make_sorted_query(statement)
    except (AttributeError, ValueError, TypeError):  # unforeseen kind of statement
        return None


def _translations(context: str) -> Iterator[str]:
    """Yield the CREATE TABLEs as written, then translated to SQLite from other dialects, unsupported types as TEXT."""
    yield context
    for dialect in _OTHER_DIALECTS:
        try:
            statements = [statement for statement in sqlglot.parse(context, dialect=dialect) if statement is not None]
        except (SqlglotError, RecursionError):
            continue
        for statement in statements:
            for kind in list(statement.find_all(exp.DataType)):
                if kind.this in (exp.DType.ENUM, exp.DType.SET, exp.DType.ARRAY) or kind.args.get("nested"):
                    kind.replace(exp.DataType.build("text"))
        yield ";\n".join(statement.sql(dialect=DIALECT) for statement in statements)


def _expect(database: Database, accepted: AcceptedQuery) -> Expected | None:
    """Return the expected result; None if the query fails or its rows, except for ties, depend on the scan order."""
    query = accepted.sorted_query
    try:
        plain = database.run(accepted.sql, _MAX_REFERENCE_ROWS)
        rows = plain
        if query is not None and query.sql:
            rows = database.run(query.sql, _MAX_REFERENCE_ROWS)
        with database.reversed_scans():
            reversed_rows = database.run(accepted.sql, _MAX_REFERENCE_ROWS)
    except CannotRunError:
        return None
    if not rows.complete or (query is not None and rows.num_columns - plain.num_columns not in (0, query.num_added)):
        return None
    expected = make_expected(
        rows.rows,
        keys=query.keys if query is not None else (),
        num_columns=plain.num_columns,
        offset=query.offset if query is not None else 0,
        limit=query.limit if query is not None else None,
    )
    is_stable = all(expected.accepts(run.rows, run.num_columns) for run in (plain, reversed_rows))
    return expected if is_stable else None
