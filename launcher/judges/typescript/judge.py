"""Judge of TypeScript: checks syntax, types, behaviour, and equality with the reference.

`behaves` is the main check: differently written functions can both be correct, so they are run. If the reference
declares types, those are compared instead. Without Node.js only `parses` and `equal` are judged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from launcher.core.worker import WorkerError
from launcher.judges.base import (
    MAX_ANSWER_CHARACTERS,
    Check,
    CloseOnExit,
    ReferenceRow,
    Verdict,
    fail_all,
    strip_code_fence,
)
from launcher.judges.node_tools import INSTALL_HINT
from launcher.judges.typescript.node_compiler import (
    CompilerInput,
    CompilerReport,
    TypescriptNode,
    find_typescript_tools,
)
from launcher.judges.typescript.syntax import SourceReader, Statement, name_checker

_FENCED_CODE = re.compile(r"^```[ \t]*(?:typescript|ts)?[ \t]*\n(.*?)^```", re.S | re.M)
_SECONDS = 10.0
_BATCH_ROWS = 32  # the compiler loads its library once per batch
_MISSING = f"not judged: needs Node.js and its package typescript ({INSTALL_HINT})"
_DIFFERS = "differs from the reference"


class TypescriptJudge(CloseOnExit):
    """Compiles and runs answers together with the declarations of their row."""

    def __init__(self, *, seconds: float = _SECONDS) -> None:
        tree_sitter, tools = name_checker(), find_typescript_tools()
        self._reader = SourceReader(seconds=seconds)
        self._node = TypescriptNode(tools, seconds=seconds) if tools else None
        compiler = runner = _MISSING
        if tools:
            compiler = f"typescript {tools.typescript.version}"
            runner = f"Node {'.'.join(map(str, tools.node.version))} with {compiler}"
        self._checks = (
            Check(name="parses", title="parses as TypeScript", checker=compiler if tools else tree_sitter),
            Check(name="types", title="type-checks, strict", checker=compiler),
            Check(name="behaves", title="does what the reference does", checker=runner),
            Check(name="equal", title="equals the reference, formatted", checker=tree_sitter),
        )

    @property
    def checks(self) -> tuple[Check, ...]:
        """All checks, in order of strictness."""
        return self._checks

    @property
    def main_check(self) -> str:
        """Name of the check that an expert is measured by."""
        return "behaves" if self._node else "equal"

    def judge(self, rows: Sequence[ReferenceRow], answers: Sequence[str]) -> list[Verdict]:
        """Return the verdict on each answer."""
        verdicts: list[Verdict | None] = []
        inputs: list[CompilerInput] = []
        for row, answer in zip(rows, answers, strict=True):
            fault = _find_fault(answer)
            verdicts.append(fail_all(self._checks, f"does not parse: {fault}") if fault else None)
            if not fault:
                inputs.append(self._make_input(row, strip_code_fence(answer)))
        judged = self._judge_by_compiler(self._node, inputs) if self._node else map(self._judge_by_tree, inputs)
        remaining = iter(judged)
        return [next(remaining) if verdict is None else verdict for verdict in verdicts]

    def close(self) -> None:
        """End the processes of the judge."""
        self._reader.close()
        if self._node:
            self._node.close()

    def _make_input(self, row: ReferenceRow, answer: str) -> CompilerInput:
        reference = strip_code_fence(row.reference)
        if self._node is None:
            return CompilerInput(answer=answer, reference=reference)
        given, answer_given = collect_declarations(self._reader, row, answer)
        return CompilerInput(given=given, answer_given=answer_given, answer=answer, reference=reference)

    def _judge_by_tree(self, source: CompilerInput) -> Verdict:
        fault = self._reader.read(source.answer).fault
        return fail_all(self._checks, f"does not parse: {fault}") if fault else self._compare_texts(source)

    def _compare_texts(self, source: CompilerInput) -> Verdict:
        is_equal = self._reader.is_equal(source.answer, source.reference)
        checks = {"parses": True, "types": None, "behaves": None, "equal": is_equal}
        return Verdict(checks=checks, reason="" if is_equal else _DIFFERS)

    def _judge_by_compiler(self, node: TypescriptNode, inputs: Sequence[CompilerInput]) -> Iterator[Verdict]:
        for batch in _split(inputs):
            reports: Sequence[CompilerReport | None] = [None] * len(batch)
            if len(batch) > 1:
                with suppress(WorkerError):  # one of them failed: compile each alone
                    reports = node.compile_all(batch)
            for source, report in zip(batch, reports, strict=True):
                yield self._judge_report(node, source, report) if report else self._judge_alone(node, source)

    def _judge_alone(self, node: TypescriptNode, source: CompilerInput) -> Verdict:
        """Judge one answer; if the compiler fails, it is the answer's fault unless it fails for the reference, too."""
        try:
            return self._judge_report(node, source, node.compile_all([source])[0])
        except WorkerError as error:
            reason = f"the compiler {error}"
        try:
            node.compile_all([replace(source, answer_given=source.given, answer=source.reference)])
        except WorkerError:
            return self._judge_by_tree(source)
        if self._reader.read(source.answer).fault:
            return fail_all(self._checks, f"does not parse: {reason}")
        return Verdict(checks={"parses": True, "types": False, "behaves": False, "equal": False}, reason=reason)

    def _judge_report(self, node: TypescriptNode, source: CompilerInput, report: CompilerReport) -> Verdict:
        if report.syntax:
            return fail_all(self._checks, f"does not parse: {report.syntax}")
        if report.reference_types:  # the row needs a browser API or a package
            return self._compare_texts(source)
        if report.types:
            checks = {"parses": True, "types": False, "behaves": False, "equal": False}
            return Verdict(checks=checks, reason=f"does not type-check: {report.types}")
        behaves, difference = _compare(node, report)
        is_equal = behaves is not False and self._reader.is_equal(source.answer, source.reference)
        return Verdict(
            checks={"parses": True, "types": True, "behaves": behaves, "equal": is_equal},
            reason=difference or ("" if is_equal else _DIFFERS),
        )


def _find_fault(answer: str) -> str:
    """Return what is wrong with a text before parsing; empty if nothing."""
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return f"it is longer than {MAX_ANSWER_CHARACTERS:,} characters"
    if not answer.isascii() and any("\ud800" <= char <= "\udfff" for char in answer):
        return "it contains a lone surrogate"
    return "" if answer.strip() else "it is empty"


def _split(inputs: Sequence[CompilerInput]) -> Iterator[list[CompilerInput]]:
    """Yield batches to compile together; a module that declares globals is compiled alone."""
    batch: list[CompilerInput] = []
    for source in inputs:
        if "declare" in source.answer or "declare" in source.reference or "declare" in source.given:
            yield [source]
            continue
        batch.append(source)
        if len(batch) == _BATCH_ROWS:
            yield batch
            batch = []
    if batch:
        yield batch


def _compare(node: TypescriptNode, report: CompilerReport) -> tuple[bool | None, str]:
    if report.same:
        return False, report.same
    behaviour = node.compare(report)
    if report.num_cases == 0:
        if behaviour:  # it does not even load
            return False, behaviour
        return (True, "") if report.same is not None else (None, "")
    return (None, "") if behaviour is None else (not behaviour, behaviour)


def collect_declarations(reader: SourceReader, row: ReferenceRow, answer: str) -> tuple[str, str]:
    """Return the declarations of a row, and those that the answer does not repeat.

    A declaration that the answer changes is kept, so that both conflict.
    """
    declared = _find_declarations(reader, row)
    if not declared:
        return "", ""
    repeated = reader.read(answer).statements
    kept = [one for one in declared if not any(_is_repeated(reader, one, other) for other in repeated)]
    return "\n".join(one.text for one in declared), "\n".join(one.text for one in kept)


def _find_declarations(reader: SourceReader, row: ReferenceRow) -> tuple[Statement, ...]:
    """Return the first text with only declarations: the context, fenced blocks, or the rest after an empty line."""
    blocks = "\n".join(_FENCED_CODE.findall(row.instruction))
    for text in (row.context, blocks, row.instruction.partition("\n\n")[2]):
        if text.strip() and len(text) <= MAX_ANSWER_CHARACTERS:
            source = reader.read(text)
            if source.has_only_declarations:
                return source.statements
    return ()


def _is_repeated(reader: SourceReader, declared: Statement, other: Statement) -> bool:
    if other.kind not in {declared.kind, "export_statement"}:
        return False
    return reader.is_equal(declared.text.removeprefix("export "), other.text.removeprefix("export "))
