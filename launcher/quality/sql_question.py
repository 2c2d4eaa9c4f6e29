"""A question made ready to be judged: its tables with generated rows, and what the reference gives on each of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from launcher.quality.sql_comparing import Expected, make_expected
from launcher.quality.sql_database import CannotRunError, Database
from launcher.quality.sql_facts import Condition, Facts, Keyed, Schema
from launcher.quality.sql_gathering import gather_facts
from launcher.quality.sql_keys import make_keyed
from launcher.quality.sql_needs import Rows, make_needs
from launcher.quality.sql_reading import (
    DIALECT,
    NotReadableError,
    find_rowid,
    find_volatile,
    is_query,
    read_statements,
    split_statements,
)
from launcher.quality.sql_rows import make_edge_rows, make_mixed_rows, make_rows, make_tiny_rows
from launcher.quality.sql_schema import find_checks, probe_schema

if TYPE_CHECKING:
    from sqlglot import exp

_MAX_REFERENCE_ROWS = 20_000
_CREATES = re.compile(r"\bCREATE\s+(?:TEMP\w*\s+)?TABLE\b", re.IGNORECASE)
_TINY_DATABASES = 24
_OTHER_DIALECTS = ("mysql", "postgres", "tsql")


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """One accepted answer: references may hold several, separated by semicolons."""

    sql: str
    statement: exp.Expr
    keyed: Keyed | None

    @property
    def has_order(self) -> bool:
        return self.keyed is not None and bool(self.keyed.keys or self.keyed.limit is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A filled database, and what each accepted answer gives there; None where that is not settled."""

    database: Database
    expected: tuple[Expected | None, ...]


class Question:
    """Made once, asked of many answers. `why_not_run` and `why_not_compared` say what cannot be judged, and why."""

    def __init__(self, context: str, reference: str) -> None:
        self.schema: Schema = {}
        self.accepted: tuple[Accepted, ...] = ()
        self.facts = Facts()
        self.scenes: list[Scene] = []
        self.why_not_run = self.why_not_compared = ""
        self.reference_is_query = self.reference_is_readable = True
        self.num_references = 1
        self.reads_rowid = False  # as the reference does
        self._checks: Sequence[Condition] = ()
        self._fillings: Iterator[Rows | None] = iter(())
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
        return [*self.schema, *(column for table in self.schema.values() for column in table.columns)]

    def close(self) -> None:
        for scene in self.scenes:
            scene.database.close()
        self.scenes = []

    def _open(self) -> None:
        """The tables as SQLite reads them; those of another dialect are translated."""
        problem = ""
        for context in _translations(self._context):
            try:
                database = Database(context)
            except CannotRunError as error:
                problem = problem or str(error)
                continue
            self._context, self._has_rows = context, database.has_rows
            self.schema = probe_schema(database.connection)
            self._checks = find_checks(database.connection, self.schema) if "check" in context.lower() else ()
            database.close()
            return
        self.why_not_run = f"SQLite cannot make the row's tables: {problem}"

    def _read(self, reference: str) -> None:
        try:
            statements = read_statements(reference, self.names)
        except NotReadableError as error:
            self.why_not_compared = f"the reference cannot be read: {error}"
            self.reference_is_readable = False
            return
        self.num_references = len(statements)
        if not statements or not all(map(is_query, statements)):
            self.reference_is_query = not statements
            self.why_not_compared = "the reference is no query: nothing here changes a table"
            return
        texts = split_statements(reference) if len(statements) > 1 else [reference]
        for statement in statements:
            self.facts = self.facts.join(gather_facts(statement, self.schema))
        self.reads_rowid = any(find_rowid(statement, reference, self.names) for statement in statements)
        if volatile := find_volatile(reference):
            self.why_not_compared = f"the reference gives something else each time: {volatile}"
        self.accepted = tuple(
            Accepted(sql=text, statement=statement, keyed=_keyed_or_none(statement))
            for text, statement in zip(texts, statements, strict=True)
        )

    def _run(self) -> None:
        """On empty tables first: a reference that does not run there runs nowhere."""
        needs = make_needs(self.schema, self.facts, self._checks)
        self._fillings = chain(make_rows(needs), (None,) if self._has_rows else ())
        for scene in self.iterate_scenes():
            problems = [_find_problem(scene.database, accepted) for accepted in self.accepted]
            running = [accepted for accepted, problem in zip(self.accepted, problems, strict=True) if not problem]
            if self.accepted and not running and not self.why_not_compared:
                self.why_not_compared = f"the reference does not run in SQLite: {problems[0]}"
            if len(running) < len(self.accepted):
                self.accepted = tuple(running)
                self.scenes = [self._look(scene.database)]
            return
        self.why_not_run = "no row could be put into the row's tables"

    def iterate_scenes(self) -> Iterator[Scene]:
        """Made as they are asked for: most wrong answers differ on the second."""
        position = 0
        while position < len(self.scenes) or self._make_next_scene():
            yield self.scenes[position]
            position += 1

    def _make_next_scene(self) -> bool:
        for rows in self._fillings:
            scene = self.make_scene(rows)
            if scene is not None:
                self.scenes.append(scene)
                return True
        return False

    def make_scene(self, rows: Rows | None) -> Scene | None:
        """No rows: those that the context itself inserts."""
        try:
            database = Database(self._context, is_known=True)
            if rows is not None:
                database.fill(self.schema, rows)
        except CannotRunError:
            return None
        database.close_to_writing(may_read_rowid=self.reads_rowid)
        return self._look(database)

    def _look(self, database: Database) -> Scene:
        return Scene(database=database, expected=tuple(_expect(database, accepted) for accepted in self.accepted))

    def make_pointed_scenes(self, facts: Facts) -> Iterator[Scene]:
        """Databases made for one answer that is written otherwise than the reference and still gives the same: rows at
        the edges of its own conditions, and a number of tiny ones."""
        joined = self.facts.join(facts)
        needs = make_needs(self.schema, joined, self._checks)
        fillings = [make_mixed_rows(needs, seed=9, size=20, share=0.5, spread=5)]
        if joined != self.facts:
            fillings.append(make_edge_rows(needs))
        for rows in (*fillings, *make_tiny_rows(needs, range(4, _TINY_DATABASES))):
            scene = self.make_scene(rows)
            if scene is not None:
                yield scene


def _find_problem(database: Database, accepted: Accepted) -> str:
    try:
        database.run(accepted.sql, _MAX_REFERENCE_ROWS)
    except CannotRunError as error:
        return str(error)
    return ""


def _keyed_or_none(statement: exp.Expr) -> Keyed | None:
    try:
        return make_keyed(statement)
    except (AttributeError, ValueError, TypeError):  # a shape of statement that nobody thought of
        return None


def _translations(context: str) -> Iterator[str]:
    """As it is, then as sqlglot translates it. Types that SQLite's grammar has no place for become TEXT."""
    import sqlglot
    from sqlglot import exp
    from sqlglot.errors import SqlglotError

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


def _expect(database: Database, accepted: Accepted) -> Expected | None:
    """Settled only where reading the tables from the other end gives the same, ties aside."""
    keyed = accepted.keyed
    try:
        plain = database.run(accepted.sql, _MAX_REFERENCE_ROWS)
        rows = plain
        if keyed is not None and keyed.sql:
            rows = database.run(keyed.sql, _MAX_REFERENCE_ROWS)
        with database.reversed_scans():
            other = database.run(accepted.sql, _MAX_REFERENCE_ROWS)
    except CannotRunError:
        return None
    if not rows.complete or (keyed is not None and rows.num_columns - plain.num_columns not in (0, keyed.num_added)):
        return None
    expected = make_expected(
        rows.rows,
        keys=keyed.keys if keyed is not None else (),
        num_columns=plain.num_columns,
        offset=keyed.offset if keyed is not None else 0,
        limit=keyed.limit if keyed is not None else None,
    )
    steady = all(expected.accepts(run.rows, run.num_columns) for run in (plain, other))
    return expected if steady else None
