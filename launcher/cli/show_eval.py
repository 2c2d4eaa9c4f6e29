"""An evaluation, shown: rates with what they could be by chance, the worst answers with their reasons, the gate."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from launcher.cli.tables import make_console, print_table
from launcher.errors import escape
from launcher.quality.gate import GateVerdict, judge_change
from launcher.quality.results import AnswerResult, EvalResult, compare_results
from launcher.units import format_percent

_SHOWN = 400  # characters of a text


def print_result(now: EvalResult, before: EvalResult | None, max_drop: float, num_worst: int) -> bool:
    """Whether the gate is open; it is, where there is none."""
    rate = len(now.answers) / max(1e-9, now.seconds)
    print(
        f"{escape(now.expert)}, {escape(now.subject)}: {len(now.answers)} of {now.num_rows} {now.split} rows "
        f"({escape(now.source)}), {rate:.1f} examples/s\n"
    )
    print_table(("check", "right", "95 %", "of", "judged by"), list(_rows(now)), ("bold",))
    for line in _worst(now, num_worst):
        make_console().print(line, markup=False, soft_wrap=True)
    gate, warnings = _gate(now, before, max_drop)
    if gate is not None and before is not None:
        print(f"\nagainst {escape(before.subject)} ({format_percent(before.main.rate)} {now.main_check}):")
        for warning in warnings:
            print(f"  note: {escape(warning)}")
        print(f"  {'open' if gate.is_open else 'CLOSED'}: {gate.words}")
    return gate is None or gate.is_open


def print_json(now: EvalResult, before: EvalResult | None, max_drop: float, num_worst: int) -> bool:  # noqa: ARG001
    gate, warnings = _gate(now, before, max_drop)
    told = now.model_dump(mode="json")
    if gate is not None:
        told["gate"] = {"is_open": gate.is_open, "words": gate.words, "notes": list(warnings)}
    json.dump(told, sys.stdout, indent=1)
    print()
    return gate is None or gate.is_open


def _gate(now: EvalResult, before: EvalResult | None, max_drop: float) -> tuple[GateVerdict | None, tuple[str, ...]]:
    if before is None:
        return None, ()
    change, warnings = compare_results(before, now)
    return judge_change(change, max_drop), warnings


def _rows(result: EvalResult) -> Iterator[tuple[str, ...]]:
    for check in result.checks:
        mark = " (main)" if check.name == result.main_check else ""
        if check.num_judged == 0:
            yield f"{check.title}{mark}", "-", "", "0", f"{check.checker}: nothing it could judge"
            continue
        reach = f"{format_percent(check.low)} to {format_percent(check.high)}"
        yield f"{check.title}{mark}", format_percent(check.rate), reach, f"{check.num_judged}", check.checker


def _worst(result: EvalResult, count: int) -> Iterator[str]:
    """Those that fail the earliest check first: the order of the checks is that of strictness."""
    names = [check.name for check in result.checks]

    def first_failed(answer: AnswerResult) -> int:
        return next((index for index, name in enumerate(names) if answer.checks.get(name) is False), len(names))

    failed = sorted((answer for answer in result.answers if first_failed(answer) < len(names)), key=first_failed)
    if failed:
        yield f"\n{len(failed)} answers fail a check; the worst:"
    for answer in failed[:count]:
        yield f"\n  asked   {_shorten(answer.instruction)}"
        yield f"  answer  {_shorten(answer.answer) or '(nothing)'}"
        yield f"  wanted  {_shorten(answer.reference)}"
        cut = " (cut off at the longest answer)" if answer.end == "length" else ""
        yield f"  why     {_shorten(answer.reason)}{cut}"


def _shorten(text: str) -> str:
    flat = escape(" ".join(text.split()))
    return flat if len(flat) <= _SHOWN else f"{flat[: _SHOWN - 1]}…"
