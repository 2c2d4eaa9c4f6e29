"""The table of quality.py: its rows summarized over seeds, as Markdown."""

from __future__ import annotations

import statistics
from typing import Any

from launcher.judges.statistics import compute_rate


def print_rows(rows: list[dict[str, Any]], tools: tuple[str, ...]) -> None:
    """Print a line per base, expert, number of epochs and tool, in the order of the tools."""
    names = "base", "expert", "epochs", "trained by", "held-out loss", "main check", "correct answers (95 % interval)"
    columns = {
        "command": ("seconds", "{:.0f} s"),
        "training": ("train_seconds", "{:.0f} s"),
        "energy": ("kilojoules", "{:.1f} kJ"),
    }
    print(
        f"| {' | '.join((*names, *columns, 'peak (predicted)'))} |\n" + "|---" * (len(names) + len(columns) + 1) + "|"
    )
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        group = row["base"], row["expert"], row["epochs"] or 0, tools.index(row["tool"])
        groups.setdefault(group, []).append(row)
    for (base, expert, epochs, tool), chosen in sorted(groups.items()):
        alone = [row for row in chosen if row.get("ran_alone")]
        cells = [base, expert, f"{epochs:g}", tools[tool], format_spread(chosen, "held_out_loss", "{:.4f}")]
        cells += [*format_answers(chosen), *(format_spread(alone, name, style) for name, style in columns.values())]
        print(f"| {' | '.join((*cells, format_peak(chosen)))} |")


def format_answers(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the main check with its number of answers, and the rate over all seeds with Wilson's interval."""
    check = rows[0]["main_check"]
    passed, judged = (sum(row["checks"][check][index] for row in rows) for index in (0, 1))
    rate = compute_rate([True] * passed + [False] * (judged - passed))
    return f"{check}, {len(rows)} x {judged // len(rows)}", f"{rate.value:.1%} ({rate.low:.1%} to {rate.high:.1%})"


def format_peak(rows: list[dict[str, Any]]) -> str:
    measured = [row for row in rows if row.get("peak_gib")]
    if not measured:
        return ""
    worst = max(measured, key=lambda row: row["peak_gib"])
    predicted = f" ({worst['predicted_gib']:.2f})" if "predicted_gib" in worst else ""
    return f"{worst['peak_gib']:.2f}{predicted} GiB"


def format_spread(rows: list[dict[str, Any]], name: str, style: str) -> str:
    values = [row[name] for row in rows if name in row]
    if not values:
        return ""
    mean = style.format(statistics.fmean(values))
    return f"{mean} ± {style.format(statistics.stdev(values))}" if len(values) > 1 else mean
