"""Judge of JSON: checks syntax, the row's JSON Schema, kept values of broken JSON, and equality with the reference."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from launcher.core.worker import WorkerError
from launcher.judges.base import (
    MAX_ANSWER_CHARACTERS,
    Check,
    CloseOnExit,
    ReferenceRow,
    Verdict,
    strip_code_fence,
)
from launcher.judges.json_value.compare import Json, find_broken, find_difference, find_lost, load_json
from launcher.judges.json_value.schema_check import SchemaChecker, UnusableSchemaError, name_checker


class JsonJudge(CloseOnExit):
    """Compares an answer with the reference; the schema, if any, is the row's context."""

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
        """All checks, in order of strictness."""
        return self._checks

    @property
    def main_check(self) -> str:
        """Name of the check that an expert is measured by."""
        return "equal"

    def judge(self, rows: Sequence[ReferenceRow], answers: Sequence[str]) -> list[Verdict]:
        """Return the verdict on each answer."""
        return [self._judge_one(row, answer) for row, answer in zip(rows, answers, strict=True)]

    def close(self) -> None:
        """End the processes of the judge."""
        self._schemas.close()

    def _judge_one(self, row: ReferenceRow, answer: str) -> Verdict:
        if len(answer) > MAX_ANSWER_CHARACTERS:
            return self._fail(row, f"does not parse: is longer than {MAX_ANSWER_CHARACTERS:,} characters")
        text = strip_code_fence(answer)
        try:
            value = load_json(text)
        except ValueError as error:
            return self._fail(row, f"does not parse: {error}")
        checks: dict[str, bool | None] = {"parses": True, "schema": None, "kept": None, "equal": None}
        checks["schema"], violation = self._check_schema(row, value, text)
        try:
            reference = load_json(row.reference)
        except ValueError:
            return Verdict(checks=checks, reason=violation)
        lost = ""
        if (broken := find_broken(row.instruction)) is not None:
            lost = find_lost(broken, reference, value)
            checks["kept"] = not lost
        difference = find_difference(value, reference)
        checks["equal"] = not difference
        reasons = (violation, f"loses {lost}" if lost else "", difference)
        return Verdict(checks=checks, reason=next(filter(None, reasons), ""))

    def _fail(self, row: ReferenceRow, reason: str) -> Verdict:
        """Fail the checks that apply to the row: which ones do must not depend on the answer."""
        try:
            load_json(row.reference)
        except ValueError:
            has_reference = False
        else:
            has_reference = True
        applies = {
            "parses": True,
            "schema": bool(row.context.strip()) and self._reference_is_valid(row),
            "kept": has_reference and find_broken(row.instruction) is not None,
            "equal": has_reference,
        }
        return Verdict(checks={name: False if judged else None for name, judged in applies.items()}, reason=reason)

    def _check_schema(self, row: ReferenceRow, value: Json, text: str) -> tuple[bool | None, str]:
        """Return None if there is no usable schema, or if the reference itself violates it."""
        if not row.context.strip() or not self._reference_is_valid(row):
            return None, ""
        try:
            violation = self._schemas.find_schema_violation(row.context, value, text)
        except UnusableSchemaError:
            return None, ""
        except WorkerError as error:
            violation = f"the schema check {error}"
        return not violation, f"does not fit the schema: {violation}" if violation else ""

    def _reference_is_valid(self, row: ReferenceRow) -> bool:
        try:
            reference = load_json(row.reference)
            return not self._schemas.find_schema_violation(row.context, reference, row.reference)
        except (ValueError, UnusableSchemaError, WorkerError):
            return False
