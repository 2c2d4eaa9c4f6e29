"""Generated rows satisfy the schema, cover boundary values and are deterministic."""

from __future__ import annotations

from itertools import islice

import pytest

from launcher.judges.sql.boundary_values import is_satisfied, make_boundary_values
from launcher.judges.sql.database import Database
from launcher.judges.sql.parse import find_volatile, parse_statements
from launcher.judges.sql.query_analysis import Column, Condition, QueryFacts, Schema, Value, analyze_query
from launcher.judges.sql.result_match import make_expected, make_sorted_query
from launcher.judges.sql.row_builder import Rows, make_requirements
from launcher.judges.sql.row_generator import make_rows
from launcher.judges.sql.schema import probe_schema

TABLES = """CREATE TABLE zoo (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, city TEXT);
CREATE TABLE animal (id INTEGER PRIMARY KEY, name TEXT NOT NULL, weight REAL NOT NULL, born DATE,
 zoo_id INTEGER NOT NULL REFERENCES zoo(id));
CREATE TABLE visit (animal_id INTEGER REFERENCES animal, day DATE NOT NULL);"""
SQL = (
    "SELECT z.name, COUNT(*) FROM zoo z JOIN animal a ON a.zoo_id = z.id WHERE a.weight BETWEEN 10 AND 20"
    " AND z.city = 'Bergen' GROUP BY z.id HAVING COUNT(*) > 7 ORDER BY 2 DESC LIMIT 6"
)


def make(sql: str = SQL) -> tuple[Schema, QueryFacts, list[Rows]]:
    schema = probe_schema(Database(TABLES).connection)
    (statement,) = parse_statements(sql)
    facts = analyze_query(statement, schema)
    return schema, facts, list(make_rows(make_requirements(schema, facts, ())))


def test_the_schema_is_read() -> None:
    schema, _, _ = make()
    assert schema["animal"].parents == {"zoo_id": ("zoo", "id")}
    assert schema["visit"].parents == {"animal_id": ("animal", "id")}
    columns = {name: (column.kind, column.nullable, column.unique) for name, column in schema["zoo"].columns.items()}
    assert columns == {
        "id": ("int", False, True),
        "name": ("text", False, True),
        "city": ("text", True, False),
    }


def test_query_facts_are_extracted() -> None:
    _, facts, _ = make()
    assert facts.tables == ("zoo", "animal")
    assert {(condition.column, condition.operator, condition.values) for condition in facts.conditions} == {
        (("animal", "weight"), "between", (10, 20)),
        (("zoo", "city"), "=", ("Bergen",)),
    }
    assert [(group.operator, group.value) for group in facts.groups] == [(">", 7)]
    assert facts.limits == (6,)
    assert facts.links == ((("animal", "zoo_id"), ("zoo", "id")),)


def test_generated_rows_are_deterministic() -> None:
    assert make()[2] == make()[2]


def test_generated_rows_satisfy_the_schema() -> None:
    schema, _, databases = make()
    assert len(databases) == 11
    assert all(rows == [] for rows in databases[0].values())
    assert all(len(rows) > 5 for rows in databases[1].values())
    for rows in databases[1:]:
        database = Database(TABLES)
        database.fill(schema, rows)
        for name, made in rows.items():
            ((kept,),) = database.connection.execute(f"SELECT COUNT(*) FROM {name}").fetchall()
            assert kept == len(made), "a row that a constraint refuses was made for nothing"
        assert database.connection.execute("SELECT * FROM pragma_foreign_key_check").fetchall() == []


def test_generated_rows_cover_boundary_values() -> None:
    _, _, databases = make()
    weights = {row["weight"] for row in databases[1]["animal"]}
    assert {9, 10, 15, 20, 21} <= weights
    assert {"Bergen", "bERGEN", "Berge", "Bergenx", None} <= {row["city"] for row in databases[1]["zoo"]}


def test_group_sizes_are_around_the_threshold() -> None:
    _, _, databases = make()
    sizes: dict[Value, int] = {}
    for row in databases[6]["animal"]:
        if 10 <= float(row["weight"] or 0) <= 20:
            sizes[row["zoo_id"]] = sizes.get(row["zoo_id"], 0) + 1
    assert {6, 7, 8, 9} <= set(sizes.values())


@pytest.mark.parametrize(
    ("operator", "values", "inside", "outside"),
    [
        ("=", (5,), {5}, {4, 6}),
        (">", (5,), {6}, {4, 5}),
        (">=", (5,), {5, 6}, {4}),
        ("<", (5,), {4}, {5, 6}),
        ("between", (5, 9), {5, 7, 9}, {4, 10}),
        ("in", (5, 7), {5, 7}, {4, 8}),
        ("<>", (5,), {4, 6}, {5}),
    ],
)
def test_boundary_values_are_inside_and_outside(
    operator: str, values: tuple[int], inside: set[int], outside: set[int]
) -> None:
    condition = Condition(column=("t", "x"), operator=operator, values=values)  # type: ignore[arg-type]
    edges = make_boundary_values(condition, Column(name="x", kind="int", nullable=False, unique=False))
    assert inside <= {edge for edge in edges if is_satisfied(condition, edge)}
    assert outside <= {edge for edge in edges if not is_satisfied(condition, edge)}


def test_like_patterns_have_near_misses() -> None:
    condition = Condition(column=("t", "x"), operator="like", values=("%895",))
    edges = make_boundary_values(condition, Column(name="x", kind="text", nullable=True, unique=False))
    assert {"895", "v895"} <= {edge for edge in edges if is_satisfied(condition, edge)}
    assert {"895v", "89", None} <= {edge for edge in edges if not is_satisfied(condition, edge)}


@pytest.mark.parametrize(
    ("sql", "keys", "num_added", "offset", "limit"),
    [
        ("SELECT a, b FROM t ORDER BY b", (1,), 0, 0, None),
        ("SELECT a, b AS n FROM t ORDER BY n DESC LIMIT 5", (1,), 0, 0, 5),
        ("SELECT a FROM t ORDER BY b, a LIMIT 5 OFFSET 2", (-1, 0), 1, 2, 5),
        ("SELECT a FROM t ORDER BY b, c", (-2, -1), 2, 0, None),
        ("SELECT a, COUNT(*) FROM t GROUP BY a ORDER BY COUNT(*)", (1,), 0, 0, None),
        ("SELECT * FROM t ORDER BY b", (-1,), 1, 0, None),
        ("SELECT a FROM t UNION SELECT b FROM t ORDER BY 1", (0,), 0, 0, None),
        ("SELECT a FROM t", (), 0, 0, None),
    ],
)
def test_sort_keys_are_extracted(
    sql: str, keys: tuple[int, ...], num_added: int, offset: int, limit: int | None
) -> None:
    keyed = make_sorted_query(parse_statements(sql)[0])
    assert keyed is not None
    assert (keyed.keys, keyed.num_added, keyed.offset, keyed.limit) == (keys, num_added, offset, limit)


def test_undeterminable_ties_have_no_sort_keys() -> None:
    for sql in (
        "SELECT DISTINCT a FROM t ORDER BY b",
        "SELECT a FROM t LIMIT 2 + 3",
        "SELECT a FROM t ORDER BY a COLLATE NOCASE",
    ):
        assert make_sorted_query(parse_statements(sql)[0]) is None


def test_results_are_compared_by_value() -> None:
    expected = make_expected([(1, "a"), (2.0, None), (0.1 + 0.2, "b")], keys=(), num_columns=2)
    assert expected.accepts([(0.3, "b"), (2, None), (1.0, "a")], 2)
    assert not expected.accepts([(0.3, "b"), (2, None)], 2)
    assert not expected.accepts([(0.3, "b"), (2, None), ("1", "a")], 2)
    assert not expected.accepts([(0.3, "b"), (2, None), (1, "a")], 3)
    assert not expected.accepts([(0.3, "b"), (2, None), (2, None)], 2)


def test_a_sorted_result_is_compared_block_by_block() -> None:
    rows = [("a", 1), ("b", 1), ("c", 2), ("d", 2), ("e", 3)]
    whole = make_expected(rows, keys=(1,), num_columns=1)
    assert whole.accepts([(name,) for name in "badce"], 1)
    assert not whole.accepts([(name,) for name in "abecd"], 1)
    cut = make_expected(rows, keys=(1,), num_columns=1, offset=1, limit=2)
    assert [cut.accepts([(name,) for name in names], 1) for names in ("bc", "ad", "ac", "cb", "ae", "bcd")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize("sql", ["SELECT random()", "SELECT date('now')", "SELECT CURRENT_DATE", "SELECT datetime()"])
def test_nondeterministic_functions_are_found(sql: str) -> None:
    assert find_volatile(sql)


def test_similar_deterministic_names_are_not_reported() -> None:
    assert not find_volatile("SELECT random, date(born), strftime('%Y', born) FROM t WHERE name = 'knows'")


def test_databases_are_created_lazily() -> None:
    schema, facts, _ = make()
    assert len(list(islice(make_rows(make_requirements(schema, facts, ())), 2))) == 2
