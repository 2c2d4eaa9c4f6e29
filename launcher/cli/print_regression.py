"""Printed output of `launcher regression`: settings that differ, both runs' metrics and checks, the verdict."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from launcher.cli.tables import print_table
from launcher.core.errors import escape
from launcher.core.redaction import redact_tree
from launcher.core.units import format_percent
from launcher.hardware.model import format_hardware

if TYPE_CHECKING:
    from launcher.bench.regression.pair import Pair
    from launcher.bench.regression.verdict import Figure, Verdict
    from launcher.core.run_paths import RunPaths
    from launcher.judges.results import CheckResult

Paths = tuple["RunPaths", "RunPaths"]  # old and new run


def print_pair(pair: Pair) -> None:
    """Print what is about to be compared."""
    plan = pair.new.plan
    print(f"{escape(plan.expert)} on {escape(format_hardware(plan.hardware))}, {plan.profile} profile\n")
    rows = [(setting.name, setting.old, setting.new, setting.reason) for setting in pair.changed]
    print_table(("setting", "old", "new", "reason for old"), rows, ("bold",))
    same = ", ".join(f"{setting.name} ({setting.new})" for setting in pair.settings if not setting.has_effect)
    if same:
        print(f"same in both: {escape(same)}")
    print(flush=True)


def print_verdict(pair: Pair, verdict: Verdict, paths: Paths, notes: Sequence[str]) -> None:
    """Print metrics, checks, notes and the quality gate."""
    print(f"\n{escape(pair.new.plan.expert)}: evaluated on {verdict.num_rows} rows\n")
    print_table(("", "old", "new", "change"), [*_figure_rows(verdict), *_check_rows(verdict)], ("bold",))
    print()
    for note in notes:
        print(f"note: {escape(note)}")
    print(f"quality gate {'open' if verdict.gate.is_open else 'CLOSED'}: {verdict.gate.message}")
    print(f"speed: {_format_speed(verdict.speedup)}")
    print(f"\n{_compare_command(paths)}")


def print_json(pair: Pair, verdict: Verdict, paths: Paths, notes: Sequence[str]) -> None:
    """Print the result as JSON."""
    result = {
        "expert": pair.new.plan.expert,
        "profile": pair.new.plan.profile,
        "runs": {"old": str(paths[0].root), "new": str(paths[1].root)},
        "settings": [
            {"name": s.name, "set": s.override, "why": s.reason, "old": s.old, "new": s.new} for s in pair.settings
        ],
        "figures": [
            {"key": f.key, "title": f.title, "old": f.old, "new": f.new, "ratio": f.ratio} for f in verdict.figures
        ],
        "checks": [
            {
                "name": check.new.name,
                "is_main": check.is_main,
                "old": check.old.model_dump(mode="json"),
                "new": check.new.model_dump(mode="json"),
            }
            for check in verdict.checks
        ],
        "num_asked": verdict.num_rows,
        "speedup": verdict.speedup,
        "gate": {"is_open": verdict.gate.is_open, "words": verdict.gate.message},
        "notes": list(notes),
        "compare": _compare_command(paths),
    }
    json.dump(redact_tree(result), sys.stdout, indent=2)
    print()


def _figure_rows(verdict: Verdict) -> Iterator[tuple[str, ...]]:
    for figure in verdict.figures:
        old, new = (_format_value(figure, value) for value in (figure.old, figure.new))
        yield figure.title, old, new, _format_change(figure)


def _check_rows(verdict: Verdict) -> Iterator[tuple[str, ...]]:
    for check in verdict.checks:
        judged = check.old.num_judged and check.new.num_judged
        points = f"{100 * (check.new.rate - check.old.rate):+.1f} points" if judged else ""
        mark = " (main)" if check.is_main else ""
        yield f"{check.title}{mark}", _format_rate(check.old), _format_rate(check.new), points


def _format_rate(check: CheckResult) -> str:
    if not check.num_judged:
        return "not graded"
    return f"{format_percent(check.rate)} ({100 * check.low:.1f} to {100 * check.high:.1f})"


def _format_value(figure: Figure, value: float | None) -> str:
    if value is None:
        return "-"
    match figure.kind:
        case "count":
            return f"{value:,.0f}"
        case "rate":
            return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
        case "seconds":
            return f"{value:,.1f} s"
        case "GiB":
            return f"{value:.2f} GiB"
        case "share":
            return format_percent(value)
        case "loss":
            return f"{value:.4f}"


def _format_change(figure: Figure) -> str:
    if figure.old is None or figure.new is None or figure.old == figure.new:
        return ""
    if figure.kind == "loss":
        return f"{figure.new - figure.old:+.4f}"
    if figure.kind in ("count", "share") or figure.ratio is None:
        return ""
    return f"x {figure.ratio:.2f}"


def _format_speed(speedup: float | None) -> str:
    if speedup is None:
        return "unknown: no step was timed"
    text = f"{speedup:.2f} times as many rows per second"
    return text if speedup > 1 else f"not faster here: {text}"


def _compare_command(paths: Paths) -> str:
    old, new = paths
    words = ["launcher", "compare", old.run_id, new.run_id]
    runs_dir = str(new.root.parent)
    return shlex.join(words if runs_dir == "runs" else [*words, "--runs-dir", runs_dir])
