"""Declarations that a row brings along, which its answer is checked together with."""

from __future__ import annotations

import re

from launcher.quality.judging import MAX_ANSWER_CHARACTERS, Question
from launcher.quality.typescript_syntax import SourceReader, Statement

_FENCED = re.compile(r"^```[ \t]*(?:typescript|ts)?[ \t]*\n(.*?)^```", re.S | re.M)


def find_given(reader: SourceReader, question: Question, answer: str) -> tuple[str, str]:
    """All of them, and those that the answer does not repeat: twice would be a mistake. One that it declares otherwise
    stays, and clashes with it."""
    declared = _find_declarations(reader, question)
    if not declared:
        return "", ""
    repeated = reader.read(answer).statements
    kept = [one for one in declared if not any(_is_repeated(reader, one, other) for other in repeated)]
    return "\n".join(one.text for one in declared), "\n".join(one.text for one in kept)


def _find_declarations(reader: SourceReader, question: Question) -> tuple[Statement, ...]:
    """In the context, in fenced blocks of the instruction, or behind its first empty line: what comes first and is
    nothing but declarations."""
    blocks = "\n".join(_FENCED.findall(question.instruction))
    for text in (question.context, blocks, question.instruction.partition("\n\n")[2]):
        if text.strip() and len(text) <= MAX_ANSWER_CHARACTERS:
            source = reader.read(text)
            if source.has_only_declarations:
                return source.statements
    return ()


def _is_repeated(reader: SourceReader, given: Statement, other: Statement) -> bool:
    if other.kind not in {given.kind, "export_statement"}:
        return False
    return reader.is_equal(given.text.removeprefix("export "), other.text.removeprefix("export "))
