"""The judge of JSON: does it parse, fit the row's schema, keep what was there to repair, equal the reference?"""

from __future__ import annotations

import platform
from collections.abc import Sequence

from launcher.quality.fences import unfence
from launcher.quality.json_repairs import find_broken, find_lost
from launcher.quality.json_schemas import SchemaChecker, UnusableSchemaError, name_checker
from launcher.quality.json_values import Json, find_difference, load_json
from launcher.quality.judging import MAX_ANSWER_CHARACTERS, Check, Closing, Question, Verdict, fail_all
from launcher.quality.line_worker import WorkerGoneError


class JsonJudge(Closing):
    """The reference says what the row wants; the schema stands in the row's context, if it has one."""

    def __init__(self, *, schema_seconds: float = 5.0) -> None:
        reader = f"json of Python {platform.python_version()}, strict"
        self._checks = (
            Check(name="parses", title="parses as JSON", checker=reader),
            Check(name="schema", title="fits the JSON Schema of the row", checker=name_checker()),
            Check(name="kept", title="loses nothing of the text to repair", checker=reader),
            Check(name="equal", title="equals the reference as a value", checker=reader),
        )
        self._schemas = SchemaChecker(seconds=schema_seconds)

    @property
    def checks(self) -> tuple[Check, ...]:
        return self._checks

    @property
    def main_check(self) -> str:
        return "equal"

    def judge(self, questions: Sequence[Question], answers: Sequence[str]) -> list[Verdict]:
        return [self._judge_one(question, answer) for question, answer in zip(questions, answers, strict=True)]

    def close(self) -> None:
        self._schemas.close()

    def _judge_one(self, question: Question, answer: str) -> Verdict:
        if len(answer) > MAX_ANSWER_CHARACTERS:
            return fail_all(self._checks, f"does not parse: is longer than {MAX_ANSWER_CHARACTERS:,} characters")
        text = unfence(answer)
        try:
            value = load_json(text)
        except ValueError as error:
            return fail_all(self._checks, f"does not parse: {error}")
        checks: dict[str, bool | None] = {"parses": True, "schema": None, "kept": None, "equal": None}
        checks["schema"], misfit = self._check_schema(question, value, text)
        try:
            reference = load_json(question.reference)
        except ValueError:
            return Verdict(checks=checks, reason=misfit)
        lost = ""
        if (broken := find_broken(question.instruction)) is not None:
            lost = find_lost(broken, reference, value)
            checks["kept"] = not lost
        difference = find_difference(value, reference)
        checks["equal"] = not difference
        reasons = (misfit, f"loses {lost}" if lost else "", difference)
        return Verdict(checks=checks, reason=next(filter(None, reasons), ""))

    def _check_schema(self, question: Question, value: Json, text: str) -> tuple[bool | None, str]:
        """None where there is no schema, or none that the row's own reference fits: it tells nothing."""
        if not question.context.strip():
            return None, ""
        try:
            misfit = self._schemas.find_misfit(question.context, value, text)
        except UnusableSchemaError:
            return None, ""
        except WorkerGoneError as gone:
            misfit = f"checking it against the schema {gone}"
        if misfit and not self._reference_fits(question):
            return None, ""
        return not misfit, f"does not fit the schema: {misfit}" if misfit else ""

    def _reference_fits(self, question: Question) -> bool:
        try:
            reference = load_json(question.reference)
            return not self._schemas.find_misfit(question.context, reference, question.reference)
        except (ValueError, UnusableSchemaError, WorkerGoneError):
            return False
