"""Print the doctor's report: findings by family (GPU, disks, …), the worst first, with reasons and next steps."""

from __future__ import annotations

from itertools import groupby

from rich.table import Table
from rich.text import Text

from launcher.analysis.doctor.findings import Finding, Report, Status
from launcher.cli.tables import make_console
from launcher.core.errors import escape

_STYLES: dict[Status, str] = {"ok": "green", "note": "yellow", "problem": "bold red"}


def print_report(report: Report) -> None:
    """Print all findings and a summary."""
    console = make_console()
    for family, findings in groupby(report.findings, key=lambda finding: finding.family):
        console.print(Text(family, style="bold"))
        console.print(_make_table(list(findings)))
    console.print(Text(f"\n{_summarize(report)}", style="bold"))


def _make_table(findings: list[Finding]) -> Table:
    table = Table(box=None, show_edge=False, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(width=9)
    table.add_column(style="cyan", min_width=20, max_width=20, overflow="fold")
    table.add_column(overflow="fold")
    for finding in findings:
        status = Text(f"  {finding.status}", style=_STYLES[finding.status])
        table.add_row(status, Text(escape(finding.subject)), _describe(finding))
    return table


def _describe(finding: Finding) -> Text:
    """Return a finding as text, with its reason and next step; foreign text is escaped and not taken as markup."""
    text = Text(escape(finding.found))
    for label, value in (("why", finding.matters), ("next", finding.next_step)):
        if value:
            text.append(f"\n{label}: ", style="bold")
            text.append(escape(value))
    return text


def _summarize(report: Report) -> str:
    notes = f", {_count(report.num_notes, 'note')}" if report.num_notes else ""
    if not report.num_problems:
        return f"No problems found{notes}."
    return f"{_count(report.num_problems, 'problem')}{notes}."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
