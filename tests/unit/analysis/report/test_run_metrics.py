"""Summary values of a run."""

from __future__ import annotations

import math

import pytest

from launcher.analysis.report.results import compute_energy_wh, draw_sparkline, format_metric
from launcher.core import metrics
from launcher.core.metrics import StepMetrics
from launcher.runs.record import compute_median


def rows(name: str, *values: float) -> list[StepMetrics]:
    return [StepMetrics(step=step, epoch=0.0, values={name: value}) for step, value in enumerate(values, start=1)]


def test_median_ignores_non_finite_values() -> None:
    assert compute_median(rows("x", 1.0, math.nan, 3.0, math.inf, 2.0), "x") == 2.0
    assert compute_median(rows("x", math.nan), "x") is None
    assert compute_median([], "x") is None


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ((), ""),
        ((1.0,), "▁"),
        ((1.0, 1.0), "▁▁"),
        ((8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0), "█▇▆▅▄▃▂▁"),
        (tuple([2.0] * 480 + [1.0] * 480), "█" * 24 + "▁" * 24),
    ],
)
def test_sparkline_spans_low_to_high(values: tuple[float, ...], drawn: str) -> None:
    assert draw_sparkline(values) == drawn


def test_energy_ignores_steps_with_missing_values() -> None:
    complete = {metrics.JOULES_PER_TOKEN: 2.0, metrics.TOKENS_PER_SECOND: 900.0, metrics.STEP_SECONDS: 2.0}
    logged = [StepMetrics(step=1, epoch=0.0, values=complete), *rows(metrics.STEP_SECONDS, 5.0)]
    assert compute_energy_wh(logged) == 1.0
    assert compute_energy_wh(rows(metrics.STEP_SECONDS, 5.0)) is None


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (metrics.DEVICE_MFU, 0.4321, "43.2 %"),
        (metrics.TOKENS_PER_SECOND, 12345.6, "12,346 tokens/s"),
        (metrics.SAMPLES_PER_SECOND, 8.123, "8.12 rows/s"),
        (metrics.STEP_SECONDS, 0.1234, "123 ms"),
        (metrics.TOTAL_SECONDS, 7200.0, "2 h"),
        (metrics.PEAK_ALLOCATED_GIB, 3.456, "3.46 GiB"),
        (metrics.JOULES_PER_TOKEN, 0.01234, "12.3 mJ"),
        (metrics.TRAIN_LOSS, 1.23456, "1.235"),
    ],
)
def test_metrics_are_formatted_in_their_units(name: str, value: float, text: str) -> None:
    assert format_metric(name, value) == text
