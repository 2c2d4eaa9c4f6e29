"""Sections and panels of the dashboard, by the metric names of launcher/core/metrics.py."""

from __future__ import annotations

from launcher.analysis.wandb_dashboard.model import Bars, Comparer, Dashboard, Lines, Number, Panel, RunTable, Section
from launcher.core import metrics
from launcher.core.metrics import LOST_SECONDS, METRICS_BY_NAME
from launcher.runs.wandb_settings import name_median

_SMOOTHING = 0.6
# eval/… except eval/loss, without lookahead, which not every regex engine supports.
TASK_METRICS = r"^eval/([^l]|l[^o]|lo[^s]|los[^s]|loss.).*$"
# Main check of each judge; a run has one of them.
MAIN_CHECKS = tuple(f"{metrics.EVAL_PREFIX}{name}" for name in ("matches", "behaves", "result", "equal", "right"))
# Not shown: samples per second, since rows differ in length, and steps per second, the inverse of the step time.


def _line(name: str, *, smoothing: float = 0.0, has_log_scale: bool = False) -> Lines:
    metric = METRICS_BY_NAME[name]
    return Lines(
        title=metric.title, metrics=(name,), unit=metric.unit, smoothing=smoothing, has_log_scale=has_log_scale
    )


def _number(name: str) -> Number:
    return Number(title=METRICS_BY_NAME[name].title, metric=name)


_SPEED: tuple[Panel, ...] = (
    Lines(
        title="tokens per second",
        metrics=(metrics.TOKENS_PER_SECOND, metrics.TRAINED_TOKENS_PER_SECOND),
        unit="tokens/s",
        smoothing=_SMOOTHING,
    ),
    _line(metrics.DEVICE_MFU, smoothing=_SMOOTHING),
    _line(metrics.GPU_UTILIZATION, smoothing=_SMOOTHING),
    _line(metrics.DATA_WAIT_SHARE),
    _line(metrics.DEVICE_TOKENS_PER_SECOND, smoothing=_SMOOTHING),
    Lines(
        title="step time and data wait of the host",
        metrics=(metrics.STEP_SECONDS, metrics.DATA_WAIT_SECONDS),
        unit="s",
    ),
    _line(metrics.PACKING_EFFICIENCY, smoothing=_SMOOTHING),
    _line(metrics.JOULES_PER_TOKEN, smoothing=_SMOOTHING),
    Lines(title="GPU power and temperature", metrics=(metrics.GPU_POWER_WATTS, metrics.GPU_TEMPERATURE), unit="W, °C"),
    Bars(title="tokens per second, median", metrics=(name_median(metrics.TOKENS_PER_SECOND),), unit="tokens/s"),
    Bars(title="model FLOPs utilisation, median", metrics=(name_median(metrics.DEVICE_MFU),), unit="share"),
)

_MEMORY: tuple[Panel, ...] = (
    Lines(
        title="peak memory, measured and predicted",
        metrics=(metrics.PEAK_ALLOCATED_GIB, metrics.PREDICTED_GIB, metrics.PEAK_RESERVED_GIB),
        unit="GiB",
    ),
    _line(metrics.PREDICTION_ERROR),
    _line(metrics.ALLOC_RETRIES),
    Bars(
        title="peak memory, measured and predicted, last",
        metrics=(metrics.PEAK_ALLOCATED_GIB, metrics.PREDICTED_GIB),
        unit="GiB",
    ),
    _number(metrics.PREDICTION_ERROR),
)

_LEARNING: tuple[Panel, ...] = (
    Lines(title="training loss by step", metrics=(metrics.TRAIN_LOSS,), smoothing=_SMOOTHING),
    Lines(title="training loss by token", metrics=(metrics.TRAIN_LOSS,), x=metrics.TOKENS_SEEN, smoothing=_SMOOTHING),
    Lines(
        title="training loss by wall-clock time",
        metrics=(metrics.TRAIN_LOSS,),
        x=metrics.TOTAL_SECONDS,
        smoothing=_SMOOTHING,
    ),
    Lines(title="held-out loss by step", metrics=(metrics.EVAL_LOSS,)),
    Lines(title="held-out loss by token", metrics=(metrics.EVAL_LOSS,), x=metrics.TOKENS_SEEN),
    Lines(title="correct answers by step, including the base model", metrics=MAIN_CHECKS, unit="share"),
    Lines(title="answers that parse", metrics=(f"{metrics.EVAL_PREFIX}parses",), unit="share"),
    Lines(title="all task metrics", pattern=TASK_METRICS, unit="share"),
    _line(metrics.LEARNING_RATE),
    Bars(title="correct answers, last", metrics=MAIN_CHECKS, unit="share"),
    Bars(title="held-out loss, last", metrics=(metrics.EVAL_LOSS,)),
    _number(metrics.EVAL_LOSS),
)

_STABILITY: tuple[Panel, ...] = (
    _line(metrics.GRAD_NORM, has_log_scale=True),
    _line(metrics.SKIPPED),
    Bars(
        title="lost to restarts and skipped steps, last",
        metrics=(metrics.RESTART_SECONDS, metrics.SKIPPED_SECONDS),
        unit="s",
    ),
)

_GOODPUT: tuple[Panel, ...] = (
    Lines(title="goodput", metrics=(metrics.GOODPUT,), x=metrics.TOTAL_SECONDS, unit="share"),
    Lines(title="seconds lost", metrics=LOST_SECONDS, x=metrics.TOTAL_SECONDS, unit="s", is_stacked=True),
    _number(metrics.GOODPUT),
    Bars(title="seconds lost, last", metrics=LOST_SECONDS, unit="s"),
    Lines(
        title="seconds per epoch, evaluation and answer generation",
        metrics=(metrics.EPOCH_SECONDS, metrics.EVAL_SECONDS, metrics.TASK_SECONDS),
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
        Section(title="run comparison", panels=(Comparer(title="differences"),), columns=1, rows=1),
    ),
    runs=RunTable(
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
    ),
)
