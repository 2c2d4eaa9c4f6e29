"""Sections and panels of the dashboard, by the metric names of launcher/core/metrics.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from launcher.core import metrics
from launcher.core.metrics import LOST_SECONDS, METRICS_BY_NAME
from launcher.runs.wandb_settings import STEP_AXIS, name_median

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2.interface import BarPlot, LinePlot, RunComparer, ScalarChart

    Panel = LinePlot | BarPlot | ScalarChart | RunComparer

_SMOOTHING = 0.6
# eval/… except eval/loss, without lookahead, which not every regex engine supports.
TASK_METRICS = r"^eval/([^l]|l[^o]|lo[^s]|los[^s]|loss.).*$"
# Main check of each judge; a run has one of them.
MAIN_CHECKS = tuple(f"{metrics.EVAL_PREFIX}{name}" for name in ("matches", "behaves", "result", "equal", "right"))
# Not shown: samples per second, since rows differ in length, and steps per second, the inverse of the step time.

# The table of runs: keys of a run's config to group by, and columns by keys of its summary and of its config.
GROUP_BY = ("expert", "hardware")
RESULTS = (
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
)
SETTINGS = ("base", "adapter", "quantization", "strategy", "global_batch_size", "sequence_length")


def _lines(
    title: str,
    *names: str,
    x: str = STEP_AXIS,
    unit: str = "",
    pattern: str | None = None,  # instead of names: a regex for them
    is_smoothed: bool = False,  # the original curve stays visible
    has_log_scale: bool = False,
    is_stacked: bool = False,
) -> LinePlot:
    """Make a line plot with one curve per metric and run."""
    from wandb_workspaces.reports.v2.interface import LinePlot

    return LinePlot(
        title=title,
        x=x,
        y=list(names),
        metric_regex=pattern,
        title_y=unit or None,
        log_y=True if has_log_scale else None,
        plot_type="stacked-area" if is_stacked else None,
        smoothing_type="exponential" if is_smoothed else None,
        smoothing_factor=_SMOOTHING if is_smoothed else None,
        smoothing_show_original=True if is_smoothed else None,
    )


def _line(name: str, *, is_smoothed: bool = False, has_log_scale: bool = False) -> LinePlot:
    metric = METRICS_BY_NAME[name]
    return _lines(metric.title, name, unit=metric.unit, is_smoothed=is_smoothed, has_log_scale=has_log_scale)


def _bars(title: str, *names: str, unit: str = "") -> BarPlot:
    """Make a bar chart of the last values of metrics."""
    from wandb_workspaces.reports.v2.interface import BarPlot

    return BarPlot(title=title, metrics=list(names), title_x=unit or None)


def _number(name: str) -> ScalarChart:
    """Make a panel that shows the last value of a metric, averaged over runs."""
    from wandb_workspaces.reports.v2.interface import ScalarChart

    return ScalarChart(title=METRICS_BY_NAME[name].title, metric=name, groupby_aggfunc="mean")


def _show_speed() -> list[Panel]:
    tokens = (metrics.TOKENS_PER_SECOND, metrics.TRAINED_TOKENS_PER_SECOND)
    return [
        _lines("tokens per second", *tokens, unit="tokens/s", is_smoothed=True),
        _line(metrics.DEVICE_MFU, is_smoothed=True),
        _line(metrics.GPU_UTILIZATION, is_smoothed=True),
        _line(metrics.DATA_WAIT_SHARE),
        _line(metrics.DEVICE_TOKENS_PER_SECOND, is_smoothed=True),
        _lines("step time and data wait of the host", metrics.STEP_SECONDS, metrics.DATA_WAIT_SECONDS, unit="s"),
        _line(metrics.PACKING_EFFICIENCY, is_smoothed=True),
        _line(metrics.JOULES_PER_TOKEN, is_smoothed=True),
        _lines("GPU power and temperature", metrics.GPU_POWER_WATTS, metrics.GPU_TEMPERATURE, unit="W, °C"),
        _bars("tokens per second, median", name_median(metrics.TOKENS_PER_SECOND), unit="tokens/s"),
        _bars("model FLOPs utilization, median", name_median(metrics.DEVICE_MFU), unit="share"),
    ]


def _show_memory() -> list[Panel]:
    peak = (metrics.PEAK_ALLOCATED_GIB, metrics.PREDICTED_GIB)
    return [
        _lines("memory, peak and in use", *peak, metrics.PEAK_RESERVED_GIB, metrics.USED_GIB, unit="GiB"),
        _line(metrics.PREDICTION_ERROR),
        _line(metrics.ALLOC_RETRIES),
        _bars("peak memory, measured and predicted, last", *peak, unit="GiB"),
        _number(metrics.PREDICTION_ERROR),
    ]


def _show_learning() -> list[Panel]:
    seconds = metrics.TOTAL_SECONDS
    return [
        _lines("training loss by step", metrics.TRAIN_LOSS, is_smoothed=True),
        _lines("training loss by token", metrics.TRAIN_LOSS, x=metrics.TOKENS_SEEN, is_smoothed=True),
        _lines("training loss by wall-clock time", metrics.TRAIN_LOSS, x=seconds, is_smoothed=True),
        _lines("validation loss by step", metrics.EVAL_LOSS),
        _lines("validation loss by token", metrics.EVAL_LOSS, x=metrics.TOKENS_SEEN),
        _lines("correct answers by step, including the base model", *MAIN_CHECKS, unit="share"),
        _lines("answers that parse", f"{metrics.EVAL_PREFIX}parses", unit="share"),
        _lines("all task metrics", pattern=TASK_METRICS, unit="share"),
        _line(metrics.LEARNING_RATE),
        _bars("correct answers, last", *MAIN_CHECKS, unit="share"),
        _bars("validation loss, last", metrics.EVAL_LOSS),
        _number(metrics.EVAL_LOSS),
    ]


def _show_stability() -> list[Panel]:
    return [
        _line(metrics.GRAD_NORM, has_log_scale=True),
        _line(metrics.SKIPPED),
        _bars("lost to restarts and skipped steps, last", metrics.RESTART_SECONDS, metrics.SKIPPED_SECONDS, unit="s"),
    ]


def _show_goodput() -> list[Panel]:
    durations = (metrics.EPOCH_SECONDS, metrics.EVAL_SECONDS, metrics.TASK_SECONDS)
    return [
        _lines("goodput", metrics.GOODPUT, x=metrics.TOTAL_SECONDS, unit="share"),
        _lines("seconds lost", *LOST_SECONDS, x=metrics.TOTAL_SECONDS, unit="s", is_stacked=True),
        _number(metrics.GOODPUT),
        _bars("seconds lost, last", *LOST_SECONDS, unit="s"),
        _lines("seconds per epoch, evaluation and answer generation", *durations, unit="s"),
    ]


def _show_differences() -> list[Panel]:
    from wandb_workspaces.reports.v2.interface import RunComparer

    return [RunComparer(diff_only=True)]


# Title, panels, columns and rows of each section.
SECTIONS: tuple[tuple[str, Callable[[], list[Panel]], int, int], ...] = (
    ("speed", _show_speed, 3, 2),
    ("memory", _show_memory, 3, 2),
    ("learning", _show_learning, 3, 4),
    ("stability", _show_stability, 3, 1),
    ("goodput", _show_goodput, 3, 2),
    ("run comparison", _show_differences, 1, 1),
)
