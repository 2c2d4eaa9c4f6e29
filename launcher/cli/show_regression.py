"""Old against new, shown: what differs, then speed, memory, loss and checks side by side, and the gate's words."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from launcher.cli.tables import print_table
from launcher.errors import escape
from launcher.hardware import format_hardware
from launcher.redaction import redact_tree
from launcher.units import format_percent

if TYPE_CHECKING:
    from launcher.paths import RunPaths
    from launcher.quality.results import CheckResult
    from launcher.regression.pair import Pair
    from launcher.regression.verdict import Figure, Verdict

Paths = tuple["RunPaths", "RunPaths"]  # of the old run and the new one


def print_pair(pair: Pair) -> None:
    """Before the trainings: what is about to be compared."""
    plan = pair.new.plan
    print(f"{escape(plan.expert)} on {escape(format_hardware(plan.hardware))}, {plan.profile} profile\n")
    rows = [(setting.name, setting.old, setting.new, setting.why) for setting in pair.changed]
    print_table(("setting", "old", "new", "old because"), rows, ("bold",))
    same = ", ".join(f"{setting.name} ({setting.new})" for setting in pair.settings if not setting.is_real)
    if same:
        print(f"the same on both sides: {escape(same)}")
    print(flush=True)


def print_verdict(pair: Pair, verdict: Verdict, paths: Paths, notes: Sequence[str]) -> None:
    print(f"\n{escape(pair.new.plan.expert)}: {verdict.num_asked} held-out rows asked\n")
    print_table(("", "old", "new", "change"), [*_figure_rows(verdict), *_check_rows(verdict)], ("bold",))
    print()
    for note in notes:
        print(f"note: {escape(note)}")
    print(f"quality gate {'open' if verdict.gate.is_open else 'CLOSED'}: {verdict.gate.words}")
    print(f"speed: {_format_speed(verdict.speedup)}")
    print(f"\n{_compare_command(paths)}")


def print_json(pair: Pair, verdict: Verdict, paths: Paths, notes: Sequence[str]) -> None:
    told = {
        "expert": pair.new.plan.expert,
        "profile": pair.new.plan.profile,
        "runs": {"old": str(paths[0].root), "new": str(paths[1].root)},
        "settings": [
            {"name": s.name, "set": s.override, "why": s.why, "old": s.old, "new": s.new} for s in pair.settings
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
        "num_asked": verdict.num_asked,
        "speedup": verdict.speedup,
        "gate": {"is_open": verdict.gate.is_open, "words": verdict.gate.words},
        "notes": list(notes),
        "compare": _compare_command(paths),
    }
    json.dump(redact_tree(told), sys.stdout, indent=2)
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
        return "not judged"
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
        return "not known: no step was timed"
    words = f"{speedup:.2f} times as many rows a second"
    return words if speedup > 1 else f"not faster here: {words}"


def _compare_command(paths: Paths) -> str:
    old, new = paths
    words = ["launcher", "compare", old.run_id, new.run_id]
    runs_dir = str(new.root.parent)
    return shlex.join(words if runs_dir == "runs" else [*words, "--runs-dir", runs_dir])
