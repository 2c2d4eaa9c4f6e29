"""Lists in the docs are complete."""

from __future__ import annotations

from launcher.core.metrics import METRICS
from tests.conftest import ROOT


def test_every_metric_is_documented() -> None:
    text = (ROOT / "docs/OBSERVING.md").read_text(encoding="utf-8")
    assert [metric.name for metric in METRICS if f"`{metric.name}`" not in text] == []
