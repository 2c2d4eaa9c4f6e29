"""report.md of a run: configuration, reasons, speed, memory, quality, and how to reproduce it."""

from __future__ import annotations

from launcher.analysis.report.render import ReportFacts, load_facts, make_report, render_report, write_report

__all__ = ["ReportFacts", "load_facts", "make_report", "render_report", "write_report"]
