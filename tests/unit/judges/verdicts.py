"""Helpers for verdicts."""

from __future__ import annotations

from launcher.judges.base import Verdict


def passes_all(verdict: Verdict) -> bool:
    """Stricter than right: an answer in other words than the reference's may fail to be equal to it."""
    return not any(passed is False for passed in verdict.checks.values())
