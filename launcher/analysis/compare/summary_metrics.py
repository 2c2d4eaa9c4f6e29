"""Results of every run, and the best of the comparable ones."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Sequence

from launcher.analysis.compare.load_run import RunFacts
from launcher.analysis.compare.metric_spec import ALIKE, ALIKE_LOSS, Compute, MetricSpec, Peers, make_figure
from launcher.analysis.compare.model import Figure
from launcher.analysis.compare.tasks import make_task_specs
from launcher.core import metrics
from launcher.core.metrics import METRICS_BY_NAME

_TAIL = 0.05  # of the steps, averaged for the final training loss
_SECONDS_PER_HOUR = 3600


def make_figures(runs: Sequence[RunFacts]) -> tuple[Figure, ...]:
    """Return all results that some run has, task metrics first."""
    specs = (*make_task_specs(runs), *_SPECS)
    return tuple(figure for spec in specs if (figure := make_figure(spec, runs)) is not None)


def compute_wall_clock(run: RunFacts) -> float | None:
    """Return the recorded wall-clock time, else that of the attempts, else the sum of steps and evaluations."""
    recorded = run.last(metrics.TOTAL_SECONDS)
    if recorded is not None:
        return recorded
    return run.attempt_seconds if run.attempt_seconds is not None else sum_recorded_seconds(run)


def sum_recorded_seconds(run: RunFacts) -> float | None:
    """Return the seconds of all steps and evaluations."""
    parts = (metrics.STEP_SECONDS, metrics.EVAL_SECONDS, metrics.TASK_SECONDS)
    spent = [seconds for name in parts for seconds in run.column(name).finite]
    return math.fsum(spent) if spent else None


def _median(metric: str) -> Compute:
    def compute(run: RunFacts) -> float | None:
        values = run.column(metric).finite
        return statistics.median(values) if values else None

    return compute


def _max(metric: str) -> Compute:
    return lambda run: max(run.column(metric).finite, default=None)


def _min(metric: str) -> Compute:
    return lambda run: min(run.column(metric).finite, default=None)


def _last(metric: str) -> Compute:
    return lambda run: run.last(metric)


def _tail_mean(run: RunFacts) -> float | None:
    losses = run.column(metrics.TRAIN_LOSS).finite
    tail = losses[-max(1, math.ceil(_TAIL * len(losses))) :]
    return math.fsum(tail) / len(tail) if tail else None


def _prediction_error(run: RunFacts) -> float | None:
    peak, predicted = _max(metrics.PEAK_ALLOCATED_GIB)(run), run.traits.predicted_gib
    if peak is None or predicted is None or peak <= 0:
        return run.last(metrics.PREDICTION_ERROR)
    return predicted / peak - 1


def _skipped_steps(run: RunFacts) -> float | None:
    values = run.column(metrics.SKIPPED).finite
    return math.fsum(values) if values else None


def _cost(run: RunFacts) -> float | None:
    seconds, price = compute_wall_clock(run), run.traits.price_per_hour
    return None if seconds is None or price is None else seconds / _SECONDS_PER_HOUR * price


def _steps(run: RunFacts) -> float | None:
    return float(run.steps_done) if run.status != "not started" or run.columns else None


def _same_data(run: RunFacts) -> Hashable:
    return None if run.traits.random_weights else run.traits.data_key


def _same_model(run: RunFacts) -> Hashable:
    traits = run.traits
    return None if traits.base is None or traits.sequence_length is None else (traits.base, traits.sequence_length)


def _same_job(run: RunFacts) -> Hashable:
    """Group finished runs of the same work: a run that died early is not the fastest."""
    traits = run.traits
    if run.status != "done" or traits.data_key is None:
        return None
    return (traits.base, traits.data_key, traits.global_batch_size, run.num_steps, run.steps_done)


def _all_runs(_run: RunFacts) -> Hashable:
    return True


def _make_spec(key: str, metric: str, compute: Compute, peers: Peers, title: str = "", note: str = "") -> MetricSpec:
    """Make a spec with the unit and direction of a known metric."""
    known = METRICS_BY_NAME[metric]
    return MetricSpec(
        key=key,
        title=title or known.title,
        compute=compute,
        peers=peers,
        unit=known.unit,
        better=known.better,
        note=note,
        alike=ALIKE_LOSS if peers is _same_data else ALIKE,
    )


_SPECS: tuple[MetricSpec, ...] = (
    _make_spec("eval_loss_final", metrics.EVAL_LOSS, _last(metrics.EVAL_LOSS), _same_data, "held-out loss, final"),
    _make_spec("eval_loss_best", metrics.EVAL_LOSS, _min(metrics.EVAL_LOSS), _same_data, "held-out loss, best"),
    _make_spec(
        "train_loss_final",
        metrics.TRAIN_LOSS,
        _tail_mean,
        _same_data,
        "training loss, final",
        "mean of the last 5 % of the steps",
    ),
    _make_spec(
        "tokens_per_second",
        metrics.TOKENS_PER_SECOND,
        _median(metrics.TOKENS_PER_SECOND),
        _same_model,
        note="median over steps",
    ),
    _make_spec("mfu", metrics.DEVICE_MFU, _median(metrics.DEVICE_MFU), _all_runs, "MFU", "median over steps"),
    _make_spec(
        "peak_allocated_gib",
        metrics.PEAK_ALLOCATED_GIB,
        _max(metrics.PEAK_ALLOCATED_GIB),
        _same_model,
        "peak VRAM, allocated",
    ),
    _make_spec(
        "peak_reserved_gib",
        metrics.PEAK_RESERVED_GIB,
        _max(metrics.PEAK_RESERVED_GIB),
        _same_model,
        "peak VRAM, reserved",
    ),
    _make_spec(
        "predicted_gib",
        metrics.PREDICTED_GIB,
        lambda run: run.traits.predicted_gib,
        _all_runs,
        "VRAM, predicted",
    ),
    _make_spec("card_gib", metrics.PREDICTED_GIB, lambda run: run.traits.card_gib, _all_runs, "VRAM of the GPU"),
    _make_spec(
        "prediction_error",
        metrics.PREDICTION_ERROR,
        _prediction_error,
        _all_runs,
        "VRAM prediction error",
        "predicted / measured - 1, allocated memory",
    ),
    _make_spec(
        "data_wait_share",
        metrics.DATA_WAIT_SHARE,
        _median(metrics.DATA_WAIT_SHARE),
        _all_runs,
        "data wait",
        "share of the step time in which the device waits for data, median",
    ),
    _make_spec(
        "gpu_utilization",
        metrics.GPU_UTILIZATION,
        _median(metrics.GPU_UTILIZATION),
        _all_runs,
        note="median over steps",
    ),
    _make_spec(
        "joules_per_token",
        metrics.JOULES_PER_TOKEN,
        _median(metrics.JOULES_PER_TOKEN),
        _same_model,
        note="median over steps",
    ),
    _make_spec(
        "goodput",
        metrics.GOODPUT,
        _last(metrics.GOODPUT),
        _all_runs,
        note="share of the wall-clock time spent on training steps that count",
    ),
    _make_spec(
        "wall_clock",
        metrics.TOTAL_SECONDS,
        compute_wall_clock,
        _same_job,
        note="all attempts, without pauses between them",
    ),
    MetricSpec(
        key="cost",
        title="cost",
        compute=_cost,
        peers=_same_job,
        better="lower",
        note="wall-clock time at the planned price",
    ),
    _make_spec("tokens_seen", metrics.TOKENS_SEEN, _last(metrics.TOKENS_SEEN), _all_runs),
    MetricSpec(key="steps", title="steps", compute=_steps, peers=_all_runs),
    _make_spec("skipped", metrics.SKIPPED, _skipped_steps, _all_runs),
)
