"""report.md: what ran, on what, why so, how fast, how much memory, what was learnt, how to do it again."""

from __future__ import annotations

from launcher.report.facts import ReportFacts, load_facts
from launcher.report.render import render_report
from launcher.report.write import make_report, write_report

__all__ = ["ReportFacts", "load_facts", "make_report", "render_report", "write_report"]
