"""Evaluations without a model: a given share of the rows passes each check, always the same rows."""

from __future__ import annotations

import random
from collections.abc import Mapping

from launcher.judges.base import Check, Verdict
from launcher.judges.results import AnswerResult, EvalResult, summarize_checks

MADE_AT = "2026-11-15T13:00:00+00:00"
TITLES = {"parses": "parses as Cypher", "matches": "same query or same result"}


def make_evaluation(
    rates: Mapping[str, float],
    *,
    num_rows: int = 40,
    seed: str = "",
    main_check: str = "matches",
    checker: str = "made 1.0",
    split: str = "validation",
    first_row: int = 0,
    made_at: str = MADE_AT,
    greedy: bool = True,
    max_new_tokens: int = 128,
    num_cut: int = 0,
) -> EvalResult:
    """Make an evaluation. Rows differ in difficulty, which is the same for all runs except for noise from `seed`."""
    keys = [f"row-{number:04d}" for number in range(first_row, first_row + num_rows)]
    hard = {key: random.Random(key).random() + 0.05 * random.Random(f"{key}{seed}").random() for key in keys}
    easy_first = sorted(keys, key=hard.__getitem__)
    right = {name: set(easy_first[: round(rate * num_rows)]) for name, rate in rates.items()}
    verdicts = [_make_verdict({name: key in passed for name, passed in right.items()}) for key in keys]
    checks = [Check(name=name, title=TITLES.get(name, name), checker=checker) for name in rates]
    answers = [
        AnswerResult(
            key=key,
            instruction=f"What is asked in {key}?",
            reference="MATCH (n) RETURN n",
            answer="MATCH (n) RETURN n" if verdict.checks[main_check] else f"MATCH {key}",
            checks=dict(verdict.checks),
            reason=verdict.reason,
            num_tokens=8,
            end="length" if number < num_cut else "stop",
        )
        for number, (key, verdict) in enumerate(zip(keys, verdicts, strict=True))
    ]
    return EvalResult(
        expert="neo4j",
        subject="made",
        base="Qwen3-8B",
        split=split,
        source=f"{split}.jsonl",
        num_rows=480,
        main_check=main_check,
        checks=summarize_checks(checks, verdicts),
        answers=tuple(answers),
        greedy=greedy,
        seed=42,
        max_new_tokens=max_new_tokens,
        seconds=3.0,
        judging_seconds=1.0,
        versions={},
        made_at=made_at,
    )


def _make_verdict(passed: dict[str, bool]) -> Verdict:
    failed = next((name for name, is_right in passed.items() if not is_right), None)
    return Verdict(checks=passed, reason="" if failed is None else f"it does not pass: {failed}")
