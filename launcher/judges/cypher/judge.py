"""Judge of Cypher: checks syntax, the graph schema, and equality or execution match with the reference query."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import accumulate

from launcher.core.errors import escape
from launcher.core.installation import format_install
from launcher.judges.base import (
    NOT_JUDGED,
    Check,
    CloseOnExit,
    ReferenceRow,
    Verdict,
    fail_all,
    has_invalid_characters,
    keep_applicable,
    strip_code_fence,
)
from launcher.judges.cypher.execution_match import Engine
from launcher.judges.cypher.lexer import Token, split_tokens
from launcher.judges.cypher.normalize import normalize_query
from launcher.judges.cypher.schema import load_graph_schema
from launcher.judges.cypher.schema_check import find_schema_faults
from launcher.judges.cypher.server_rules import find_acts, find_rule_fault
from launcher.judges.cypher.syntax import SYNTAX_BACKENDS, open_syntax_checker

_LAUNCHER = "expert-launcher"
# The longest of 1,250 real queries has 1,021 characters; far longer answers are wrong without being parsed.
_MAX_CHARACTERS = 20_000
_MAX_TOKENS = 2_000
_MAX_DEPTH = 50
_COLOR = re.compile("\x1b\\[[0-9;]*m")


class CypherJudge(CloseOnExit):
    """Judge of Cypher queries. Main check `matches`: the same normalized query, or the same rows on generated graphs.

    `matches` is never None: a query that differs from the reference and cannot be run counts as wrong.
    """

    main_check = "matches"

    def __init__(self, backends: Sequence[str] = SYNTAX_BACKENDS, *, with_engine: bool = True) -> None:
        self._syntax = open_syntax_checker(backends)
        self._engine = Engine() if with_engine and find_spec("ladybug") else None
        engine = self._engine.checker if self._engine else f"{NOT_JUDGED}needs ladybug ({format_install('quality')})"
        self.checks = (
            Check(name="parses", title="parses as Cypher", checker=self._syntax.checker),
            Check(name="reads", title="does no more than the reference", checker=_LAUNCHER),
            Check(name="names", title="labels, types and properties exist", checker=_LAUNCHER),
            Check(name="directions", title="relationships join what the schema joins", checker=_LAUNCHER),
            Check(name="result", title="returns what the reference returns", checker=engine),
            Check(name="matches", title="same query or same result", checker=f"{_LAUNCHER}, {engine}"),
            Check(name="equal", title="equal to the reference in normal form", checker=_LAUNCHER),
        )

    def judge(self, rows: Sequence[ReferenceRow], answers: Sequence[str]) -> list[Verdict]:
        """Return the verdict on each answer."""
        verdicts = [
            keep_applicable(self._judge_one(row, answer), self._find_applicable(row))
            for row, answer in zip(rows, answers, strict=True)
        ]
        # Parsers quote the answer, in color.
        return [replace(one, reason=escape(_COLOR.sub("", one.reason))) for one in verdicts]

    def close(self) -> None:
        """End the processes of the judge."""
        self._syntax.close()
        if self._engine is not None:
            self._engine.close()

    def _find_applicable(self, row: ReferenceRow) -> set[str]:
        """Return which checks apply to a row: some need a schema, and `result` needs a reference that returns rows."""
        schema, reference = load_graph_schema(row.context), split_tokens(strip_code_fence(row.reference))
        names = {check.name for check in self.checks}
        if schema is None:
            return names - {"names", "directions", "result"}
        has_result = self._engine is not None and self._engine.returns_rows(schema, reference)
        return names if has_result else names - {"result"}

    def _judge_one(self, row: ReferenceRow, answer: str) -> Verdict:
        if len(answer) > _MAX_CHARACTERS:
            return fail_all(self.checks, f"{len(answer)} characters: too long")
        text = strip_code_fence(answer).strip()
        tokens = split_tokens(text)
        if fault := _find_text_fault(text, tokens):
            return fail_all(self.checks, fault)
        reference = split_tokens(strip_code_fence(row.reference))
        if fault := self._syntax.find_fault(text) or find_rule_fault(tokens):
            return fail_all(self.checks, f"does not parse: {fault}")
        if acts := find_acts(tokens) - find_acts(reference):
            return Verdict(
                checks={check.name: check.name == "parses" for check in self.checks},
                reason=f"does more than the reference: {', '.join(sorted(acts))}",
            )
        return self._compare(row, tokens, reference)

    def _compare(self, row: ReferenceRow, tokens: Sequence[Token], reference: Sequence[Token]) -> Verdict:
        schema = load_graph_schema(row.context)
        equal = normalize_query(tokens) == normalize_query(reference)
        names = directions = True
        same: bool | None = None
        reasons: list[str] = []
        if schema is not None:
            faults = find_schema_faults(tokens, schema)
            names, directions = not faults.names, not faults.names and not faults.directions
            reasons += [f"not in the schema: {', '.join((*faults.names, *faults.directions))}"] * (not directions)
        if not equal and names and self._engine is not None and schema is not None:
            outcome = self._engine.compare(schema, reference, tokens)
            same = outcome.same
            reasons += [outcome.reason] * (same is not True)
        matches = bool(equal or same)
        if not equal:
            reasons.append("same result, written differently" if matches else "normal form differs from the reference")
        return Verdict(
            checks={
                "parses": True,
                "reads": True,
                "names": names,
                "directions": directions,
                "result": matches,
                "matches": matches,
                "equal": equal,
            },
            reason=reasons[0] if reasons else "",
        )


def _find_text_fault(text: str, tokens: Sequence[Token]) -> str:
    """Return why a text is rejected without parsing it, for example because it is too long; empty if it is not."""
    if not text:
        return "empty"
    if has_invalid_characters(text):
        return "contains NUL or lone surrogates"
    if len(tokens) > _MAX_TOKENS or max(accumulate(map(_step, tokens)), default=0) > _MAX_DEPTH:
        return "too long or nested too deeply"
    return ""


def _step(token: Token) -> int:
    return token.is_mark("(", "[", "{") - token.is_mark(")", "]", "}")
