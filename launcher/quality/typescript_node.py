"""TypeScript's own compiler, and a place to run what it makes: Node processes without rights, killed when late.

One process compiles; it runs nothing of what it reads. One runs answers and another references: an answer that got out
of its realm would find neither the reference nor a way to change what it gave, no file, no process and no socket.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.quality.line_worker import LineWorker, WorkerGoneError
from launcher.quality.node_tools import Node, NodePackage, find_node, find_package, make_command, make_environment

_HERE = Path(__file__).parent
_COMPILER, _RUNNER = _HERE / "typescript_compiler.cjs", _HERE / "typescript_runner.cjs"
_PARTS = tuple(_HERE / f"typescript_{name}.cjs" for name in ("cases", "inputs", "same"))
_HEAP_MIB = {"compiler": 512, "runner": 128}
_DATA_MIB = {"compiler": 2048, "runner": 1024}  # with what is not in the heap: buffers, code, stacks
_RELATIVE_ERROR = 1e-9  # of numbers: sums may be added up in another order


@dataclass(frozen=True, kw_only=True, slots=True)
class Tools:
    """What is installed."""

    node: Node
    typescript: NodePackage


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What the compiler looks at."""

    given: str = ""  # declarations that stand before the reference
    answer_given: str = ""  # and before the answer: less those that it repeats
    answer: str
    reference: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What the compiler says of an answer and a reference. Faults are empty where there are none."""

    syntax: str
    types: str = ""
    reference_types: str = ""
    same: str | None = None  # of the types that are declared; None: the reference declares none
    names: tuple[str, ...] = ()  # what is run
    cases: str = ""
    num_cases: int = 0
    answer_code: str = ""
    reference_code: str = ""


def find_tools() -> Tools | None:
    node, typescript = find_node(), find_package("typescript")
    return Tools(node=node, typescript=typescript) if node and typescript else None


class TypescriptNode:
    """Processes are started when they are first needed."""

    def __init__(self, tools: Tools, *, seconds: float) -> None:
        library = tools.typescript.folder / "lib"
        environment = make_environment()
        node, *flags = make_command(
            tools.node, _COMPILER, readable=[*_PARTS, tools.typescript.folder], heap_mib=_HEAP_MIB["compiler"]
        )
        self._compiler = LineWorker(
            [node, "--max-semi-space-size=64", *flags, str(library / "typescript.js")],
            environment,
            seconds=seconds,
            memory_mib=_DATA_MIB["compiler"],
        )
        node, *flags = make_command(tools.node, _RUNNER, readable=[], heap_mib=_HEAP_MIB["runner"])
        run_command = [node, "--disallow-code-generation-from-strings", *flags, str(round(seconds * 500))]
        self._runners = tuple(
            LineWorker(run_command, environment, seconds=seconds, memory_mib=_DATA_MIB["runner"]) for _ in range(2)
        )

    def look_at_all(self, rows: Sequence[Row]) -> list[Look]:
        """Raises WorkerGoneError where the compiler did not come to an end with all of them."""
        asked = [
            {
                "given": row.given,
                "answerGiven": row.answer_given,
                "answer": row.answer,
                "reference": row.reference,
            }
            for row in rows
        ]
        replies = json.loads(self._compiler.ask(json.dumps(asked), is_final=len(rows) == 1))
        if isinstance(replies, dict):
            raise WorkerGoneError(f"broke the compiler: {replies['broken']}")
        return [_read_look(reply) for reply in replies]

    def compare(self, look: Look) -> str | None:
        """How the answer behaves otherwise than the reference; empty: the same; None: the reference cannot be run."""
        answers, references = self._runners
        wanted, fault = _run(references, look.reference_code, look)
        if fault or (wanted and all(map(_has_thrown, wanted))):
            return None
        got, fault = _run(answers, look.answer_code, look)
        if fault:
            return fault
        pairs = enumerate(zip(got, wanted, strict=True)) if len(got) == len(wanted) else [(0, (None, True))]
        different = [index for index, (one, other) in pairs if not _is_same(one, other)]
        if different:
            return f"gives something else than the reference in {len(different)} of {len(wanted)} cases"
        return ""

    def close(self) -> None:
        for worker in (self._compiler, *self._runners):
            worker.close()


def _read_look(reply: Any) -> Look:
    if reply["syntax"]:
        return Look(syntax=reply["syntax"])
    plan = reply["plan"] or {"names": [], "cases": "[]", "count": 0}
    return Look(
        syntax="",
        types=reply["types"],
        reference_types=reply["referenceTypes"],
        same=reply["same"],
        names=tuple(plan["names"]),
        cases=plan["cases"],
        num_cases=plan["count"],
        answer_code=reply.get("answerCode", ""),
        reference_code=reply.get("referenceCode", ""),
    )


def _run(worker: LineWorker, code: str, look: Look) -> tuple[list[Any], str]:
    """What came of every case, or why nothing did."""
    try:
        reply = json.loads(worker.ask(json.dumps({"code": code, "names": look.names, "cases": look.cases})))
        results = json.loads(reply["results"]) if "results" in reply else None
    except WorkerGoneError as gone:
        return [], f"running it {gone}"
    except (ValueError, TypeError, RecursionError):
        return [], "running it gives nothing that can be read"
    return (results, "") if isinstance(results, list) else ([], f"it {reply.get('failed', 'gives nothing')}")


def _has_thrown(result: Any) -> bool:
    return bool(result == ["threw"] or (isinstance(result, list) and result[:1] == [["threw"]]))


def _is_same(one: Any, other: Any) -> bool:
    """Of two shown values. Objects, maps and sets are compared whatever their order."""
    if not (isinstance(one, list) and isinstance(other, list)):
        return type(one) is type(other) and bool(one == other)
    if len(one) != len(other):
        return False
    if one[:1] == other[:1] == ["n"] and len(one) == 2:
        return _is_same_number(one[1], other[1])
    if one and one[0] in ("o", "map", "set") and one[0] == other[0] and len(one) == 2:
        return _is_same_bag(one[1], other[1])
    return all(map(_is_same, one, other))


def _is_same_bag(one: Any, other: Any) -> bool:
    if not (isinstance(one, list) and isinstance(other, list) and len(one) == len(other)):
        return False
    return all(map(_is_same, sorted(one, key=json.dumps), sorted(other, key=json.dumps)))


def _is_same_number(one: Any, other: Any) -> bool:
    if isinstance(one, str) or isinstance(other, str):  # NaN, Infinity
        return bool(one == other)
    return bool(abs(one - other) <= _RELATIVE_ERROR * max(abs(one), abs(other)))
