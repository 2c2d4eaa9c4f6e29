"""Judge of JSON: checks syntax, the row's JSON Schema, what a repair must keep, and equality with the reference."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.core.installation import format_install
from launcher.core.worker import WorkerError
from launcher.judges.base import (
    MAX_ANSWER_CHARACTERS,
    NOT_JUDGED,
    Check,
    CloseOnExit,
    ReferenceRow,
    Verdict,
    strip_code_fence,
)
from launcher.judges.json_value.compare import Json, find_broken, find_difference, find_lost, load_json
from launcher.judges.json_value.schema_check import SchemaChecker, UnusableSchemaError, find_checker


@dataclass(frozen=True, kw_only=True, slots=True)
class _Basis:
    """What all answers to a row are judged by: the checks that apply, the reference, and the broken JSON to repair."""

    applies: Mapping[str, bool]  # which checks
    reference: Json
    broken: str  # the text to repair; empty if there is none

    def make_verdict(self, faults: Mapping[str, str]) -> Verdict:
        """Return a verdict: a check passes if its fault is empty, and is None if it does not apply to the row."""
        checks = {name: not faults[name] if applies else None for name, applies in self.applies.items()}
        return Verdict(checks=checks, reason=next((fault for fault in faults.values() if fault), ""))


_MISSING = f"{NOT_JUDGED}needs jsonschema-rs ({format_install('quality')})"


class JsonJudge(CloseOnExit):
    """Judge of JSON answers. If a row's context is a JSON Schema, its answers are validated against it, too."""

    main_check = "equal"

    def __init__(self, *, schema_seconds: float = 5.0) -> None:
        checker = find_checker()
        reader = f"json of Python {platform.python_version()}, strict"
        self.checks = (
            Check(name="parses", title="parses as JSON", checker=reader),
            Check(name="schema", title="fits the JSON Schema of the row", checker=checker or _MISSING),
            Check(name="kept", title="loses nothing of the text to repair", checker=reader),
            Check(name="equal", title="equals the reference as a value", checker=reader),
        )
        self._has_checker = checker is not None
        self._schemas = SchemaChecker(seconds=schema_seconds)

    def judge(self, rows: Sequence[ReferenceRow], answers: Sequence[str]) -> list[Verdict]:
        """Return the verdict on each answer."""
        return [self._judge_one(row, answer) for row, answer in zip(rows, answers, strict=True)]

    def close(self) -> None:
        """End the processes of the judge."""
        self._schemas.close()

    def _judge_one(self, row: ReferenceRow, answer: str) -> Verdict:
        text, basis = strip_code_fence(answer), self._find_basis(row)
        try:
            if len(answer) > MAX_ANSWER_CHARACTERS:
                raise ValueError(f"is longer than {MAX_ANSWER_CHARACTERS:,} characters")
            value = load_json(text)
        except ValueError as error:
            return basis.make_verdict(dict.fromkeys(basis.applies, f"does not parse: {error}"))
        faults = {"parses": ""}
        if basis.applies["schema"]:
            faults["schema"] = self._find_violation(row, text)
        if basis.applies["kept"]:
            lost = find_lost(basis.broken, basis.reference, value)
            faults["kept"] = f"loses {lost}" if lost else ""
        if basis.applies["equal"]:
            faults["equal"] = find_difference(value, basis.reference)
        return basis.make_verdict(faults)

    def _find_basis(self, row: ReferenceRow) -> _Basis:
        """Determine which checks apply to a row and what they need; its answers must not influence this."""
        try:
            reference, has_reference = load_json(row.reference), True
        except ValueError:
            reference, has_reference = None, False
        broken = find_broken(row.instruction)
        applies = {
            "parses": True,
            "schema": has_reference and self._has_usable_schema(row),
            "kept": has_reference and broken is not None,
            "equal": has_reference,
        }
        return _Basis(applies=applies, reference=reference, broken=broken or "")

    def _has_usable_schema(self, row: ReferenceRow) -> bool:
        """Return whether the row's context is a valid JSON Schema that the row's reference fits, and can be checked."""
        if not self._has_checker or not row.context.strip():
            return False
        try:
            return not self._schemas.find_schema_violation(row.context, row.reference)
        except (UnusableSchemaError, WorkerError):
            return False

    def _find_violation(self, row: ReferenceRow, text: str) -> str:
        """Return how a value violates the schema, or that the schema check failed for it; empty if it is valid."""
        try:
            violation = self._schemas.find_schema_violation(row.context, text)
        except UnusableSchemaError as error:
            violation = str(error)
        except WorkerError as error:
            violation = f"the schema check {error}"
        return f"does not fit the schema: {violation}" if violation else ""
