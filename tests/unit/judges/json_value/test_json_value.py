"""The JSON judge: correct answers pass; broken, invalid and different ones fail."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator

import pytest

from launcher.judges.base import ReferenceRow, Verdict
from launcher.judges.json_value import schema_check
from launcher.judges.json_value.compare import find_broken
from launcher.judges.json_value.judge import JsonJudge
from tests.conftest import ROOT, SHARED
from tests.unit.judges.verdicts import passes_all

pytestmark = pytest.mark.long

pytest.importorskip("jsonschema_rs")
SCHEMA = """{"type": "object", "properties": {"name": {"type": "string"}, "count": {"type": "integer", "minimum": 0},
  "day": {"type": "string", "format": "date"}}, "required": ["name"], "additionalProperties": false}"""


@pytest.fixture(scope="module")
def judge() -> Iterator[JsonJudge]:
    with JsonJudge(schema_seconds=2.0) as made:
        yield made


def ask(judge: JsonJudge, answer: str, reference: str = "{}", context: str = "", instruction: str = "") -> Verdict:
    row = ReferenceRow(instruction=instruction, context=context, reference=reference)
    return judge.judge([row], [answer])[0]


def sample(*names: str) -> list[ReferenceRow]:
    rows = []
    for name in names:
        file = ROOT / f"experts/json/sample/{name}.jsonl"
        rows += [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [ReferenceRow(instruction=row["text"], context=row["schema"], reference=row["object"]) for row in rows]


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_every_reference_of_the_sample_passes_every_check(judge: JsonJudge, stride: int) -> None:
    rows = sample("train", "validation", "test")[::stride]
    verdicts = judge.judge(rows, [row.reference for row in rows])
    assert [one for one in verdicts if not passes_all(one) or one.reason] == []
    assert all(one.checks["schema"] and one.checks["equal"] for one in verdicts)
    repairs = [find_broken(row.instruction) is not None for row in rows]
    assert 250 < sum(repairs) * stride < 500
    assert [one.checks["kept"] for one in verdicts] == [True if repair else None for repair in repairs]


def test_order_of_keys_spacing_spelling_and_one_fence_do_not_count(judge: JsonJudge) -> None:
    rng = random.Random(1)
    rows = sample("test")
    answers = []
    for row in rows:
        pairs = list(json.loads(row.reference).items())
        rng.shuffle(pairs)
        text = json.dumps(dict(pairs), indent=rng.choice((None, 1, 4)), ensure_ascii=rng.random() < 0.5)
        answers.append(rng.choice(("{}", "```json\n{}\n```", "\n```\n{}```\n", " \t\r\n{}\n")).replace("{}", text))
    assert [one.reason for one in judge.judge(rows, answers) if not passes_all(one)] == []


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("1", "1.0"),
        ("1e2", "100"),
        ("0.10", "0.1"),
        ("-0", "0"),
        ("100000000000000000000001", "1.00000000000000000000001e23"),
        ('"\\u00e9"', '"é"'),
        ('"\\ud83d\\ude00"', '"😀"'),
        ("[1,[2,{}]]", "[ 1 , [ 2 , { } ] ]"),
        ("null", " null "),
        ('{"a":{"b":1,"c":2}}', '{"a":{"c":2,"b":1}}'),
        ('""', '""'),
        ("1e999999", "1E+999999"),
        ("9" * 3000, "9" * 3000),
    ],
)
def test_equal_as_values(judge: JsonJudge, answer: str, reference: str) -> None:
    verdict = ask(judge, answer, reference)
    assert (dict(verdict.checks), verdict.reason) == ({"parses": True, "schema": None, "kept": None, "equal": True}, "")


@pytest.mark.parametrize(
    ("answer", "reference", "reason"),
    [
        ("1", "true", "the root is 1, not true"),
        ("0", "false", "0, not false"),
        ("null", "{}", "null, not an object"),
        ("[1,2]", "[2,1]", "[0] is 1, not 2"),
        ("[1]", "[1,1]", "has 1 items, not 2"),
        ('{"a":1}', '{"a":"1"}', "a is 1"),
        ('{"a":1,"b":2}', '{"a":1}', "adds b"),
        ('{"a":{"x":1}}', '{"a":{"x":1,"y":2}}', "lacks a.y"),
        ('"é"', '"e\u0301"', "the root is"),
        ('" a"', '"a"', "the root is"),
        ("1e400", "1e401", "1E+400, not 1E+401"),
        ("0.1", "0.10000000000000000001", "is 0.1"),
        ('{"a":null}', "{}", "adds a"),
    ],
)
def test_different_values_and_where(judge: JsonJudge, answer: str, reference: str, reason: str) -> None:
    verdict = ask(judge, answer, reference)
    assert verdict.checks["parses"] is True
    assert verdict.checks["equal"] is False
    assert reason in verdict.reason


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ('{"a":1,"a":1}', 'the key "a" twice'),
        ("NaN", "NaN"),
        ("[-Infinity]", "-Infinity"),
        ("\ufeff{}", "Expecting value"),
        ('"\\ud800"', "lone surrogate"),
        ('"\ud800"', "lone surrogate"),
        ("{} x", "Extra data"),
        ("{}{}", "Extra data"),
        ("// c\n{}", "Expecting value"),
        ("{/* c */}", "Expecting"),
        ("{'a':1}", "Expecting"),
        ('{"a":1,}', "line 1, column"),
        ("[1,]", "Expecting"),
        ("{a:1}", "Expecting"),
        ("True", "Expecting"),
        ("01", "Extra data"),
        ("+1", "Expecting"),
        (".5", "Expecting"),
        ("1.", "Extra data"),
        ("0x10", "Extra data"),
        ('"a\nb"', "control character"),
        ('"\\x41"', "escape"),
        ('{"a" 1}', "Expecting"),
        ("[1 2]", "Expecting"),
        ('"a', "Unterminated"),
        ("\u00a0{}", "Expecting"),
        ("Here it is: {}", "Expecting"),
        ("```json\n{}\n```\nDone.", "Expecting"),
        ("```json\n{}\n```\n```json\n{}\n```", "Expecting"),
        ("9" * 5000, "5,000 characters"),
        ("1e99999999999999999999999", "too large"),
        ("[" * 300 + "]" * 300, "too deeply"),
        ("[" * 50_000, "too deeply"),
        ('{"a":' * 15_000, "too deeply"),
        ("[" * 40_000 + "]" * 40_000, "too deeply"),
        ('"' + "x" * 10_000_000 + '"', "longer than 100,000"),
        ("[" + "1," * 4_000_000 + "1]", "longer than 100,000"),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_what_is_not_json_fails_every_check_at_once(judge: JsonJudge, answer: str, reason: str) -> None:
    start = time.perf_counter()
    verdict = ask(judge, answer, '{"name": "a"}', SCHEMA, 'Fix the JSON so that it fits the schema:\n{"name": "a"')
    assert time.perf_counter() - start < 60
    assert set(verdict.checks.values()) == {False}
    assert "does not parse" in verdict.reason
    assert reason in verdict.reason


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ('{"count":1}', "name"),
        ('{"name":1}', "name: 1 is not of type"),
        ('{"name":"a","count":-1}', "count"),
        ('{"name":"a","count":1.5}', "integer"),
        ('{"name":"a","more":1}', "more"),
        ('{"name":"a","day":"2024-02-30"}', "date"),
        ("[]", "object"),
        ('{"name":"a","count":1e400}', ""),
        ('{"name":"a","count":"1"}', "integer"),
    ],
)
def test_schema_violation_is_reported(judge: JsonJudge, answer: str, reason: str) -> None:
    verdict = ask(judge, answer, '{"name":"a"}', SCHEMA)
    is_fitting = "1e400" in answer  # a whole number, if a large one
    assert verdict.checks["schema"] is is_fitting
    assert verdict.checks["equal"] is False
    assert reason in verdict.reason


@pytest.mark.parametrize(
    "context", ["", "  ", "CREATE TABLE t (a INT)", '{"title": "a"}', "[]", "true", '{"type": "film"}', '{"type":']
)
def test_schema_check_is_not_judged_without_a_schema(judge: JsonJudge, context: str) -> None:
    assert ask(judge, "{}", "{}", context).checks["schema"] is None


def test_schema_that_the_reference_violates_is_not_judged(judge: JsonJudge) -> None:
    assert ask(judge, "[]", '{"name": 1}', SCHEMA).checks["schema"] is None


@pytest.mark.parametrize("reference", ["{}", '{"name": "a"}', "no JSON"])
@pytest.mark.parametrize("context", ["", "CREATE TABLE t (a INT)", SCHEMA])
@pytest.mark.parametrize("instruction", ["", "Fix the JSON so that it fits the schema:\n{,}"])
def test_the_row_alone_decides_which_checks_apply(
    judge: JsonJudge, reference: str, context: str, instruction: str
) -> None:
    judged = [
        {
            name: passed is not None
            for name, passed in ask(judge, answer, reference, context, instruction).checks.items()
        }
        for answer in ("This is no JSON.", "[]", '{"name": "a"}')
    ]
    assert judged[0] == judged[1] == judged[2]


def test_repaired_json_keeps_all_values(judge: JsonJudge) -> None:
    order = 'Fix the JSON so that it fits the schema:\n{"name":"Ann","tags":["x","y",],count=3}'
    whole = '{"name":"Ann","tags":["x","y"],"count":3}'

    def kept(answer: str, reference: str = whole) -> bool | None:
        return ask(judge, answer, reference, "", order).checks["kept"]

    assert kept(whole) is True
    assert kept('{"name":"Ann","tags":["x","y"],"count":3,"more":1}') is True
    assert kept('{"name":"Ann","tags":["x"],"count":3}') is False
    assert kept('{"name":"Ann","count":3}') is False
    assert kept('{"name":"ann","tags":["x","y"],"count":3}') is False
    made_up = '{"name":"Ann","tags":["x","y"],"count":3,"id":"f81d"}'
    assert kept('{"name":"Ann","tags":["x","y"],"count":3,"id":"77"}', made_up) is True
    assert ask(judge, "{}", whole, "", "Describe this JSON").checks["kept"] is None


def test_mutated_values_are_rejected(judge: JsonJudge) -> None:
    """A digit, a letter, a missing or a further key or item: each is another value."""
    rng = random.Random(2)
    rows, answers = [], []
    for row in sample("validation", "test"):
        tree = json.loads(row.reference)
        key = rng.choice(list(tree))
        for mutant in (
            {name: value for name, value in tree.items() if name != key},
            tree | {"made_up": 1},
            tree | {key: f"{tree[key]}x"},
            {("other" if name == key else name): value for name, value in tree.items()},
        ):
            rows.append(row)
            answers.append(json.dumps(mutant))
    verdicts = judge.judge(rows, answers)
    assert len(verdicts) == 1600
    assert [one for one in verdicts if one.checks["equal"] or not one.reason] == []


def test_real_answers_parse(judge: JsonJudge) -> None:
    file = SHARED / "data/json_instructions.jsonl"
    if not file.is_file():
        pytest.skip("the shared data is not available")
    parts = re.compile(r"<\|user\|>\n(.*?)\n<\|end\|>\n<\|assistant\|>\n(.*?)\n<\|end\|>", re.S)
    found = [parts.search(json.loads(line)["text"]) for line in file.read_text(encoding="utf-8").splitlines()]
    pairs = [match.groups() for match in found if match]
    rows = [ReferenceRow(instruction=order, context="", reference=answer) for order, answer in pairs]
    verdicts = judge.judge(rows, [row.reference for row in rows])
    assert len(verdicts) == 1995
    assert [one for one in verdicts if not passes_all(one)] == []
    assert (
        sum(one.checks["kept"] is not None for one in verdicts) == sum("Fix this" in order for order, _ in pairs) > 800
    )


def test_without_the_package_only_the_schema_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_check, "find_spec", lambda _name: None)
    with JsonJudge() as judge:
        verdict = ask(judge, '{"name": "a"}', '{"name": "a"}', context=SCHEMA)
        assert verdict.checks == {"parses": True, "schema": None, "kept": None, "equal": True}
        assert judge.checks[1].checker == "not judged: needs jsonschema-rs (pip install 'expert-launcher[quality]')"


def test_every_check_names_its_checker(judge: JsonJudge) -> None:
    assert [check.name for check in judge.checks] == ["parses", "schema", "kept", "equal"]
    assert judge.main_check == "equal"
    assert all(re.search(r"\d+\.\d+", check.checker) for check in judge.checks)
