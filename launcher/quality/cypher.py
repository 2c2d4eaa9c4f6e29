"""Judges Cypher: is it a query, does it keep to the graph's schema, does it return what the reference returns?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from launcher.quality.cypher_analysis import RUNGS, open_analyser
from launcher.quality.cypher_names import find_schema_faults
from launcher.quality.cypher_normal import normalise
from launcher.quality.cypher_rules import find_acts, find_rule_fault
from launcher.quality.cypher_running import open_engine
from launcher.quality.cypher_schema import load_graph_schema
from launcher.quality.cypher_tokens import Token, split_tokens
from launcher.quality.fences import unfence
from launcher.quality.judging import Check, Closing, Question, Verdict, fail_all

_OURS = "expert-launcher"
# The longest of 1,250 real queries has 1,021 characters; what is far beyond is wrong unread, and costs no time.
_MAX_CHARACTERS = 20_000
_MAX_TOKENS = 2_000
_MAX_DEPTH = 50


class CypherJudge(Closing):
    """`matches` is what counts: the same query in normal form, or the same rows on generated graphs. It is never left
    open: what the engine cannot run, and is not the reference, was not shown to be right."""

    main_check = "matches"

    def __init__(self, rungs: Sequence[str] = RUNGS, *, with_engine: bool = True) -> None:
        self._analyser = open_analyser(rungs)
        self._engine = open_engine() if with_engine else None
        runs = self._engine.checker if self._engine else "nobody: ladybug is not installed"
        self.checks = (
            Check(name="parses", title="parses as Cypher", checker=self._analyser.checker),
            Check(name="reads", title="does no more than the reference", checker=_OURS),
            Check(name="names", title="labels, types and properties exist", checker=_OURS),
            Check(name="directions", title="relationships join what the schema joins", checker=_OURS),
            Check(name="result", title="returns what the reference returns", checker=runs),
            Check(name="matches", title="same query or same result", checker=f"{_OURS}, {runs}"),
            Check(name="equal", title="equal to the reference in normal form", checker=_OURS),
        )

    def judge(self, questions: Sequence[Question], answers: Sequence[str]) -> list[Verdict]:
        return [self._judge_one(question, answer) for question, answer in zip(questions, answers, strict=True)]

    def close(self) -> None:
        self._analyser.close()
        if self._engine is not None:
            self._engine.close()

    def _judge_one(self, question: Question, answer: str) -> Verdict:
        if len(answer) > _MAX_CHARACTERS:
            return fail_all(self.checks, f"{len(answer)} characters long: not looked at")
        text = unfence(answer).strip()
        tokens = split_tokens(text)
        if fault := _find_text_fault(text, tokens):
            return fail_all(self.checks, fault)
        reference = split_tokens(unfence(question.reference))
        if fault := self._analyser.find_fault(text) or find_rule_fault(tokens):
            return fail_all(self.checks, f"does not parse: {fault}")
        if acts := find_acts(tokens) - find_acts(reference):
            return Verdict(
                checks={check.name: check.name == "parses" for check in self.checks},
                reason=f"does more than was asked for: {', '.join(sorted(acts))}",
            )
        return self._compare(question, tokens, reference)

    def _compare(self, question: Question, tokens: Sequence[Token], reference: Sequence[Token]) -> Verdict:
        schema = load_graph_schema(question.context)
        equal = normalise(tokens) == normalise(reference)
        names = directions = result = None
        reasons: list[str] = []
        if schema is not None:
            faults = find_schema_faults(tokens, schema)
            names, directions = not faults.names, not faults.names and not faults.directions
            reasons += [f"not in the schema: {', '.join((*faults.names, *faults.directions))}"] * (not directions)
        if equal:
            result = True
        elif names is False:
            result = False
        elif self._engine is not None and schema is not None:
            outcome = self._engine.compare(schema, reference, tokens)
            result = outcome.same
            reasons += [outcome.reason] * (outcome.same is not True)
        matches = bool(equal or result)
        if not equal:
            reasons.append("same result, written differently" if matches else "not the reference in normal form")
        return Verdict(
            checks={
                "parses": True,
                "reads": True,
                "names": names,
                "directions": directions,
                "result": result,
                "matches": matches,
                "equal": equal,
            },
            reason=reasons[0] if reasons else "",
        )


def _find_text_fault(text: str, tokens: Sequence[Token]) -> str:
    """What no query is like: found without a look at its grammar."""
    if not text:
        return "empty"
    if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        return "holds characters that no query has"
    if len(tokens) > _MAX_TOKENS or max(accumulate(map(_step, tokens)), default=0) > _MAX_DEPTH:
        return "longer, or nested deeper, than any query"
    return ""


def _step(token: Token) -> int:
    return token.is_mark("(", "[", "{") - token.is_mark(")", "]", "}")
