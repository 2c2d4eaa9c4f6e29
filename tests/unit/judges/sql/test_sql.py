"""The SQL judge: same result, same verdict; undecidable rows are not judged."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from launcher.core.errors import InputError
from launcher.judges.base import ReferenceRow, Verdict
from launcher.judges.sql.judge import SqlJudge
from tests.unit.judges.verdicts import passes_all

pytestmark = pytest.mark.process

TABLES = """CREATE TABLE author (id INTEGER PRIMARY KEY, name TEXT NOT NULL, country TEXT, born INTEGER NOT NULL);
CREATE TABLE book (id INTEGER PRIMARY KEY, title TEXT NOT NULL, price REAL NOT NULL, printed DATE NOT NULL,
 author_id INTEGER REFERENCES author(id));"""


@pytest.fixture(scope="module")
def judge() -> Iterator[SqlJudge]:
    with SqlJudge() as judge:
        yield judge


def ask(judge: SqlJudge, reference: str, answer: str, context: str = TABLES) -> Verdict:
    return judge.judge([ReferenceRow(instruction="", context=context, reference=reference)], [answer])[0]


def checks(verdict: Verdict) -> tuple[bool | None, ...]:
    return tuple(verdict.checks.values())


RIGHT = (True, True, True)
WRONG = (True, True, False)
FAILS = (True, False, False)
GARBLED = (False, False, False)


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("SELECT name FROM author WHERE born > 1900", "select a.name as n from author a where 1900 < a.born;"),
        ("SELECT name FROM author WHERE born > 1900", "SELECT name FROM author WHERE born >= 1901"),
        ("SELECT COUNT(*) FROM book WHERE price < 10", "SELECT COUNT(id) FROM book WHERE NOT price >= 10"),
        ("SELECT AVG(price) FROM book", "SELECT SUM(price) / COUNT(*) FROM book"),
        (
            "SELECT name FROM author AS a WHERE NOT EXISTS (SELECT 1 FROM book AS b WHERE b.author_id = a.id)",
            "SELECT a.name FROM author a LEFT JOIN book b ON b.author_id = a.id WHERE b.id IS NULL",
        ),
        (
            "SELECT name FROM author WHERE id IN (SELECT author_id FROM book WHERE price > 20)",
            "WITH dear AS (SELECT author_id FROM book WHERE price > 20)"
            " SELECT name FROM author a WHERE EXISTS (SELECT 1 FROM dear d WHERE d.author_id = a.id)",
        ),
        (
            "SELECT a.name, COUNT(b.id) FROM author AS a LEFT JOIN book AS b ON b.author_id = a.id GROUP BY a.id",
            "SELECT name, (SELECT COUNT(*) FROM book WHERE author_id = author.id) FROM author",
        ),
        (
            "SELECT title FROM book WHERE printed BETWEEN '2001-01-01' AND '2001-12-31'",
            "SELECT title FROM book WHERE strftime('%Y', printed) = '2001'",
        ),
        ("SELECT country FROM author GROUP BY country", "SELECT DISTINCT country FROM author"),
        ("SELECT title FROM book WHERE title LIKE 'The%'", "SELECT title FROM book WHERE title LIKE 'the%'"),
    ],
)
def test_equivalent_queries_pass(judge: SqlJudge, reference: str, answer: str) -> None:
    verdict = ask(judge, reference, answer)
    assert checks(verdict) == RIGHT, verdict.reason
    assert passes_all(verdict)
    assert verdict.reason == ""


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("SELECT name FROM author WHERE born > 1900", "SELECT name FROM author WHERE born >= 1900"),
        ("SELECT name FROM author WHERE born > 1900", "SELECT name FROM author WHERE born > 1900 AND name <> 'Kafka'"),
        ("SELECT name FROM author WHERE born > 1900", "SELECT name FROM author WHERE born > 1900 OR name = 'Kafka'"),
        ("SELECT name, born FROM author", "SELECT born, name FROM author"),
        ("SELECT name FROM author", "SELECT name, name FROM author"),
        ("SELECT name FROM author", "SELECT DISTINCT name FROM author"),
        ("SELECT name FROM author ORDER BY born", "SELECT name FROM author"),
        ("SELECT name FROM author ORDER BY id", "SELECT name FROM author"),  # in that order only by luck
        ("SELECT COUNT(*) FROM author WHERE country = 'Norway'", "SELECT 0"),
        # Shows only where no row is dearer, or where one group has just so many rows.
        ("SELECT MAX(price) FROM book WHERE price >= 204", "SELECT MAX(price) FROM book WHERE price >= 203.5"),
        (
            "SELECT author_id FROM book WHERE price < 9 GROUP BY author_id HAVING COUNT(*) > 25",
            "SELECT author_id FROM book WHERE price <= 9 GROUP BY author_id HAVING COUNT(*) > 25",
        ),
        (
            "SELECT title FROM book GROUP BY title HAVING AVG(price) > 20",
            "SELECT title FROM book GROUP BY title HAVING AVG(price) >= 20",
        ),
        ("SELECT title FROM book ORDER BY printed LIMIT 30", "SELECT title FROM book ORDER BY printed LIMIT 31"),
        # Texts that differ by case or white space only, and numbers with many decimals.
        (
            "SELECT country, COUNT(*) FROM author GROUP BY country",
            "SELECT country, COUNT(*) FROM author GROUP BY lower(country)",
        ),
        ("SELECT COUNT(DISTINCT country) FROM author", "SELECT COUNT(DISTINCT upper(country)) FROM author"),
        ("SELECT DISTINCT country FROM author", "SELECT country FROM author GROUP BY country COLLATE NOCASE"),
        ("SELECT born FROM author ORDER BY country, born", "SELECT born FROM author ORDER BY lower(country), born"),
        ("SELECT name FROM author WHERE country = 'Peru'", "SELECT name FROM author WHERE trim(country) = 'Peru'"),
        ("SELECT name FROM author WHERE country IN ('Peru')", "SELECT name FROM author WHERE ltrim(country) = 'Peru'"),
        ("SELECT round(price, 2) FROM book", "SELECT price FROM book"),
        ("SELECT round(price, 2) FROM book", "SELECT round(price, 3) FROM book"),
        ("SELECT title FROM book ORDER BY price", "SELECT title FROM book ORDER BY round(price)"),
        (
            "SELECT a.name FROM author AS a JOIN book AS b ON b.author_id = a.id",
            "SELECT a.name FROM author AS a JOIN book AS b ON b.id = a.id",
        ),
    ],
)
def test_different_queries_fail(judge: SqlJudge, reference: str, answer: str) -> None:
    verdict = ask(judge, reference, answer)
    assert checks(verdict) == WRONG
    assert verdict.reason == "its result differs from the reference's"


IN_2020 = "SELECT COUNT(*) FROM visits WHERE strftime('%Y', at) = '2020'"
SINCE = "SELECT COUNT(*) FROM visits WHERE at >= '2020-01-01' AND at < '2021-01-01'"


@pytest.mark.parametrize("kind", ["DATE", "TEXT", "DATETIME"])
@pytest.mark.parametrize(
    ("reference", "answer", "is_right"),
    [
        (SINCE, IN_2020, True),
        (IN_2020, SINCE, True),
        (IN_2020, "SELECT COUNT(*) FROM visits WHERE substr(at, 1, 4) = '2020'", True),
        (IN_2020, "SELECT COUNT(*) FROM visits WHERE at LIKE '2020-%'", True),
        (IN_2020, "SELECT COUNT(*) FROM visits WHERE at > '2020-01-01' AND at < '2021-01-01'", False),
        (IN_2020, "SELECT COUNT(*) FROM visits WHERE strftime('%m', at) = '20'", False),
        (SINCE, "SELECT COUNT(*) FROM visits WHERE strftime('%Y', at) >= '2020'", False),
    ],
)
def test_conditions_on_dates_may_be_written_with_any_function(
    judge: SqlJudge, kind: str, reference: str, answer: str, is_right: bool
) -> None:
    verdict = ask(judge, reference, answer, f"CREATE TABLE visits (id INTEGER PRIMARY KEY, at {kind});")
    assert verdict.checks["result"] is is_right


@pytest.mark.parametrize("condition", ["random() % 2 <> 0", "abs(random()) % 10 < 9", "hex(randomblob(1)) > '3'"])
def test_random_conditions_fail(judge: SqlJudge, condition: str) -> None:
    context = "CREATE TABLE visits (id INTEGER PRIMARY KEY, at TEXT);"
    verdicts = [
        ask(judge, "SELECT at FROM visits", f"SELECT at FROM visits {rest}", context)
        for rest in (f"WHERE {condition}", "ORDER BY random()")
    ]
    assert [verdict.checks["result"] for verdict in verdicts] == [False, True]


def test_tied_rows_match_in_any_order(judge: SqlJudge) -> None:
    reference = "SELECT name FROM author ORDER BY born"
    assert checks(ask(judge, reference, "SELECT name FROM author ORDER BY born, name DESC")) == RIGHT
    assert checks(ask(judge, reference, "SELECT name FROM author ORDER BY born, id DESC")) == RIGHT
    assert checks(ask(judge, reference, "SELECT name FROM author ORDER BY name, born")) == WRONG


def test_limit_may_select_any_of_the_tied_rows(judge: SqlJudge) -> None:
    reference = "SELECT name FROM author ORDER BY born DESC LIMIT 3"
    assert checks(ask(judge, reference, "SELECT name FROM author ORDER BY born DESC, name LIMIT 3")) == RIGHT
    assert checks(ask(judge, reference, "SELECT name FROM author ORDER BY born DESC, name LIMIT 4")) == WRONG
    assert checks(ask(judge, reference, "SELECT name FROM author ORDER BY born LIMIT 3")) == WRONG


@pytest.mark.parametrize(
    "answer",
    [
        "SELECT nickname FROM author",
        'SELECT name FROM author WHERE country = "Norway"',  # SQLite alone would read a text
        "SELECT rowid FROM author",
        "SELECT author.oid FROM author",
        "SELECT name FROM writer",
        "SELECT UNKNOWN_FUNCTION(name) FROM author",
    ],
)
def test_unknown_names_do_not_run(judge: SqlJudge, answer: str) -> None:
    verdict = ask(judge, "SELECT name FROM author", answer)
    assert checks(verdict) == FAILS
    assert "no such" in verdict.reason


def test_aliases_of_the_answer_are_known_names(judge: SqlJudge) -> None:
    answer = "SELECT rowid FROM (SELECT name AS rowid FROM author)"
    assert checks(ask(judge, "SELECT name FROM author", answer)) == RIGHT


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("```sql\nSELECT name FROM author\n```", RIGHT),
        ("  ```\nSELECT name FROM author;\n```\n", RIGHT),
        ("```SQL\nSELECT name\nFROM author;```", RIGHT),
        ("Here it is:\n```sql\nSELECT name FROM author\n```", GARBLED),
        ("```sql\nSELECT name FROM author\n```\nIt lists names.", GARBLED),
        ("```sql\nSELECT name FROM author\n```\n```sql\nSELECT 1\n```", GARBLED),
        ("no idea", GARBLED),
        ("SELECT", GARBLED),
        ("SELECT name FROM", GARBLED),
    ],
)
def test_code_fence_around_the_answer_is_ignored(judge: SqlJudge, answer: str, expected: tuple[bool, ...]) -> None:
    assert checks(ask(judge, "SELECT name FROM author", answer)) == expected


def test_without_tables_only_parsing_is_judged(judge: SqlJudge) -> None:
    verdict = ask(judge, "SELECT name FROM author", "SELECT anything FROM anywhere", context="")
    assert checks(verdict) == (True, None, None)
    assert verdict.reason == "not judged: the row has no CREATE TABLE to run it on"


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("SELECT name FROM author ORDER BY random() LIMIT 1", "the reference is not deterministic: random("),
        ("SELECT name FROM author WHERE born < date('now')", "the reference is not deterministic: 'now'"),
        ("SELECT 1", "the reference returns the same on all test databases, or its result is not deterministic"),
        ("SELECT name FROM author WHERE 1 = 0", "the reference returns the same on all test databases"),
        ("SELECT DATE_TRUNC('year', printed) FROM book", "the reference does not run in SQLite: no such function"),
        ("SELECT nickname FROM author", "the reference does not run in SQLite: no such column: nickname"),
        ("DELETE FROM author", "the reference is not a query"),
    ],
)
def test_unjudged_rows_have_a_reason(judge: SqlJudge, reference: str, why: str) -> None:
    verdict = ask(judge, reference, reference)
    assert verdict.checks["result"] is None
    assert passes_all(verdict)
    assert verdict.reason.startswith(f"not judged: {why}")


@pytest.mark.parametrize(
    "answer",
    [
        "SELECT DATE_TRUNC('month', printed) FROM book",
        "SELECT strftime('%Y', printed) FROM book",
        "SELECT publisher FROM book",
    ],
)
def test_a_reference_that_sqlite_does_not_run_decides_only_syntax(judge: SqlJudge, answer: str) -> None:
    reference = "SELECT DATE_TRUNC('year', printed) FROM book"
    assert checks(ask(judge, reference, answer)) == (True, None, None)
    assert checks(ask(judge, reference, "SELECT FROM")) == (False, None, None)


@pytest.mark.parametrize(
    "answer", ["SELECT TOP 5 name FROM author", "SELECT name FROM author LIMIT 5", "SELECT FROM", ""]
)
def test_unparsable_reference_decides_nothing(judge: SqlJudge, answer: str) -> None:
    assert checks(ask(judge, "SELECT TOP 5 name FROM author", answer)) == (None, None, None)


@pytest.mark.parametrize("answer", ["SELECT name FROM author", "SELECT name FROM author WHERE 0 = 1"])
def test_reference_that_never_returns_rows_compares_nothing(judge: SqlJudge, answer: str) -> None:
    assert checks(ask(judge, "SELECT name FROM author WHERE 1 = 0", answer)) == (True, True, None)
    assert checks(ask(judge, "SELECT name FROM author WHERE 1 = 0", "SELECT nickname FROM author")) == (
        True,
        False,
        None,
    )


def test_several_references_are_alternatives(judge: SqlJudge) -> None:
    both = "SELECT name FROM author WHERE born > 1900; SELECT id, name FROM author WHERE born > 1900;"
    assert checks(ask(judge, both, "SELECT id, name FROM author WHERE born > 1900")) == RIGHT
    assert checks(ask(judge, both, "SELECT name FROM author WHERE born > 1900")) == RIGHT
    assert checks(ask(judge, both, "SELECT id FROM author WHERE born > 1900")) == WRONG
    assert checks(ask(judge, both, both)) == FAILS
    broken_too = both + "SELECT nickname FROM author"
    assert checks(ask(judge, broken_too, "SELECT id FROM author WHERE born > 1900")) == WRONG
    assert checks(ask(judge, both, both, context="")) == (True, None, None)


def test_verdict_does_not_depend_on_earlier_requests(judge: SqlJudge) -> None:
    """The second query never returns a row; only the same text is known to be right."""
    both = "SELECT name FROM author WHERE born > 1900; SELECT name FROM author WHERE 1 = 0"
    first, second = both.split("; ")
    other = second.replace("1 = 0", "born < 0 AND born > 0")
    seen = [checks(ask(judge, both, answer)) for answer in (second, other, first, second, other)]
    assert seen == [RIGHT, WRONG, RIGHT, RIGHT, WRONG]


def test_rows_of_the_context_are_used(judge: SqlJudge) -> None:
    """Only a row of that name and that length tells these two apart."""
    context = TABLES + "\nINSERT INTO author VALUES (1, 'Astrid Anna Emilia Lindgren', 'Sweden', 1907);"
    reference, answer = "SELECT name FROM author", "SELECT substr(name, 1, 20) FROM author"
    assert checks(ask(judge, reference, answer, context)) == WRONG
    assert checks(ask(judge, reference, answer)) == RIGHT


def test_keys_and_constraints_of_the_tables_are_kept(judge: SqlJudge) -> None:
    """With them these are the same; on rows that break them they are not."""
    context = (
        "CREATE TABLE t (code TEXT PRIMARY KEY NOT NULL, kind TEXT NOT NULL CHECK (kind IN ('cat', 'dog')),"
        " size INTEGER NOT NULL UNIQUE CHECK (size > 0));"
    )
    assert checks(ask(judge, "SELECT code FROM t", "SELECT DISTINCT code FROM t", context)) == RIGHT
    assert checks(ask(judge, "SELECT size FROM t", "SELECT DISTINCT size FROM t WHERE size > 0", context)) == RIGHT
    assert (
        checks(ask(judge, "SELECT code FROM t WHERE kind <> 'cat'", "SELECT code FROM t WHERE kind = 'dog'", context))
        == RIGHT
    )
    assert (
        checks(ask(judge, "SELECT code FROM t WHERE kind = 'cat'", "SELECT code FROM t WHERE kind = 'dog'", context))
        == WRONG
    )


def test_tables_of_other_dialects_are_translated(judge: SqlJudge) -> None:
    context = (
        "CREATE TABLE t (id INT NOT NULL AUTO_INCREMENT PRIMARY KEY, kind ENUM('a', 'b'), n INT UNSIGNED)"
        " ENGINE=InnoDB;"
    )
    assert checks(ask(judge, "SELECT n FROM t WHERE kind = 'a'", "SELECT n FROM t WHERE kind = 'a'", context)) == RIGHT
    assert checks(ask(judge, "SELECT n FROM t WHERE kind = 'a'", "SELECT n FROM t WHERE kind = 'b'", context)) == WRONG
    verdict = ask(judge, "SELECT 1", "SELECT 1", "CREATE TABLE this is nothing;")
    assert checks(verdict) == (True, None, None)
    assert verdict.reason.startswith("not judged: SQLite cannot create the row's tables")


def test_a_keyword_of_other_dialects_may_be_a_name(judge: SqlJudge) -> None:
    context = "CREATE TABLE grant (id INTEGER PRIMARY KEY, amount REAL NOT NULL);"
    reference = "SELECT id FROM grant WHERE amount > 5"
    assert checks(ask(judge, reference, reference, context)) == RIGHT
    assert checks(ask(judge, reference, "SELECT id FROM grant WHERE amount >= 5", context)) == WRONG


def test_hostile_contexts_reach_nothing(judge: SqlJudge, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("outside") / "file.db"
    for statement in (f"ATTACH '{file}' AS x", f"VACUUM INTO '{file}'", "PRAGMA writable_schema = 1"):
        verdict = ask(judge, "SELECT name FROM author", "SELECT name FROM author", f"{TABLES}\n{statement};")
        assert verdict.checks["result"] is None
        assert not file.exists()


def test_checks_name_package_and_version(judge: SqlJudge) -> None:
    assert [check.name for check in judge.checks] == ["parses", "executes", "result"]
    assert judge.main_check == "result"
    assert all(any(char.isdigit() for char in check.checker) for check in judge.checks)


def test_missing_package_is_an_error_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apsw", None)
    with pytest.raises(InputError) as caught:
        SqlJudge()
    assert str(caught.value) == ("judging SQL needs the package apsw\nhint: pip install 'expert-launcher[quality]'")


@pytest.mark.parametrize("answer", ["SELECT 1", "SELEC", "", "DROP TABLE author", "x" * 200_000])
def test_undecidable_row_is_not_judged_for_any_answer(judge: SqlJudge, answer: str) -> None:
    """Without tables nothing can be run: neither right nor wrong, whatever the answer is."""
    assert checks(ask(judge, "SELECT name FROM author", answer, context=""))[1:] == (None, None)


def test_a_reference_that_does_not_run_compares_nothing(judge: SqlJudge) -> None:
    reference = "SELECT nosuch FROM author"
    for answer in ("SELECT name FROM author", "SELECT other FROM author", "SELEC"):
        assert checks(ask(judge, reference, answer))[2] is None


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        *(("SELECT title FROM book", f"SELECT title FROM book LIMIT {limit}") for limit in (25, 50, 399, 1000, 10**9)),
        ("SELECT DISTINCT country FROM author", "SELECT DISTINCT country FROM author LIMIT 100"),
        ("SELECT title FROM book WHERE price > 20", "SELECT title FROM book WHERE price > 20 LIMIT 100"),
        ("SELECT title FROM book ORDER BY price", "SELECT title FROM book ORDER BY price LIMIT 500"),
        ("SELECT title FROM book", "SELECT title FROM (SELECT * FROM book LIMIT 2000)"),
        (
            "SELECT name, title FROM author JOIN book ON author_id = author.id",
            "SELECT name, title FROM author JOIN book ON author_id = author.id LIMIT 300",
        ),
        ("SELECT COUNT(*) FROM book GROUP BY author_id", "SELECT COUNT(*) FROM book GROUP BY author_id LIMIT 60"),
        ("SELECT title FROM book WHERE price > 20", "SELECT title FROM book WHERE price > 20 AND length(title) < 60"),
        ("SELECT title FROM book", "SELECT title FROM book WHERE 200 > length(title)"),
        (
            "SELECT title FROM book WHERE title LIKE 'a%'",
            "SELECT title FROM book WHERE title LIKE 'a%' AND length(title) <= 90",
        ),
        ("SELECT title FROM book", "SELECT title FROM book WHERE (SELECT count(*) FROM book) < 5000"),
        (
            "SELECT author_id FROM book GROUP BY author_id",
            "SELECT author_id FROM book GROUP BY author_id HAVING COUNT(*) < 90",
        ),
        ("SELECT title FROM book WHERE price <= 20", "SELECT title FROM book WHERE abs(price) <= 20"),
        ("SELECT title FROM book WHERE price <= 20", "SELECT title FROM book WHERE price < 20.0001"),
        ("SELECT title FROM book", "SELECT trim(title) FROM book"),
        (
            "SELECT title FROM book",
            "SELECT title FROM (SELECT *, row_number() OVER () AS place FROM book) WHERE place <= 200",
        ),
        ("SELECT born FROM author", "SELECT abs(born) FROM author"),
        ("SELECT SUM(price) FROM book", "SELECT SUM(abs(price)) FROM book"),
    ],
)
def test_an_added_bound_is_found(judge: SqlJudge, reference: str, answer: str) -> None:
    assert checks(ask(judge, reference, answer)) == WRONG


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("SELECT COUNT(*) FROM book", "SELECT COUNT(*) FROM book LIMIT 1"),
        ("SELECT MAX(price) FROM book", "SELECT MAX(price) FROM book LIMIT 5000"),
        ("SELECT title FROM book WHERE id = 5", "SELECT title FROM book WHERE id = 5 LIMIT 1"),
        ("SELECT title FROM book ORDER BY price LIMIT 900", "SELECT b.title FROM book b ORDER BY b.price LIMIT 900"),
        ("SELECT title FROM book WHERE length(title) > 60", "SELECT title FROM book WHERE length(title) >= 61"),
        ("SELECT title FROM book WHERE abs(price) < 20", "SELECT title FROM book WHERE price < 20 AND price > -20"),
    ],
)
def test_a_bound_that_changes_nothing_is_right(judge: SqlJudge, reference: str, answer: str) -> None:
    assert checks(ask(judge, reference, answer)) == RIGHT
