"""What an evaluation found, as it lies on disk: every answer with its verdict, for others to be compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from launcher.errors import InputError, Problem
from launcher.quality.judging import Check, Verdict
from launcher.quality.scores import Change, make_change, make_rate
from launcher.values import Frozen

_SHARED = 0.5  # of the rows asked now, that an earlier evaluation must have asked too


class CheckResult(Frozen):
    name: str
    title: str
    checker: str  # who judged
    num_passed: int
    num_judged: int
    low: float  # 95 %
    high: float

    @property
    def rate(self) -> float:
        return self.num_passed / self.num_judged if self.num_judged else 0.0


class AnswerResult(Frozen):
    key: str  # of the row
    instruction: str
    reference: str
    answer: str
    checks: dict[str, bool | None]
    reason: str  # why the first check that failed did
    num_tokens: int
    end: str  # `length`: it was cut off


class EvalResult(Frozen):
    schema_version: Literal[1] = 1
    expert: str
    subject: str  # whose answers: `run neo4j-…`, `adapter …`, `base …`
    base: str
    split: str
    source: str
    num_rows: int  # that there are; fewer may have been asked
    main_check: str
    checks: tuple[CheckResult, ...]
    answers: tuple[AnswerResult, ...]
    greedy: bool
    seed: int
    max_new_tokens: int
    seconds: float  # of generating
    judging_seconds: float
    versions: dict[str, str]
    made_at: str  # ISO 8601, UTC

    @property
    def main(self) -> CheckResult:
        return next(check for check in self.checks if check.name == self.main_check)


def sum_up(checks: Sequence[Check], verdicts: Sequence[Verdict]) -> tuple[CheckResult, ...]:
    results = []
    for check in checks:
        rate = make_rate([verdict.checks.get(check.name) for verdict in verdicts])
        results.append(
            CheckResult(
                name=check.name,
                title=check.title,
                checker=check.checker,
                num_passed=rate.num_passed,
                num_judged=rate.num_judged,
                low=rate.low,
                high=rate.high,
            )
        )
    return tuple(results)


def load_result(file: Path) -> EvalResult:
    try:
        return EvalResult.model_validate_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, ValidationError):
        hint = "`launcher eval … -o FILE` writes one"
        raise InputError(f"{file}: not the result of an evaluation", hint=hint) from None


def compare_results(before: EvalResult, now: EvalResult) -> tuple[Change, tuple[str, ...]]:
    """Of the main check, on the rows that both have; and what makes them hard to compare."""
    if before.main_check != now.main_check or before.expert != now.expert:
        problems = (
            Problem(where="expert", what=f"{before.expert} before, {now.expert} now"),
            Problem(where="main check", what=f"{before.main_check} before, {now.main_check} now"),
        )
        raise InputError("the two evaluations are not of the same thing", problems)
    old = {answer.key: answer.checks.get(now.main_check) for answer in before.answers}
    new = {answer.key: answer.checks.get(now.main_check) for answer in now.answers}
    shared = sorted(old.keys() & new.keys())
    if not shared:
        raise InputError("the two evaluations have no row in common", hint="evaluate both on the same split")
    if len(shared) < _SHARED * len(new):
        raise InputError(
            f"the two evaluations have only {len(shared)} rows in common, of {len(old)} before and {len(new)} now",
            hint="evaluate both on the same rows: the same split, and --rows alike",
        )
    warnings = []
    if len(shared) < max(len(old), len(new)):
        warnings.append(f"{len(shared)} rows in common, of {len(old)} before and {len(new)} now")
    if before.main.checker != now.main.checker:
        warnings.append(f"judged by {before.main.checker} before, by {now.main.checker} now")
    if before.base != now.base:
        warnings.append(f"another base: {before.base} before, {now.base} now")
    return make_change([old[key] for key in shared], [new[key] for key in shared]), tuple(warnings)
