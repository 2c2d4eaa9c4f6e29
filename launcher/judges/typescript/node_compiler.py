"""TypeScript's compiler and a sandbox for its output: Node.js processes without permissions and with a timeout.

One process compiles and runs nothing. One runs answers and another runs references: an answer that escapes from its
realm finds neither the reference nor its results, and no files, processes or sockets.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.core.worker import WorkerError, WorkerFailure
from launcher.judges.node_tools import (
    Node,
    NodePackage,
    find_node,
    find_package,
    make_node_command,
    make_node_environment,
)
from launcher.judges.worker import LimitedWorker

_HERE = Path(__file__).parent / "js"
_COMPILER, _RUNNER = _HERE / "compiler.cjs", _HERE / "runner.cjs"
_PARTS = tuple(_HERE / f"{name}.cjs" for name in ("cases", "inputs", "types"))
_HEAP_MIB = {"compiler": 512, "runner": 128}
_DATA_MIB = {"compiler": 2048, "runner": 1024}  # including buffers, code and stacks
_RELATIVE_ERROR = 1e-9  # sums may be computed in another order


@dataclass(frozen=True, kw_only=True, slots=True)
class Tools:
    """The installed Node.js and TypeScript."""

    node: Node
    typescript: NodePackage


@dataclass(frozen=True, kw_only=True, slots=True)
class CompilerInput:
    """Source texts of one row."""

    given: str = ""  # declarations placed before the reference
    answer_given: str = ""  # the same before the answer, without those it repeats
    answer: str
    reference: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CompilerReport:
    """Compiler output for an answer and its reference; error texts are empty if there is no error."""

    syntax: str
    types: str = ""
    reference_types: str = ""
    same: str | None = None  # difference of declared types; None: the reference declares none
    names: tuple[str, ...] = ()  # functions and classes to run
    cases: str = ""
    num_cases: int = 0
    answer_code: str = ""
    reference_code: str = ""


def find_typescript_tools() -> Tools | None:
    """Return the installed tools; None if one is missing."""
    node, typescript = find_node(), find_package("typescript")
    return Tools(node=node, typescript=typescript) if node and typescript else None


class TypescriptNode:
    """Compiler and runner processes, started on first use."""

    def __init__(self, tools: Tools, *, seconds: float) -> None:
        library = tools.typescript.folder / "lib"
        environment = make_node_environment()
        node, *flags = make_node_command(
            tools.node, _COMPILER, readable=[*_PARTS, tools.typescript.folder], heap_mib=_HEAP_MIB["compiler"]
        )
        self._compiler = LimitedWorker(
            [node, "--max-semi-space-size=64", *flags, str(library / "typescript.js")],
            environment,
            seconds=seconds,
            memory_mib=_DATA_MIB["compiler"],
        )
        node, *flags = make_node_command(tools.node, _RUNNER, readable=[], heap_mib=_HEAP_MIB["runner"])
        run_command = [node, "--disallow-code-generation-from-strings", *flags, str(round(seconds * 500))]
        self._runners = tuple(
            LimitedWorker(run_command, environment, seconds=seconds, memory_mib=_DATA_MIB["runner"]) for _ in range(2)
        )

    def compile_all(self, rows: Sequence[CompilerInput]) -> list[CompilerReport]:
        """Compile a batch; raises WorkerError if the compiler fails on any of it."""
        requests = [
            {
                "given": row.given,
                "answerGiven": row.answer_given,
                "answer": row.answer,
                "reference": row.reference,
            }
            for row in rows
        ]
        replies = json.loads(self._compiler.request(json.dumps(requests), retry=len(rows) == 1))
        if isinstance(replies, dict):
            raise WorkerError(WorkerFailure.EXITED, f"failed: {replies['broken']}")
        return [_parse_report(reply) for reply in replies]

    def compare(self, report: CompilerReport) -> str | None:
        """Describe how the behaviour differs; empty if it is the same, None if the reference cannot be run."""
        answers, references = self._runners
        expected, fault = _run(references, report.reference_code, report)
        if fault or (expected and all(map(_has_thrown, expected))):
            return None
        actual, fault = _run(answers, report.answer_code, report)
        if fault:
            return fault
        pairs = enumerate(zip(actual, expected, strict=True)) if len(actual) == len(expected) else [(0, (None, True))]
        different = [index for index, (one, other) in pairs if not _is_same(one, other)]
        if different:
            return f"returns something else than the reference in {len(different)} of {len(expected)} cases"
        return ""

    def close(self) -> None:
        """End all processes."""
        for worker in (self._compiler, *self._runners):
            worker.close()


def _parse_report(reply: Any) -> CompilerReport:
    if reply["syntax"]:
        return CompilerReport(syntax=reply["syntax"])
    plan = reply["plan"] or {"names": [], "cases": "[]", "count": 0}
    return CompilerReport(
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


def _run(worker: LimitedWorker, code: str, report: CompilerReport) -> tuple[list[Any], str]:
    """Return the result of every case, or an error text."""
    try:
        reply = json.loads(worker.request(json.dumps({"code": code, "names": report.names, "cases": report.cases})))
        results = json.loads(reply["results"]) if "results" in reply else None
    except WorkerError as error:
        return [], f"running it: the process {error}"
    except (ValueError, TypeError, RecursionError):
        return [], "running it returns nothing that can be parsed"
    return (results, "") if isinstance(results, list) else ([], f"it {reply.get('failed', 'returns nothing')}")


def _has_thrown(result: Any) -> bool:
    return bool(result == ["threw"] or (isinstance(result, list) and result[:1] == [["threw"]]))


def _is_same(one: Any, other: Any) -> bool:
    """Compare two serialized values; the order of objects, maps and sets does not matter."""
    if not (isinstance(one, list) and isinstance(other, list)):
        return type(one) is type(other) and bool(one == other)
    if len(one) != len(other):
        return False
    if one[:1] == other[:1] == ["n"] and len(one) == 2:
        return _is_same_number(one[1], other[1])
    if one and one[0] in ("o", "map", "set") and one[0] == other[0] and len(one) == 2:
        return _is_same_multiset(one[1], other[1])
    return all(map(_is_same, one, other))


def _is_same_multiset(one: Any, other: Any) -> bool:
    if not (isinstance(one, list) and isinstance(other, list) and len(one) == len(other)):
        return False
    return all(map(_is_same, sorted(one, key=json.dumps), sorted(other, key=json.dumps)))


def _is_same_number(one: Any, other: Any) -> bool:
    if isinstance(one, str) or isinstance(other, str):  # NaN, Infinity
        return bool(one == other)
    return bool(abs(one - other) <= _RELATIVE_ERROR * max(abs(one), abs(other)))
