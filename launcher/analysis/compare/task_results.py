"""Graded answers of a run without their texts: verdicts and rates."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from launcher.core.metrics import EVAL_PREFIX, is_task_metric
from launcher.judges.results import CheckResult, EvalResult
from launcher.runs.evaluations import Evaluation, RunEvaluations

# eval/… metrics of other trainers that are not a share of correct answers, even if between 0 and 1.
_NOT_RATES = re.compile(r"(^|_)(loss|runtime|time|seconds?|per|perplexity|entropy|epoch|steps?|num|grad|rate)(_|$)")
_MAX_FOREIGN = 20
KNOWN_MAIN_CHECKS = ("matches", "behaves", "result", "equal", "right")  # of our judges, for runs without an evaluation
_KEY_DIGITS = 6


def select_rates(columns: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the eval/… metrics of another trainer that can be rates: plausible names, values from 0 to 1."""
    rates = []
    for name, values in columns.items():
        finite = [value for value in values if math.isfinite(value)]
        is_rate = is_task_metric(name) and _NOT_RATES.search(name.removeprefix(EVAL_PREFIX)) is None
        if is_rate and finite and min(finite) >= 0 and max(finite) <= 1:
            rates.append(name)
    return rates[:_MAX_FOREIGN]


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """Verdicts and rates of one evaluation."""

    main: str
    checks: Mapping[str, CheckResult]
    verdicts: Mapping[str, Mapping[str, bool | None]]  # by row key: result of each check
    rows: str  # description that is equal for the same rows only
    is_greedy: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedRun:
    """Evaluations of a run."""

    base: Judged | None = None
    trained: Judged | None = None  # during training, on the rows of `base`
    full_eval: Judged | None = None  # by `launcher eval`


def drop_answer_texts(evaluations: RunEvaluations) -> JudgedRun:
    """Keep verdicts and rates of all evaluations of a run."""
    return JudgedRun(
        base=_strip(evaluations.base), trained=_strip(evaluations.trained), full_eval=_strip(evaluations.full_eval)
    )


def _strip(evaluation: Evaluation | None) -> Judged | None:
    if evaluation is None:
        return None
    result = evaluation.result
    return Judged(
        main=result.main_check,
        checks={check.name: check for check in result.checks},
        verdicts={answer.key: answer.checks for answer in result.answers},
        rows=_describe_rows(result),
        is_greedy=result.greedy,
    )


def _describe_rows(result: EvalResult) -> str:
    key = hashlib.sha256("\0".join(sorted(answer.key for answer in result.answers)).encode()).hexdigest()
    return f"{len(result.answers):,} of {result.num_rows:,} {result.split} rows (key {key[:_KEY_DIGITS]})"


def guess_main_check(names: Collection[str]) -> str | None:
    """Guess the main check of a run without an evaluation; judges list stricter checks last."""
    return next((name for name in KNOWN_MAIN_CHECKS if name in names), next(reversed(list(names)), None))
