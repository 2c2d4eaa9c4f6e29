"""Sections and panels of the dashboard, by the metric names of launcher/core/metrics.py."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from launcher.core import metrics
from launcher.core.metrics import LOST_SECONDS, METRICS_BY_NAME
from launcher.runs.wandb_settings import STEP_AXIS, name_median

_SMOOTHING = 0.6
# eval/… except eval/loss, without lookahead, which not every regex engine supports.
TASK_METRICS = r"^eval/([^l]|l[^o]|lo[^s]|los[^s]|loss.).*$"
# Main check of each judge; a run has one of them.
MAIN_CHECKS = tuple(f"{metrics.EVAL_PREFIX}{name}" for name in ("matches", "behaves", "result", "equal", "right"))
# Not shown: samples per second, since rows differ in length, and steps per second, the inverse of the step time.


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves per run, bars of last values, a single last value, or a table of what differs between runs."""

    kind: Literal["Lines", "Bars", "Number", "Comparer"]
    title: str
    metrics: tuple[str, ...] = ()
    pattern: str | None = None  # instead of metrics: a regex for their names
    x: str = STEP_AXIS
    unit: str = ""
    smoothing: float = 0.0  # exponential, 0 to 1; the original curve stays visible
    has_log_scale: bool = False
    is_stacked: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A titled grid of panels."""

    title: str
    panels: tuple[Panel, ...]
    columns: int = 3
    rows: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Dashboard:
    """Sections of panels, and the table of runs next to them."""

    sections: tuple[Section, ...]
    group_by: tuple[str, ...]  # keys of a run's config
    results: tuple[str, ...]  # columns: keys of a run's summary
    settings: tuple[str, ...]  # columns: keys of a run's config

    @property
    def metrics(self) -> frozenset[str]:
        """Names of all metrics shown as a curve, bar, number, column or axis."""
        panels = [panel for section in self.sections for panel in section.panels]
        return frozenset({*self.results, *(name for panel in panels for name in (*panel.metrics, panel.x))})


_lines = partial(Panel, "Lines")
_bars = partial(Panel, "Bars")


def _line(name: str, *, smoothing: float = 0.0, has_log_scale: bool = False) -> Panel:
    metric = METRICS_BY_NAME[name]
    return _lines(metric.title, (name,), unit=metric.unit, smoothing=smoothing, has_log_scale=has_log_scale)


def _number(name: str) -> Panel:
    return Panel("Number", METRICS_BY_NAME[name].title, (name,))


_SPEED: tuple[Panel, ...] = (
    _lines(
        "tokens per second",
        (metrics.TOKENS_PER_SECOND, metrics.TRAINED_TOKENS_PER_SECOND),
        unit="tokens/s",
        smoothing=_SMOOTHING,
    ),
    _line(metrics.DEVICE_MFU, smoothing=_SMOOTHING),
    _line(metrics.GPU_UTILIZATION, smoothing=_SMOOTHING),
    _line(metrics.DATA_WAIT_SHARE),
    _line(metrics.DEVICE_TOKENS_PER_SECOND, smoothing=_SMOOTHING),
    _lines("step time and data wait of the host", (metrics.STEP_SECONDS, metrics.DATA_WAIT_SECONDS), unit="s"),
    _line(metrics.PACKING_EFFICIENCY, smoothing=_SMOOTHING),
    _line(metrics.JOULES_PER_TOKEN, smoothing=_SMOOTHING),
    _lines("GPU power and temperature", (metrics.GPU_POWER_WATTS, metrics.GPU_TEMPERATURE), unit="W, °C"),
    _bars("tokens per second, median", (name_median(metrics.TOKENS_PER_SECOND),), unit="tokens/s"),
    _bars("model FLOPs utilisation, median", (name_median(metrics.DEVICE_MFU),), unit="share"),
)

_MEMORY: tuple[Panel, ...] = (
    _lines(
        "peak memory, measured and predicted",
        (metrics.PEAK_ALLOCATED_GIB, metrics.PREDICTED_GIB, metrics.PEAK_RESERVED_GIB),
        unit="GiB",
    ),
    _line(metrics.PREDICTION_ERROR),
    _line(metrics.ALLOC_RETRIES),
    _bars("peak memory, measured and predicted, last", (metrics.PEAK_ALLOCATED_GIB, metrics.PREDICTED_GIB), unit="GiB"),
    _number(metrics.PREDICTION_ERROR),
)

_LEARNING: tuple[Panel, ...] = (
    _lines("training loss by step", (metrics.TRAIN_LOSS,), smoothing=_SMOOTHING),
    _lines("training loss by token", (metrics.TRAIN_LOSS,), x=metrics.TOKENS_SEEN, smoothing=_SMOOTHING),
    _lines("training loss by wall-clock time", (metrics.TRAIN_LOSS,), x=metrics.TOTAL_SECONDS, smoothing=_SMOOTHING),
    _lines("validation loss by step", (metrics.EVAL_LOSS,)),
    _lines("validation loss by token", (metrics.EVAL_LOSS,), x=metrics.TOKENS_SEEN),
    _lines("correct answers by step, including the base model", MAIN_CHECKS, unit="share"),
    _lines("answers that parse", (f"{metrics.EVAL_PREFIX}parses",), unit="share"),
    _lines("all task metrics", pattern=TASK_METRICS, unit="share"),
    _line(metrics.LEARNING_RATE),
    _bars("correct answers, last", MAIN_CHECKS, unit="share"),
    _bars("validation loss, last", (metrics.EVAL_LOSS,)),
    _number(metrics.EVAL_LOSS),
)

_STABILITY: tuple[Panel, ...] = (
    _line(metrics.GRAD_NORM, has_log_scale=True),
    _line(metrics.SKIPPED),
    _bars("lost to restarts and skipped steps, last", (metrics.RESTART_SECONDS, metrics.SKIPPED_SECONDS), unit="s"),
)

_GOODPUT: tuple[Panel, ...] = (
    _lines("goodput", (metrics.GOODPUT,), x=metrics.TOTAL_SECONDS, unit="share"),
    _lines("seconds lost", LOST_SECONDS, x=metrics.TOTAL_SECONDS, unit="s", is_stacked=True),
    _number(metrics.GOODPUT),
    _bars("seconds lost, last", LOST_SECONDS, unit="s"),
    _lines(
        "seconds per epoch, evaluation and answer generation",
        (metrics.EPOCH_SECONDS, metrics.EVAL_SECONDS, metrics.TASK_SECONDS),
        unit="s",
    ),
)

DASHBOARD = Dashboard(
    sections=(
        Section(title="speed", panels=_SPEED),
        Section(title="memory", panels=_MEMORY),
        Section(title="learning", panels=_LEARNING, rows=4),
        Section(title="stability", panels=_STABILITY, rows=1),
        Section(title="goodput", panels=_GOODPUT),
        Section(title="run comparison", panels=(Panel("Comparer", "differences"),), columns=1, rows=1),
    ),
    group_by=("expert", "hardware"),
    results=(
        "status",
        name_median(metrics.TOKENS_PER_SECOND),
        name_median(metrics.DEVICE_MFU),
        metrics.PEAK_ALLOCATED_GIB,
        metrics.PREDICTION_ERROR,
        metrics.TRAIN_LOSS,
        metrics.EVAL_LOSS,
        *MAIN_CHECKS,
        metrics.GOODPUT,
        name_median(metrics.JOULES_PER_TOKEN),
        metrics.TOTAL_SECONDS,
    ),
    settings=("base", "adapter", "quantization", "strategy", "global_batch_size", "sequence_length"),
)
