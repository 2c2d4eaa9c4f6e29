"""Results of an evaluation as stored on disk: every answer with its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from pydantic import model_validator

from launcher.core.errors import InputError, Problem
from launcher.core.frozen_model import Frozen
from launcher.core.run_files import MAX_RESULT_BYTES, parse_model, read_text
from launcher.judges.base import Check, Verdict
from launcher.judges.statistics import PairedChange, compare_paired, compute_rate

_MIN_SHARED = 0.5  # share of the rows that both evaluations must have


class CheckResult(Frozen):
    """Pass rate of one check with its 95 % confidence interval."""

    name: str
    title: str
    checker: str  # package and version
    num_passed: int
    num_judged: int
    low: float
    high: float

    @property
    def rate(self) -> float:
        """Share of the judged answers that passed."""
        return self.num_passed / self.num_judged if self.num_judged else 0.0


# Instead of a rate, for a check that applies to none of the evaluated rows.
NOT_CHECKED = "not checked: no rows"


class AnswerResult(Frozen):
    """One generated answer and its verdict."""

    key: str  # of the row
    instruction: str
    reference: str
    answer: str
    checks: dict[str, bool | None]
    reason: str  # why the first check failed
    num_tokens: int
    end: str  # `length`: truncated


class EvalResult(Frozen):
    """An evaluation of a run, an adapter or a base model."""

    schema_version: Literal[1] = 1
    expert: str
    subject: str  # what was evaluated: `run neo4j-…`, `adapter …`, `base …`
    base: str
    split: str
    source: str
    num_rows: int  # of the split; fewer may have been evaluated
    num_chats: int = 0  # evaluated rows with several answers, of which the first is judged
    main_check: str
    checks: tuple[CheckResult, ...]
    answers: tuple[AnswerResult, ...]
    greedy: bool
    seed: int
    max_new_tokens: int
    seconds: float  # of generation
    judging_seconds: float
    versions: dict[str, str]
    made_at: str  # ISO 8601, UTC

    @model_validator(mode="after")
    def _check_main(self) -> EvalResult:
        """Reject a result without its main check."""
        if all(check.name != self.main_check for check in self.checks):
            raise ValueError(f"no check is called {self.main_check}")
        return self

    @property
    def main(self) -> CheckResult:
        """The result of the main check."""
        return next(check for check in self.checks if check.name == self.main_check)

    @property
    def num_cut(self) -> int:
        """The number of answers that were cut off at max_new_tokens."""
        return sum(answer.end == "length" for answer in self.answers)


def summarize_checks(checks: Sequence[Check], verdicts: Sequence[Verdict]) -> tuple[CheckResult, ...]:
    """Return the pass rate of each check."""
    rates = (compute_rate([verdict.checks.get(check.name) for verdict in verdicts]) for check in checks)
    return tuple(CheckResult(**asdict(check), **asdict(rate)) for check, rate in zip(checks, rates, strict=True))


def load_result(file: Path) -> EvalResult:
    """Load a stored evaluation; raises InputError if the file is not one."""
    text = read_text(file, MAX_RESULT_BYTES)
    try:
        return parse_model(EvalResult, text, file)
    except InputError:
        hint = "`launcher eval … -o FILE` writes one"
        raise InputError(f"{file} is not the result of an evaluation", hint=hint) from None


def compare_results(before: EvalResult, now: EvalResult) -> tuple[PairedChange, tuple[str, ...]]:
    """Compare two evaluations by their main check on the rows that both have; also return warnings."""
    if before.main_check != now.main_check or before.expert != now.expert:
        problems = (
            Problem(where="expert", what=f"{before.expert} before, {now.expert} now"),
            Problem(where="main check", what=f"{before.main_check} before, {now.main_check} now"),
        )
        raise InputError("the two evaluations are of different experts or checks", problems)
    old = {answer.key: answer.checks.get(now.main_check) for answer in before.answers}
    new = {answer.key: answer.checks.get(now.main_check) for answer in now.answers}
    shared = sorted(old.keys() & new.keys())
    if not shared:
        raise InputError("the two evaluations have no row in common", hint="evaluate both on the same split")
    if len(shared) < _MIN_SHARED * len(new):
        raise InputError(
            f"the two evaluations have only {len(shared)} rows in common, of {len(old)} before and {len(new)} now",
            hint="evaluate both with the same split and the same --rows",
        )
    warnings = []
    if len(shared) < max(len(old), len(new)):
        warnings.append(f"{len(shared)} rows in common, of {len(old)} before and {len(new)} now")
    if before.main.checker != now.main.checker:
        warnings.append(f"judged by {before.main.checker} before, by {now.main.checker} now")
    if before.base != now.base:
        warnings.append(f"different base model: {before.base} before, {now.base} now")
    if before.greedy != now.greedy:
        decoding = [("greedy" if result.greedy else "sampled") for result in (before, now)]
        warnings.append(f"{decoding[0]} answers before, {decoding[1]} now")
    shorter = min(before, now, key=lambda result: result.max_new_tokens)
    if before.max_new_tokens != now.max_new_tokens and shorter.num_cut:
        limits = f"at most {before.max_new_tokens:,} new tokens before, {now.max_new_tokens:,} now"
        warnings.append(f"{limits}: the lower limit cut off {shorter.num_cut:,} of {len(shorter.answers):,} answers")
    return compare_paired([old[key] for key in shared], [new[key] for key in shared]), tuple(warnings)


def find_lost_coverage(before: EvalResult, now: EvalResult) -> tuple[str, ...]:
    """Return what an evaluation covers less than an earlier one of the same model: rows, answer length, judged answers.

    A complete evaluation of another split has another number of rows: only a partial one covers less.
    """
    pairs = [("new tokens", before.max_new_tokens, now.max_new_tokens)]
    if before.split == now.split or len(now.answers) < now.num_rows:
        pairs.append(("answers", len(before.answers), len(now.answers)))
        if before.main_check == now.main_check:
            pairs.append((f"answers judged by {now.main_check}", before.main.num_judged, now.main.num_judged))
    return tuple(f"{then:,} {what} instead of {later:,}" for what, then, later in pairs if later < then)
