"""What was found of a run's answers, as far as runs are compared by it: verdicts and rates, without the texts."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from launcher.evaluations import Evaluation, RunEvaluations
from launcher.metrics import EVAL_PREFIX, is_task_metric
from launcher.quality.results import CheckResult, EvalResult

# Of other trainers' eval/…: what is no share of right answers, though it may lie between 0 and 1.
_NO_RATES = re.compile(r"(^|_)(loss|runtime|time|seconds?|per|perplexity|entropy|epoch|steps?|num|grad|rate)(_|$)")
_MOST_FOREIGN = 20
_KNOWN_MAINS = ("matches", "behaves", "result", "equal", "right")  # of our judges, where no evaluation tells
_KEY_DIGITS = 6


def pick_rates(told: Mapping[str, Sequence[float]]) -> list[str]:
    """Of what another trainer calls eval/…, by name: those that can be shares, and lie between 0 and 1."""
    found = []
    for name, values in told.items():
        finite = [value for value in values if math.isfinite(value)]
        is_rate = is_task_metric(name) and _NO_RATES.search(name.removeprefix(EVAL_PREFIX)) is None
        if is_rate and finite and min(finite) >= 0 and max(finite) <= 1:
            found.append(name)
    return found[:_MOST_FOREIGN]


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One evaluation."""

    main: str
    checks: Mapping[str, CheckResult]
    verdicts: Mapping[str, Mapping[str, bool | None]]  # by the rows' keys: what each check said
    rows: str  # the same words for the same rows, and no others
    is_greedy: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedRun:
    base: Judged | None = None
    trained: Judged | None = None  # while it trained, on the base's rows
    whole: Judged | None = None  # by `launcher eval`


def strip_texts(found: RunEvaluations) -> JudgedRun:
    return JudgedRun(base=_strip(found.base), trained=_strip(found.trained), whole=_strip(found.whole))


def _strip(evaluation: Evaluation | None) -> Judged | None:
    if evaluation is None:
        return None
    result = evaluation.result
    return Judged(
        main=result.main_check,
        checks={check.name: check for check in result.checks},
        verdicts={answer.key: answer.checks for answer in result.answers},
        rows=_name_rows(result),
        is_greedy=result.greedy,
    )


def _name_rows(result: EvalResult) -> str:
    key = hashlib.sha256("\0".join(sorted(answer.key for answer in result.answers)).encode()).hexdigest()
    return f"{len(result.answers):,} of {result.num_rows:,} {result.split} rows (key {key[:_KEY_DIGITS]})"


def guess_main(names: Collection[str]) -> str | None:
    """Of a run that tells rates and not who judged; judges name their stricter checks last."""
    return next((name for name in _KNOWN_MAINS if name in names), next(reversed(list(names)), None))
