"""The judge of TypeScript: does it parse, type-check, do what the reference does, stand there as the reference does?

`behaves` is what an expert is measured by: two functions that are written differently can both be right, and only
running them tells. Where the reference declares types, those are compared instead. Without Node nobody can run or
type-check anything; then `equal` is what is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from launcher.quality.fences import unfence
from launcher.quality.judging import MAX_ANSWER_CHARACTERS, Check, Closing, Question, Verdict, fail_all
from launcher.quality.line_worker import WorkerGoneError
from launcher.quality.node_tools import INSTALL_HINT
from launcher.quality.typescript_given import find_given
from launcher.quality.typescript_node import Look, Row, TypescriptNode, find_tools
from launcher.quality.typescript_syntax import SourceReader, name_checker

_SECONDS = 10.0
_ROWS_AT_ONCE = 32  # the compiler reads its library once for all of them
_MISSING = f"nobody: it takes Node and its package typescript ({INSTALL_HINT})"
_OTHERWISE = "is written otherwise than the reference"


class TypescriptJudge(Closing):
    """Types that the row brings are put before the answer."""

    def __init__(self, *, seconds: float = _SECONDS) -> None:
        tree_sitter, tools = name_checker(), find_tools()
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
        return self._checks

    @property
    def main_check(self) -> str:
        return "behaves" if self._node else "equal"

    def judge(self, questions: Sequence[Question], answers: Sequence[str]) -> list[Verdict]:
        verdicts: list[Verdict | None] = []
        rows: list[Row] = []
        for question, answer in zip(questions, answers, strict=True):
            fault = _find_fault(answer)
            verdicts.append(fail_all(self._checks, f"does not parse: {fault}") if fault else None)
            if not fault:
                rows.append(self._make_row(question, unfence(answer)))
        judged = self._judge_by_compiler(self._node, rows) if self._node else map(self._judge_by_tree, rows)
        found = iter(judged)
        return [next(found) if verdict is None else verdict for verdict in verdicts]

    def close(self) -> None:
        self._reader.close()
        if self._node:
            self._node.close()

    def _make_row(self, question: Question, answer: str) -> Row:
        reference = unfence(question.reference)
        if self._node is None:
            return Row(answer=answer, reference=reference)
        given, answer_given = find_given(self._reader, question, answer)
        return Row(given=given, answer_given=answer_given, answer=answer, reference=reference)

    def _judge_by_tree(self, row: Row) -> Verdict:
        fault = self._reader.read(row.answer).fault
        return fail_all(self._checks, f"does not parse: {fault}") if fault else self._compare_texts(row)

    def _compare_texts(self, row: Row) -> Verdict:
        is_equal = self._reader.is_equal(row.answer, row.reference)
        checks = {"parses": True, "types": None, "behaves": None, "equal": is_equal}
        return Verdict(checks=checks, reason="" if is_equal else _OTHERWISE)

    def _judge_by_compiler(self, node: TypescriptNode, rows: Sequence[Row]) -> Iterator[Verdict]:
        for some in _split(rows):
            looks: Sequence[Look | None] = [None] * len(some)
            if len(some) > 1:
                with suppress(WorkerGoneError):  # because of one of them: each alone
                    looks = node.look_at_all(some)
            for row, look in zip(some, looks, strict=True):
                yield self._judge_look(node, row, look) if look else self._judge_alone(node, row)

    def _judge_alone(self, node: TypescriptNode, row: Row) -> Verdict:
        """Where the compiler does not come to an end it is the answer's fault, if it does for the reference."""
        try:
            return self._judge_look(node, row, node.look_at_all([row])[0])
        except WorkerGoneError as gone:
            reason = f"compiling it {gone}"
        try:
            node.look_at_all([replace(row, answer_given=row.given, answer=row.reference)])
        except WorkerGoneError:
            return self._judge_by_tree(row)
        if self._reader.read(row.answer).fault:
            return fail_all(self._checks, f"does not parse: {reason}")
        return Verdict(checks={"parses": True, "types": False, "behaves": False, "equal": False}, reason=reason)

    def _judge_look(self, node: TypescriptNode, row: Row, look: Look) -> Verdict:
        if look.syntax:
            return fail_all(self._checks, f"does not parse: {look.syntax}")
        if look.reference_types:  # nothing to check it with: the row wants a browser, or a package
            return self._compare_texts(row)
        if look.types:
            checks = {"parses": True, "types": False, "behaves": False, "equal": False}
            return Verdict(checks=checks, reason=f"does not type-check: {look.types}")
        behaves, otherwise = _compare(node, look)
        is_equal = behaves is not False and self._reader.is_equal(row.answer, row.reference)
        return Verdict(
            checks={"parses": True, "types": True, "behaves": behaves, "equal": is_equal},
            reason=otherwise or ("" if is_equal else _OTHERWISE),
        )


def _find_fault(answer: str) -> str:
    """What needs no parser."""
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return f"it is longer than {MAX_ANSWER_CHARACTERS:,} characters"
    if not answer.isascii() and any("\ud800" <= char <= "\udfff" for char in answer):
        return "it holds half a character (a lone surrogate)"
    return "" if answer.strip() else "it is empty"


def _split(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Into what is compiled together. Modules do not see each other, unless one declares something global."""
    some: list[Row] = []
    for row in rows:
        if "declare" in row.answer or "declare" in row.reference or "declare" in row.given:
            yield [row]
            continue
        some.append(row)
        if len(some) == _ROWS_AT_ONCE:
            yield some
            some = []
    if some:
        yield some


def _compare(node: TypescriptNode, look: Look) -> tuple[bool | None, str]:
    if look.same:
        return False, look.same
    ran = node.compare(look)
    if look.num_cases == 0:
        if ran:  # it does not even load
            return False, ran
        return (True, "") if look.same is not None else (None, "")
    return (None, "") if ran is None else (not ran, ran)
