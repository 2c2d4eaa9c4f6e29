"""TypeScript's compiler and a sandbox for its output: Node.js processes without permissions and with a timeout.

One process compiles and never runs code. Another one runs the references, each in a new realm. Every answer runs in a
process of its own: if it escapes from its realm, it finds neither the reference nor its results, and no later answer.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
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
_PARTS = tuple(_HERE / f"{name}.cjs" for name in ("cases", "inputs", "plans", "types"))
_REALM = _HERE / "realm.cjs"
_HEAP_MIB = {"compiler": 512, "runner": 128}
_DATA_MIB = {"compiler": 2048, "runner": 1024}  # including buffers, code and stacks
_CACHED_REFERENCES = 64
_UNORDERED = {"o": 1, "bare": 1, "map": 2, "set": 2}  # where descriptions have parts in any order
_FAILURES = {
    "load": "fails before the first call",
    "pending": "it does not finish",
    "size": "it returns too much data",
    "time": "it timed out",
}
_RELATIVE_ERROR = 1e-9  # sums may be computed in another order


@dataclass(frozen=True, kw_only=True, slots=True)
class Tools:
    """The installed Node.js and TypeScript."""

    node: Node
    typescript: NodePackage


@dataclass(frozen=True, kw_only=True, slots=True)
class CompilerInput:
    """TypeScript source of one row: its declarations, an answer and the reference."""

    given: str = ""  # declarations placed before the reference
    answer_given: str = ""  # the same before the answer, without those it repeats
    answer: str
    reference: str
    fault: str = ""  # why the answer is not even parsed


@dataclass(frozen=True, kw_only=True, slots=True)
class TestCases:
    """JavaScript source of test inputs, and of what to call and compare for each of them."""

    cases: str = "[]"
    plans: str = "[]"
    names: tuple[str, ...] = ()  # functions, classes and values to run
    num_plans: int = 0
    count: int = 0
    opaque: str = ""  # why the results cannot be compared


@dataclass(frozen=True, kw_only=True, slots=True)
class CompilerReport:
    """Compiler output for an answer and its reference; error texts are empty if there is no error."""

    reference_types: str  # the first type error of the reference
    declares_types: bool  # of the reference
    reference_code: str = ""
    cases: TestCases  # depend on the reference only
    syntax: str
    types: str
    globals: str  # what the answer declares outside of its module
    same: str  # difference of declared types
    extra: TestCases  # more cases, near the literals of the answer
    answer_code: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Results of running a program: first what it printed when it was loaded, then one result per test case."""

    results: list[Any] = field(default_factory=list)
    fault: str = ""
    opaque: str = ""  # the first value that cannot be described
    touched: bool = False  # it tried to change a built-in object


def find_typescript_tools() -> Tools | None:
    """Return the installed Node.js and TypeScript; None if one of them is missing."""
    node, typescript = find_node(), find_package("typescript")
    return Tools(node=node, typescript=typescript) if node and typescript else None


class TypescriptNode:
    """Node.js processes that compile TypeScript and run the compiled code; started on first use."""

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
        node, *flags = make_node_command(tools.node, _RUNNER, readable=[_REALM], heap_mib=_HEAP_MIB["runner"])
        run = [
            node,
            "--disallow-code-generation-from-strings",
            "--frozen-intrinsics",
            *flags,
            str(round(seconds * 500)),
        ]
        self._references, self._answers = (
            LimitedWorker(run, environment, seconds=seconds, memory_mib=_DATA_MIB["runner"], is_reused=is_reused)
            for is_reused in (True, False)
        )
        self._expected: OrderedDict[tuple[str, str], _Run] = OrderedDict()  # of the last references

    def compile_all(self, rows: Sequence[CompilerInput]) -> list[CompilerReport]:
        """Compile a batch; raises WorkerError if the compiler fails on any of it."""
        request = json.dumps([asdict(row) for row in rows])
        replies = json.loads(self._compiler.request(request, retry=len(rows) == 1))
        if isinstance(replies, dict):
            raise WorkerError(WorkerFailure.EXITED, f"failed: {replies['broken']}")
        return [_parse_report(reply) for reply in replies]

    def find_obstacle(self, report: CompilerReport) -> str:
        """Return why the reference cannot be compared with any answer; empty if it can."""
        if report.cases.opaque:
            return report.cases.opaque
        expected = self._run_reference(report)
        if expected.fault or expected.opaque:
            return expected.fault or expected.opaque
        if report.cases.count and all(map(_has_failed, expected.results[1:])):
            return "the reference fails for all generated inputs"
        is_empty = not report.cases.count and not report.declares_types and expected.results[0] == ["loaded", []]
        return "the reference declares and prints nothing" if is_empty else ""

    def compare(self, report: CompilerReport) -> str:
        """Describe how the behaviour of an answer differs from that of the reference; empty if it does not."""
        if report.answer_code == report.reference_code:
            return ""
        cases, expected = report.cases, self._run_reference(report)
        if report.extra.count:
            combined = _combine(cases, report.extra)
            with_extra = _run(self._references, report.reference_code, combined)
            if not with_extra.fault and not with_extra.opaque:
                cases, expected = combined, with_extra
        actual = _run(self._answers, report.answer_code, cases)
        if actual.fault:
            return actual.fault
        if actual.touched:
            return "changes a built-in object"
        if len(actual.results) != len(expected.results) or not _is_same(actual.results[0], expected.results[0]):
            return "prints other output than the reference when it is loaded"
        pairs = zip(actual.results[1:], expected.results[1:], strict=True)
        different = sum(not _is_same(one, other) for one, other in pairs)
        return f"behaves differently from the reference in {different} of {cases.count} cases" if different else ""

    def close(self) -> None:
        """End all processes."""
        for worker in (self._compiler, self._references, self._answers):
            worker.close()

    def _run_reference(self, report: CompilerReport) -> _Run:
        key = (report.reference_code, report.cases.cases)
        if key not in self._expected:
            self._expected[key] = _run(self._references, report.reference_code, report.cases)
            if len(self._expected) > _CACHED_REFERENCES:
                self._expected.popitem(last=False)
        return self._expected[key]


def _parse_report(reply: dict[str, Any]) -> CompilerReport:
    cases, extra = (TestCases(**(reply.pop(name, None) or {})) for name in ("cases", "extra"))
    return CompilerReport(cases=cases, extra=extra, **reply)


def _combine(one: TestCases, other: TestCases) -> TestCases:
    return TestCases(
        cases=f"[...{one.cases},...{other.cases}]",
        plans=f"[...{one.plans},...{other.plans}]",
        names=one.names,
        count=one.count + other.count,
    )


def _run(worker: LimitedWorker, code: str, cases: TestCases) -> _Run:
    """Run compiled code on all test cases; return the results, or why there are none."""
    request = {"code": code, "names": cases.names, "plans": cases.plans, "cases": cases.cases}
    try:
        reply = json.loads(worker.request(json.dumps(request)))
        if "report" not in reply:
            return _Run(fault=_FAILURES[reply["failed"]])
        report = json.loads(reply["report"])
        results, opaque, touched = report["results"], report["opaque"], report["touched"]
    except WorkerError as error:
        return _Run(fault=f"running it failed: the process {error}")
    except (ValueError, TypeError, KeyError, RecursionError):
        return _Run(fault="running it returns no result that can be parsed")
    if not isinstance(results, list) or not results or not isinstance(opaque, str):
        return _Run(fault="running it returns no result that can be parsed")
    return _Run(results=results, opaque=opaque, touched=bool(touched))


def _has_failed(result: Any) -> bool:
    """Return whether a test case ended in an error that JavaScript itself raised: its input did not fit the code."""
    match result:
        case [["threw" | "rejected" | "broken", ["error", _, None, *_], *_], *_]:
            return True
    return False


def _is_same(one: Any, other: Any) -> bool:
    """Return whether an answer's value equals the reference's; rounding and the order of keys do not matter."""
    if not (isinstance(one, list) and isinstance(other, list)):
        return type(one) is type(other) and bool(one == other)
    if one[:1] == other[:1] == ["error"] and len(other) == 3 and other[2] is None:
        return one[1:2] == other[1:2]  # the engine's own error: its text is not the code's
    if other[:1] in (["later"], ["rejected"]) and len(one) == 3 and len(other) == 2:
        one = one[:2]  # how long it waits counts only if the reference waits
    if len(one) != len(other):
        return False
    if one[:1] == other[:1] == ["n"] and len(one) == 2:
        return _is_same_number(one[1], other[1])
    unordered = _UNORDERED.get(other[0]) if other and isinstance(other[0], str) else None
    if unordered is not None and len(other) > unordered and one[0] == other[0]:
        pairs = zip(one, other, strict=True)
        return all(
            _is_same_multiset(*pair) if index == unordered else _is_same(*pair) for index, pair in enumerate(pairs)
        )
    return all(map(_is_same, one, other))


def _is_same_multiset(one: Any, other: Any) -> bool:
    if not (isinstance(one, list) and isinstance(other, list) and len(one) == len(other)):
        return False
    return all(map(_is_same, sorted(one, key=json.dumps), sorted(other, key=json.dumps)))


def _is_same_number(one: Any, other: Any) -> bool:
    if isinstance(one, str) or isinstance(other, str):  # NaN, Infinity
        return bool(one == other)
    return bool(abs(one - other) <= _RELATIVE_ERROR * max(abs(one), abs(other)))
