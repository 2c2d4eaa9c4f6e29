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
    NOT_JUDGED,
    Check,
    CloseOnExit,
    ReferenceRow,
    Verdict,
    has_lone_surrogate,
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
_MISSING = f"{NOT_JUDGED}needs Node.js and its package typescript ({INSTALL_HINT})"
_DIFFERS = "differs from the reference"


class TypescriptJudge(CloseOnExit):
    """Compiles and runs answers together with the declarations of their row."""

    def __init__(self, *, seconds: float = _SECONDS) -> None:
        tree_sitter, tools = name_checker(), find_typescript_tools()
        self._reader = SourceReader(seconds=seconds)
        self._node = TypescriptNode(tools, seconds=seconds) if tools else None
        self.main_check = "behaves" if tools else "equal"
        compiler = runner = _MISSING
        if tools:
            compiler = f"typescript {tools.typescript.version}"
            runner = f"Node {'.'.join(map(str, tools.node.version))} with {compiler}"
        self.checks = (
            Check(name="parses", title="parses as TypeScript", checker=compiler if tools else tree_sitter),
            Check(name="types", title="type-checks, strict", checker=compiler),
            Check(name="behaves", title="does what the reference does", checker=runner),
            Check(name="equal", title="equals the reference, formatted", checker=tree_sitter),
        )

    def judge(self, rows: Sequence[ReferenceRow], answers: Sequence[str]) -> list[Verdict]:
        """Return the verdict on each answer."""
        inputs = [self._make_input(row, answer) for row, answer in zip(rows, answers, strict=True)]
        if self._node is None:
            return [self._judge_by_tree(source) for source in inputs]
        return list(self._judge_by_compiler(self._node, inputs))

    def close(self) -> None:
        """End the processes of the judge."""
        self._reader.close()
        if self._node:
            self._node.close()

    def _make_input(self, row: ReferenceRow, answer: str) -> CompilerInput:
        """Return the compiler's input for an answer. A rejected answer becomes empty: only its row is compiled."""
        text = "" if _find_fault(answer) else strip_code_fence(answer)
        reference = strip_code_fence(row.reference)
        if self._node is None:
            return CompilerInput(answer=text, reference=reference, fault=_find_fault(answer))
        given, answer_given = collect_declarations(self._reader, row, text)
        return CompilerInput(
            given=given, answer_given=answer_given, answer=text, reference=reference, fault=_find_fault(answer)
        )

    def _judge_by_tree(self, source: CompilerInput) -> Verdict:
        fault = source.fault or self._reader.read(source.answer).fault
        is_equal = not fault and self._reader.is_equal(source.answer, source.reference)
        checks = {"parses": not fault, "types": None, "behaves": None, "equal": is_equal}
        return Verdict(checks=checks, reason=f"does not parse: {fault}" if fault else "" if is_equal else _DIFFERS)

    def _judge_by_compiler(self, node: TypescriptNode, inputs: Sequence[CompilerInput]) -> Iterator[Verdict]:
        for start in range(0, len(inputs), _BATCH_ROWS):
            batch = inputs[start : start + _BATCH_ROWS]
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
            report = node.compile_all([replace(source, answer_given=source.given, answer=source.reference)])[0]
        except WorkerError:
            return self._judge_by_tree(source)
        if self._reader.read(source.answer).fault:
            return self._judge_report(node, source, replace(report, syntax=reason))
        return self._judge_report(node, source, replace(report, syntax="", types=reason, globals=""))

    def _judge_report(self, node: TypescriptNode, source: CompilerInput, report: CompilerReport) -> Verdict:
        """Return the verdict from a compiler report; a check that the row cannot decide is None for every answer."""
        can_type = not report.reference_types  # otherwise the row needs a browser API or a package
        obstacle = report.reference_types or node.find_obstacle(report)
        parses, types, behaves, reason = True, True, True, ""
        if report.syntax:
            parses = types = behaves = False
            reason = f"does not parse: {source.fault or report.syntax}"
        elif report.types and can_type:
            types = behaves = False
            reason = f"does not type-check: {report.types}"
        elif not obstacle:
            reason = report.globals or report.same or node.compare(report)
            behaves = not reason
        is_equal = parses and (behaves or bool(obstacle)) and (types or not can_type)
        is_equal = is_equal and self._reader.is_equal(source.answer, source.reference)
        checks = {
            "parses": parses,
            "types": types if can_type else None,
            "behaves": None if obstacle else behaves,
            "equal": is_equal,
        }
        reason = reason or (f"not judged: {obstacle}" if obstacle else "" if is_equal else _DIFFERS)
        return Verdict(checks=checks, reason=reason)


def _find_fault(answer: str) -> str:
    """Return why a text is rejected without parsing it, for example because it is too long; empty if it is not."""
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return f"it is longer than {MAX_ANSWER_CHARACTERS:,} characters"
    if has_lone_surrogate(answer):
        return "it contains a lone surrogate"
    return "" if answer.strip() else "it is empty"


def collect_declarations(reader: SourceReader, row: ReferenceRow, answer: str) -> tuple[str, str]:
    """Return the declarations of a row twice: all of them, and those that the answer does not repeat.

    A declaration that the answer repeats with changes is in both, so that the compiler reports the conflict.
    """
    declared = _find_declarations(reader, row)
    if not declared:
        return "", ""
    repeated = reader.read(answer).statements
    kept = [one for one in declared if not any(_is_repeated(reader, one, other) for other in repeated)]
    return "\n".join(one.text for one in declared), "\n".join(one.text for one in kept)


def _find_declarations(reader: SourceReader, row: ReferenceRow) -> tuple[Statement, ...]:
    """Return a row's declarations: its context, or in the instruction the code blocks or the text after an empty line.

    The first of these that has only declarations is used; without one, the result is empty.
    """
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
