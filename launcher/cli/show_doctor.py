"""A report for people: by family, worst first, and under what is not well why it matters and what to do."""

from __future__ import annotations

from itertools import groupby

from rich.table import Table
from rich.text import Text

from launcher.cli.tables import make_console
from launcher.doctor.findings import Finding, Report, Status
from launcher.errors import escape

_STYLES: dict[Status, str] = {"ok": "green", "note": "yellow", "problem": "bold red"}


def print_report(report: Report) -> None:
    console = make_console()
    for family, findings in groupby(report.findings, key=lambda finding: finding.family):
        console.print(Text(family, style="bold"))
        console.print(_make_table(list(findings)))
    console.print(Text(f"\n{_sum_up(report)}", style="bold"))


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
    """Foreign text is never markup, and never sent to the terminal as it is."""
    text = Text(escape(finding.found))
    for word, said in (("why", finding.matters), ("next", finding.next_step)):
        if said:
            text.append(f"\n{word}: ", style="bold")
            text.append(escape(said))
    return text


def _sum_up(report: Report) -> str:
    notes = f", {_count(report.num_notes, 'note')}" if report.num_notes else ""
    if not report.num_problems:
        return f"Nothing is wrong{notes}."
    return f"{_count(report.num_problems, 'problem')}{notes}."


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
