"""Final figures of every run, and which is best among those that compare."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Sequence

from launcher import metrics
from launcher.compare.facts import RunFacts
from launcher.compare.kinds import ALIKE, ALIKE_LOSS, Compute, Kind, Peers, make_figure
from launcher.compare.model import Figure
from launcher.compare.tasks import make_task_kinds
from launcher.metrics import METRICS_BY_NAME

_TAIL = 0.05  # of the steps: the mean of so many is the final training loss
_SECONDS_PER_HOUR = 3600


def make_figures(runs: Sequence[RunFacts]) -> tuple[Figure, ...]:
    """Those that some run has; what an expert is for comes first."""
    kinds = (*make_task_kinds(runs), *_KINDS)
    return tuple(figure for kind in kinds if (figure := make_figure(kind, runs)) is not None)


def wall_clock(run: RunFacts) -> float | None:
    """As the run recorded it, or by its attempts, or by its steps and evaluations."""
    recorded = run.last(metrics.TOTAL_SECONDS)
    if recorded is not None:
        return recorded
    return run.attempt_seconds if run.attempt_seconds is not None else added_up_seconds(run)


def added_up_seconds(run: RunFacts) -> float | None:
    parts = (metrics.STEP_SECONDS, metrics.EVAL_SECONDS, metrics.TASK_SECONDS)
    spent = [seconds for name in parts for seconds in run.column(name).finite]
    return math.fsum(spent) if spent else None


def _median(metric: str) -> Compute:
    def compute(run: RunFacts) -> float | None:
        values = run.column(metric).finite
        return statistics.median(values) if values else None

    return compute


def _greatest(metric: str) -> Compute:
    return lambda run: max(run.column(metric).finite, default=None)


def _least(metric: str) -> Compute:
    return lambda run: min(run.column(metric).finite, default=None)


def _last(metric: str) -> Compute:
    return lambda run: run.last(metric)


def _tail_mean(run: RunFacts) -> float | None:
    losses = run.column(metrics.TRAIN_LOSS).finite
    tail = losses[-max(1, math.ceil(_TAIL * len(losses))) :]
    return math.fsum(tail) / len(tail) if tail else None


def _prediction_error(run: RunFacts) -> float | None:
    peak, predicted = _greatest(metrics.PEAK_ALLOCATED_GIB)(run), run.traits.predicted_gib
    if peak is None or predicted is None or peak <= 0:
        return run.last(metrics.PREDICTION_ERROR)
    return predicted / peak - 1


def _steps_passed_over(run: RunFacts) -> float | None:
    values = run.column(metrics.SKIPPED).finite
    return math.fsum(values) if values else None


def _cost(run: RunFacts) -> float | None:
    seconds, price = wall_clock(run), run.traits.price_per_hour
    return None if seconds is None or price is None else seconds / _SECONDS_PER_HOUR * price


def _steps(run: RunFacts) -> float | None:
    return float(run.steps_done) if run.status != "not started" or run.columns else None


def _same_data(run: RunFacts) -> Hashable:
    return None if run.traits.random_weights else run.traits.data_key


def _same_model(run: RunFacts) -> Hashable:
    traits = run.traits
    return None if traits.base is None or traits.sequence_length is None else (traits.base, traits.sequence_length)


def _same_job(run: RunFacts) -> Hashable:
    """The same work, done to its end: a run that died early is not the fastest."""
    traits = run.traits
    if run.status != "done" or traits.data_key is None:
        return None
    return (traits.base, traits.data_key, traits.global_batch_size, run.num_steps, run.steps_done)


def _anything(_run: RunFacts) -> Hashable:
    return True


def _kind(key: str, metric: str, compute: Compute, peers: Peers, title: str = "", note: str = "") -> Kind:
    """Unit and direction are the metric's own."""
    known = METRICS_BY_NAME[metric]
    return Kind(
        key=key,
        title=title or known.title,
        compute=compute,
        peers=peers,
        unit=known.unit,
        better=known.better,
        note=note,
        alike=ALIKE_LOSS if peers is _same_data else ALIKE,
    )


_KINDS: tuple[Kind, ...] = (
    _kind("eval_loss_final", metrics.EVAL_LOSS, _last(metrics.EVAL_LOSS), _same_data, "held-out loss, final"),
    _kind("eval_loss_best", metrics.EVAL_LOSS, _least(metrics.EVAL_LOSS), _same_data, "held-out loss, best"),
    _kind(
        "train_loss_final",
        metrics.TRAIN_LOSS,
        _tail_mean,
        _same_data,
        "training loss, final",
        "the mean of the last 5 % of the steps",
    ),
    _kind(
        "tokens_per_second",
        metrics.TOKENS_PER_SECOND,
        _median(metrics.TOKENS_PER_SECOND),
        _same_model,
        note="the median step",
    ),
    _kind("mfu", metrics.DEVICE_MFU, _median(metrics.DEVICE_MFU), _anything, "MFU", "the median step"),
    _kind(
        "peak_allocated_gib",
        metrics.PEAK_ALLOCATED_GIB,
        _greatest(metrics.PEAK_ALLOCATED_GIB),
        _same_model,
        "peak VRAM, allocated",
    ),
    _kind(
        "peak_reserved_gib",
        metrics.PEAK_RESERVED_GIB,
        _greatest(metrics.PEAK_RESERVED_GIB),
        _same_model,
        "peak VRAM, reserved",
    ),
    _kind(
        "predicted_gib",
        metrics.PREDICTED_GIB,
        lambda run: run.traits.predicted_gib,
        _anything,
        "VRAM, predicted",
    ),
    _kind("card_gib", metrics.PREDICTED_GIB, lambda run: run.traits.card_gib, _anything, "VRAM of the card"),
    _kind(
        "prediction_error",
        metrics.PREDICTION_ERROR,
        _prediction_error,
        _anything,
        "VRAM prediction, error",
        "predicted / measured - 1, by allocated memory",
    ),
    _kind(
        "data_wait_share",
        metrics.DATA_WAIT_SHARE,
        _median(metrics.DATA_WAIT_SHARE),
        _anything,
        "data wait",
        "share of the median step in which the device waits for data",
    ),
    _kind(
        "gpu_utilization", metrics.GPU_UTILIZATION, _median(metrics.GPU_UTILIZATION), _anything, note="the median step"
    ),
    _kind(
        "joules_per_token",
        metrics.JOULES_PER_TOKEN,
        _median(metrics.JOULES_PER_TOKEN),
        _same_model,
        note="the median step",
    ),
    _kind(
        "goodput",
        metrics.GOODPUT,
        _last(metrics.GOODPUT),
        _anything,
        note="share of the wall-clock time that trained what counts",
    ),
    _kind("wall_clock", metrics.TOTAL_SECONDS, wall_clock, _same_job, note="all attempts, without pauses between them"),
    Kind(
        key="cost",
        title="cost",
        compute=_cost,
        peers=_same_job,
        better="lower",
        note="wall-clock time at the price that was planned with",
    ),
    _kind("tokens_seen", metrics.TOKENS_SEEN, _last(metrics.TOKENS_SEEN), _anything),
    Kind(key="steps", title="steps", compute=_steps, peers=_anything),
    _kind("skipped", metrics.SKIPPED, _steps_passed_over, _anything),
)
