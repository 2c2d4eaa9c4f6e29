"""Printed evaluation: rates with confidence intervals, the worst answers with reasons, and the gate."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from launcher.cli.tables import make_console, print_table
from launcher.core.errors import escape
from launcher.core.units import format_percent
from launcher.judges.gate import GateVerdict, check_change
from launcher.judges.results import AnswerResult, EvalResult, compare_results

_SHOWN = 400  # characters of a text


def print_result(now: EvalResult, before: EvalResult | None, max_regression: float, num_worst: int) -> bool:
    """Print an evaluation and return whether the gate passes; without a gate it does."""
    rate = len(now.answers) / max(1e-9, now.seconds)
    print(
        f"{escape(now.expert)}, {escape(now.subject)}: {len(now.answers)} of {now.num_rows} {now.split} rows "
        f"({escape(now.source)}), {rate:.1f} examples/s\n"
    )
    print_table(("check", "correct", "95 %", "of", "graded by"), list(_rows(now)), ("bold",))
    for line in _worst(now, num_worst):
        make_console().print(line, markup=False, soft_wrap=True)
    gate, warnings = _gate(now, before, max_regression)
    if gate is not None and before is not None:
        print(f"\nagainst {escape(before.subject)} ({format_percent(before.main.rate)} {now.main_check}):")
        for warning in warnings:
            print(f"  note: {escape(warning)}")
        print(f"  {'open' if gate.is_open else 'CLOSED'}: {gate.message}")
    return gate is None or gate.is_open


def print_json(now: EvalResult, before: EvalResult | None, max_regression: float, num_worst: int) -> bool:  # noqa: ARG001
    """Print an evaluation as JSON and return whether the gate passes."""
    gate, warnings = _gate(now, before, max_regression)
    content = now.model_dump(mode="json")
    if gate is not None:
        content["gate"] = {"is_open": gate.is_open, "words": gate.message, "notes": list(warnings)}
    json.dump(content, sys.stdout, indent=1)
    print()
    return gate is None or gate.is_open


def _gate(
    now: EvalResult, before: EvalResult | None, max_regression: float
) -> tuple[GateVerdict | None, tuple[str, ...]]:
    if before is None:
        return None, ()
    change, warnings = compare_results(before, now)
    return check_change(change, max_regression), warnings


def _rows(result: EvalResult) -> Iterator[tuple[str, ...]]:
    for check in result.checks:
        mark = " (main)" if check.name == result.main_check else ""
        if check.num_judged == 0:
            yield f"{check.title}{mark}", "-", "", "0", f"{check.checker}: no answers it can grade"
            continue
        interval = f"{format_percent(check.low)} to {format_percent(check.high)}"
        yield f"{check.title}{mark}", format_percent(check.rate), interval, f"{check.num_judged}", check.checker


def _worst(result: EvalResult, count: int) -> Iterator[str]:
    """Yield answers that fail, the earliest check first: checks are ordered by strictness."""
    names = [check.name for check in result.checks]

    def first_failed(answer: AnswerResult) -> int:
        return next((index for index, name in enumerate(names) if answer.checks.get(name) is False), len(names))

    failed = sorted((answer for answer in result.answers if first_failed(answer) < len(names)), key=first_failed)
    if failed:
        yield f"\n{len(failed)} answers fail a check; the worst:"
    for answer in failed[:count]:
        yield f"\n  question {_shorten(answer.instruction)}"
        yield f"  answer   {_shorten(answer.answer) or '(empty)'}"
        yield f"  expected {_shorten(answer.reference)}"
        cut = " (truncated at --max-new-tokens)" if answer.end == "length" else ""
        yield f"  reason   {_shorten(answer.reason)}{cut}"


def _shorten(text: str) -> str:
    flat = escape(" ".join(text.split()))
    return flat if len(flat) <= _SHOWN else f"{flat[: _SHOWN - 1]}…"
