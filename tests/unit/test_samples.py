"""Sample data of the experts: reproducible, valid in every row, and without duplicates across splits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from experts.generator import domain_data
from experts.generator.__main__ import main
from experts.generator.dice import Dice
from experts.generator.domains import load_domains
from experts.generator.splits import EXPERTS, SPLITS, load_checker
from tests.conftest import ROOT

pytestmark = pytest.mark.long

Row = dict[str, str]
COUNTS = {"train": 2000, "validation": 200, "test": 200}
MAX_BYTES = 1_600_000  # of one expert's files
UNSEEN_TEST_ROWS = 60

each_expert = pytest.mark.parametrize("name", EXPERTS)


@cache
def load_rows(name: str, split: str) -> tuple[Row, ...]:
    lines = (ROOT / f"experts/{name}/sample/{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line) for line in lines)


def all_rows(name: str) -> list[Row]:
    return [row for split in SPLITS for row in load_rows(name, split)]


def answer(row: Row) -> str:
    return list(row.values())[-1]


def prompt(row: Row) -> str:
    return "\n".join(list(row.values())[:-1])


@pytest.mark.process
def test_committed_files_are_reproducible() -> None:
    """Runs in a separate process with a different hash seed."""
    command = [sys.executable, "-m", "experts.generator", "--check"]
    environment = os.environ | {"PYTHONHASHSEED": "12345"}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert (result.returncode, result.stderr) == (0, "")


def test_check_reports_every_file_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in EXPERTS:
        for split in SPLITS:
            target = tmp_path / "experts" / name / "sample" / f"{split}.jsonl"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / f"experts/{name}/sample/{split}.jsonl").read_bytes())
    folder = tmp_path / "experts"
    changed = folder / "sql/sample/test.jsonl"
    changed.write_text(changed.read_text(encoding="utf-8").replace("SELECT", "SELEKT", 1), encoding="utf-8")
    (folder / "json/sample/train.jsonl").unlink()
    assert main(["--check"], folder=folder) == 1
    errors = capsys.readouterr().err
    assert re.findall(r"^(\S+) is not", errors, re.MULTILINE) == [
        "experts/json/sample/train.jsonl",
        "experts/sql/sample/test.jsonl",
    ]


@each_expert
def test_fields_match_the_field_mapping(name: str) -> None:
    manifest = json.loads((ROOT / f"experts/{name}/manifest.json").read_text())
    mapped = list(manifest["training"]["dataset"]["field_mapping"].values())
    assert {tuple(row) for row in all_rows(name)} == {tuple(mapped)}


@each_expert
def test_counts_and_sizes_are_within_limits(name: str) -> None:
    assert {split: len(load_rows(name, split)) for split in SPLITS} == COUNTS
    sizes = [sum(len(text.encode()) for text in row.values()) for row in all_rows(name)]
    assert sum(sizes) / len(sizes) <= 700
    assert max(sizes) <= 1200
    assert sum(300 <= size <= 900 for size in sizes) >= 0.8 * len(sizes)
    files = [ROOT / f"experts/{name}/sample/{split}.jsonl" for split in SPLITS]
    assert sum(file.stat().st_size for file in files) < MAX_BYTES


@each_expert
def test_answers_and_prompts_are_unique(name: str) -> None:
    rows = all_rows(name)
    assert len({answer(row) for row in rows}) == len(rows)
    assert len({prompt(row) for row in rows}) == len(rows)


def test_only_the_test_split_has_unseen_domains() -> None:
    unseen = {
        table
        for domain in load_domains(domain_data.UNSEEN_DOMAINS)
        for entity in domain.entities
        for table in (entity.name, entity.plural_name)
    }

    def count_unseen(split: str) -> int:
        tables = [set(re.findall(r"CREATE TABLE (\w+)", row["sql_context"])) for row in load_rows("sql", split)]
        return sum(bool(names & unseen) for names in tables)

    assert {split: count_unseen(split) for split in SPLITS} == {"train": 0, "validation": 0, "test": UNSEEN_TEST_ROWS}


def test_domains_do_not_share_entities() -> None:
    seen, unseen = load_domains(domain_data.SEEN_DOMAINS), load_domains(domain_data.UNSEEN_DOMAINS)
    assert len(seen) >= 20
    names = [entity.name for domain in (*seen, *unseen) for entity in domain.entities]
    assert len(set(names)) == len(names)


def test_dice_are_independent_of_the_python_version() -> None:
    dice = Dice(7)
    assert [dice.below(100) for _ in range(5)] == [32, 15, 65, 7, 53]
    assert dice.shuffle("abcdef") == ["c", "a", "e", "b", "d", "f"]
    assert dice.subset("abcdef", 3) == ["a", "d", "f"]


@pytest.mark.parametrize("split", SPLITS)
def test_sql_runs_in_sqlite(split: str) -> None:
    check_row = load_checker("sql")
    for row in load_rows("sql", split):
        check_row(row)


def test_objects_conform_to_their_schemas() -> None:
    from experts.generator.json_check import check_object, check_row

    for row in load_rows("json", "train"):
        check_object(row)
    for row in load_rows("json", "validation") + load_rows("json", "test"):
        check_row(row)  # the schema too


def test_about_one_json_row_in_seven_is_a_repair() -> None:
    from experts.generator.json_rows import is_repair

    rows = all_rows("json")
    assert 0.12 <= sum(map(is_repair, rows)) / len(rows) <= 0.18


def test_cypher_conforms_to_its_schema() -> None:
    from experts.generator.cypher_check import check_schema_use

    for row in all_rows("neo4j"):
        check_schema_use(row)


def test_cypher_parses() -> None:
    """Parses queries until every part has occurred; `python -m experts.generator` parses all."""
    pytest.importorskip("graphglot")
    from experts.generator.cypher_check import check_syntax, pieces_of

    known = set[str]()
    for row in all_rows("neo4j"):
        pieces = pieces_of(row["cypher"])
        if not pieces <= known:
            check_syntax(row["cypher"])
            known |= pieces
    assert len(known) > 50


def test_typescript_parses() -> None:
    pytest.importorskip("tree_sitter_typescript")
    check_row = load_checker("typescript")
    for row in all_rows("typescript"):
        check_row(row)


@pytest.mark.process
@pytest.mark.skipif("LAUNCHER_TSC" not in os.environ, reason="LAUNCHER_TSC does not name a TypeScript compiler")
@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_typescript_type_checks(tmp_path: Path, stride: int) -> None:
    pytest.importorskip("tree_sitter_typescript")
    from experts.generator.typescript_check import render_module

    for number, row in enumerate([*all_rows("typescript")][::stride]):
        (tmp_path / f"row{number}.ts").write_text(render_module(row), encoding="utf-8")
    options = ["--noEmit", "--strict", "--noImplicitReturns", "--target", "es2022", "--module", "esnext"]
    options += ["--lib", "es2022", "--skipLibCheck"]  # no globals of browsers
    files = sorted(str(file) for file in tmp_path.iterdir())
    result = subprocess.run([os.environ["LAUNCHER_TSC"], *options, *files], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[:2000]


def _replace(field: str, pattern: str, by: str) -> Callable[[Row], Row]:
    return lambda row: row | {field: re.sub(pattern, by, row[field], count=1)}


FAULTS: dict[str, tuple[str, Callable[[Row], Row]]] = {
    "no such column": ("sql", _replace("sql", r"SELECT ", "SELECT nowhere, ")),
    "no such table": ("sql", _replace("sql_context", r"CREATE TABLE ", "CREATE TABLE x")),
    "two statements": ("sql", _replace("sql", r";", "; DROP TABLE x;")),
    "key left out": ("json", _replace("object", r'^\{"\w+":("[^"]*"|[\d.]+),', "{")),
    "key twice": ("json", _replace("object", r'^\{("\w+":("[^"]*"|[\d.]+),)', r"{\1\1")),
    "made-up key": ("json", _replace("object", r"^\{", '{"madeUp":1,')),
    "made-up text": ("json", _replace("object", r'":"', '":"Zz')),
    "unknown property": ("neo4j", _replace("cypher", r" RETURN (\w+)\b", r" RETURN \1.nothing, \1")),
    "unknown label": ("neo4j", _replace("cypher", r"\((\w+):(\w+)", r"(\1:Unknown")),
    "broken query": ("neo4j", _replace("cypher", r" RETURN ", " RETURN RETURN ")),
    "no result": ("neo4j", _replace("cypher", r" RETURN .*", "")),
    "open brace": ("typescript", _replace("output", r"\}(?=[^}]*$)|;$", "{")),
    "broken types": ("typescript", _replace("instruction", r"interface (\w+) \{", r"interface \1 [")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_checker_rejects_invalid_row(fault: str) -> None:
    name, break_row = FAULTS[fault]
    pytest.importorskip({"neo4j": "graphglot", "typescript": "tree_sitter_typescript"}.get(name, "jsonschema"))
    check_row = load_checker(name)
    changed_rows = [(row, break_row(row)) for row in load_rows(name, "test")]
    changed = [after for before, after in changed_rows if before != after]
    assert len(changed) >= 20
    for row in changed[:10]:
        with pytest.raises(Exception):  # noqa: B017, PT011  the parsers' own errors
            check_row(row)


def test_checker_rejects_reversed_relationship() -> None:
    from experts.generator.cypher_check import check_schema_use

    row = {
        "question": "",
        "schema": "Node properties:\nA {x: STRING}\nB {y: STRING}\nRelationships:\n(:A)-[:R]->(:B)",
        "cypher": "MATCH (a:A)-[:R]->(b:B) RETURN a.x, b.y",
    }
    check_schema_use(row)
    with pytest.raises(ValueError, match=r"no \(:B\)-\[:R\]->\(:A\)"):
        check_schema_use(row | {"cypher": "MATCH (a:A)<-[:R]-(b:B) RETURN a.x"})
    with pytest.raises(ValueError, match=r"b\.x is not in the schema"):
        check_schema_use(row | {"cypher": "MATCH (a:A)-[:R]->(b:B) RETURN b.x"})
