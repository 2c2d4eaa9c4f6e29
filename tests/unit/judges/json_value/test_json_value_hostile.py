"""Untrusted schemas download nothing and take bounded time and memory."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from launcher.judges.base import ReferenceRow, Verdict
from launcher.judges.json_value.judge import JsonJudge

pytestmark = pytest.mark.process

pytest.importorskip("jsonschema_rs")
TREE = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}


@pytest.fixture(scope="module")
def judge() -> Iterator[JsonJudge]:
    with JsonJudge(schema_seconds=0.5) as made:
        yield made


def ask(judge: JsonJudge, schema: Any, answer: str, reference: str) -> Verdict:
    start = time.perf_counter()
    row = ReferenceRow(instruction="", context=json.dumps(schema), reference=reference)
    verdict = judge.judge([row], [answer])[0]
    assert time.perf_counter() - start < 60
    return verdict


def make_bomb(depth: int) -> dict[str, Any]:
    """Every definition asks the next one twice."""
    links = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(depth)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{depth}": {"type": "integer"}}}


@pytest.mark.parametrize("address", ["http://127.0.0.1:{port}/s.json", "file:///etc/passwd", "other.json"])
def test_no_schema_is_downloaded(judge: JsonJudge, address: str) -> None:
    """A server would hear of it."""
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)

        def listen() -> None:
            try:
                heard.append(server.accept())
            except TimeoutError:
                return

        listener = threading.Thread(target=listen)
        listener.start()
        url = address.format(port=server.getsockname()[1])
        for schema in (
            {"$ref": url},
            {"type": "object", "properties": {"a": {"$ref": url}}},
            {"$schema": url, "type": "object"},
        ):
            assert ask(judge, schema, "{}", "{}").checks["schema"] is None
        listener.join()
    assert heard == []


@pytest.mark.parametrize(
    "schema", [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}, {"$dynamicRef": "#x", "$dynamicAnchor": "x"}]
)
def test_recursive_schema_terminates(judge: JsonJudge, schema: Any) -> None:
    assert ask(judge, schema, "1", "1").checks["schema"] in (True, None)


def test_references_are_followed(judge: JsonJudge) -> None:
    assert ask(judge, TREE, "[[],[[]]]", "[]").checks["schema"] is True
    assert ask(judge, TREE, "[[],[1]]", "[]").checks["schema"] is False
    assert ask(judge, TREE, "[" * 150 + "]" * 150, "[]").checks["schema"] is True


def test_exponential_time_is_cut_off_and_the_next_answer_is_judged(judge: JsonJudge) -> None:
    """The reference takes as long: the schema is the cause, and the result is unknown."""
    assert ask(judge, make_bomb(40), "1", "1").checks["schema"] is None
    assert ask(judge, make_bomb(4), "1", "1").checks["schema"] is True
    assert ask(judge, make_bomb(4), '"x"', "1").checks["schema"] is False


def test_an_answer_that_takes_too_long_against_a_fair_schema_is_wrong(judge: JsonJudge) -> None:
    link = {"items": {"$ref": "#/$defs/n"}}
    schema = {"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": [{"allOf": [link, {"maxItems": 0}]}, link]}}}
    verdict = ask(judge, schema, "[" * 150 + "]" * 150, "[[]]")
    assert verdict.checks["schema"] in (True, False)
    if verdict.checks["schema"] is False:
        assert "timed out after 0.5 s" in verdict.reason


@pytest.mark.parametrize("pattern", ["^(a+)+$", "^(a|aa)+$", "(?=a)^(a+)+$", r"^(\w+\s?)*$", r"(a*)*\1$"])
def test_a_catastrophic_pattern_is_bounded(judge: JsonJudge, pattern: str) -> None:
    verdict = ask(judge, {"type": "string", "pattern": pattern}, json.dumps("a" * 5000 + "!"), '"aa"')
    assert verdict.checks["schema"] is False


def test_a_pattern_that_is_too_large_is_no_schema(judge: JsonJudge) -> None:
    assert ask(judge, {"pattern": "(((a{100}){100}){100}){100}"}, '"a"', '"a"').checks["schema"] is None


def test_deep_and_large_schemas_are_bounded(judge: JsonJudge) -> None:
    for depth in (500, 20_000):
        deep = '{"properties": {"a": ' * depth + "true" + "}}" * depth
        assert (
            judge.judge([ReferenceRow(instruction="", context=deep, reference="1")], ["1"])[0].checks["schema"] is None
        )
    wide = {"items": {"anyOf": [{"const": index} for index in range(3000)]}}
    assert ask(judge, wide, json.dumps([2999] * 15_000), "[]").checks["schema"] in (True, False)
    assert ask(judge, {"uniqueItems": True}, json.dumps([[index] for index in range(10_000)]), "[]").checks["schema"]


@pytest.mark.parametrize("number", ["1e400", "-1e999999", "1e-999999", "123456789" * 400, "0." + "1" * 3000])
@pytest.mark.parametrize("word", ["minimum", "maximum", "multipleOf", "const"])
def test_extreme_numbers_are_judged(judge: JsonJudge, number: str, word: str) -> None:
    assert ask(judge, {"type": "number", word: 3}, number, "3").checks["schema"] in (True, False)


def test_escaped_reference_is_validated_by_the_worker(judge: JsonJudge) -> None:
    row = ReferenceRow(instruction="", context=json.dumps(make_bomb(40)).replace("$ref", "\\u0024ref"), reference="1")
    start = time.perf_counter()
    assert judge.judge([row], ["1"])[0].checks["schema"] is None
    assert time.perf_counter() - start < 60


def test_many_keys_of_which_one_is_repeated_are_rejected_at_once(judge: JsonJudge) -> None:
    keys = [f'"{number:x}":1' for number in range(10_000)]
    start = time.process_time()
    row = ReferenceRow(instruction="", context="", reference="{}")
    (verdict,) = judge.judge([row], ["{" + ",".join([*keys, keys[-1]]) + "}"])
    assert verdict.checks["parses"] is False
    assert '"270f" twice' in verdict.reason
    assert time.process_time() - start < 1
