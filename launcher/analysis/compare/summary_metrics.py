"""Summary metrics of every run, and which of the comparable runs are best."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from launcher.analysis.compare.load_run import RunFacts
from launcher.analysis.compare.model import Figure, Interval
from launcher.core import metrics
from launcher.core.metrics import METRICS_BY_NAME
from launcher.runs.calibration_store import MIN_STEPS

_ALIKE, _ALIKE_LOSS, _ALIKE_SHARE = 0.005, 0.001, 0.005  # the last is absolute: half a percentage point
_ALIKE_SPEED = 0.02  # medians of equal runs differ by as much
_TAIL = 0.05  # of the steps, averaged for the final training loss
_SECONDS_PER_HOUR = 3600
_SPEED_FACTOR = 1.8  # between the fastest and the slowest part of a run
_MIN_STEPS, _MAX_PARTS = 4, 24  # of a part; per run

Compute = Callable[[RunFacts], float | None]
Peers = Callable[[RunFacts], Hashable]  # runs with the same value are comparable; None: with no run


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricSpec:
    """How to compute one summary metric of a run, and how to compare it between runs."""

    key: str
    title: str
    compute: Compute
    peers: Peers
    unit: str = ""
    better: Literal["lower", "higher"] | None = None
    note: str = ""
    alike: float = _ALIKE  # relative differences below count as equal
    interval: Callable[[RunFacts], Interval | None] | None = None  # 95 % confidence interval
    is_significant: Callable[[RunFacts, RunFacts], bool] | None = None  # whether the best run beats the other
    needs_equal_speed: bool = False  # a share of the time says nothing if the time of a step differs


def make_figures(runs: Sequence[RunFacts], task_specs: Sequence[MetricSpec] = ()) -> tuple[Figure, ...]:
    """Return every summary metric that at least one run has, task metrics first."""
    return tuple(figure for spec in (*task_specs, *_SPECS) if (figure := _make_figure(spec, runs)) is not None)


def _make_figure(spec: MetricSpec, runs: Sequence[RunFacts]) -> Figure | None:
    values = tuple(round_finite(spec.compute(run)) for run in runs)
    if all(value is None for value in values):
        return None
    best, ties = _find_best(spec, runs, values)
    currencies = {run.traits.currency for run in runs} - {None}
    return Figure(
        key=spec.key,
        title=spec.title,
        unit=spec.unit if spec.key != "cost" or len(currencies) > 1 else next(iter(currencies), "") or "",
        better=spec.better,
        values=values,
        intervals=() if spec.interval is None else tuple(map(spec.interval, runs)),
        best=best,
        ties=tuple(ties) if spec.is_significant is not None else (),
        note=spec.note,
    )


def _find_best(
    spec: MetricSpec, runs: Sequence[RunFacts], values: Sequence[float | None]
) -> tuple[dict[int, int], list[int]]:
    """Return the best runs of each group of comparable runs, and the runs of groups that are all equally good."""
    if spec.better is None:
        return {}, []
    groups: dict[Hashable, dict[int, float]] = {}
    for index, (run, value) in enumerate(zip(runs, values, strict=True)):
        peers = spec.peers(run)
        if value is not None and peers is not None:
            groups.setdefault(peers, {})[index] = value
    best: dict[int, int] = {}
    ties: list[int] = []
    for known in groups.values():
        if spec.needs_equal_speed and not _have_equal_speed([runs[index] for index in known]):
            continue
        leader = (min if spec.better == "lower" else max)(known, key=lambda index: known[index])
        first = {index: len(known) for index in known if _is_as_good(spec, runs, known, index, leader)}
        if len(first) < len(known):
            best.update(first)
        elif len(known) > 1:
            ties += first
    return dict(sorted(best.items())), sorted(ties)


def _is_as_good(spec: MetricSpec, runs: Sequence[RunFacts], known: dict[int, float], index: int, best: int) -> bool:
    if spec.is_significant is not None:
        return not spec.is_significant(runs[best], runs[index])
    return is_alike(spec, known[index], known[best])


def is_alike(spec: MetricSpec, one: float, other: float) -> bool:
    """Return whether two values of a summary metric differ too little to call one of them better."""
    if spec.unit == "share":
        return abs(one - other) <= _ALIKE_SHARE
    return math.isclose(one, other, rel_tol=spec.alike)


def _have_equal_speed(runs: Sequence[RunFacts]) -> bool:
    speeds = [TOKENS_PER_SECOND.compute(run) for run in runs]
    known = [speed for speed in speeds if speed is not None]
    return len(known) == len(runs) and is_alike(TOKENS_PER_SECOND, min(known), max(known))


def round_digits(value: float) -> float:
    """Round to six digits, which halves the size of the page."""
    return float(f"{value:.6g}")


def round_finite(value: float | None) -> float | None:
    """Round to six digits; None if the value is missing or not finite."""
    return round_digits(value) if value is not None and math.isfinite(value) else None


def compute_wall_clock(run: RunFacts) -> float | None:
    """Return the recorded wall-clock time, else that of the attempts, else the sum of steps and evaluations."""
    recorded = run.last(metrics.TOTAL_SECONDS)
    if recorded is not None:
        return recorded
    return run.attempt_seconds if run.attempt_seconds is not None else sum_recorded_seconds(run)


def sum_recorded_seconds(run: RunFacts) -> float | None:
    """Return the total seconds of a run's steps and evaluations; None if none were recorded."""
    parts = (metrics.STEP_SECONDS, metrics.EVAL_SECONDS, metrics.TASK_SECONDS)
    spent = [seconds for name in parts for seconds in run.column(name).finite]
    return math.fsum(spent) if spent else None


def _last(metric: str) -> Compute:
    return lambda run: run.last(metric)


def _reduce(metric: str, reduction: Callable[[list[float]], float]) -> Compute:
    return lambda run: reduction(values) if (values := run.column(metric).finite) else None


def _tail_mean(run: RunFacts) -> float | None:
    """Return the mean of the last training losses, of which skipped steps are left out; NaN if none is finite."""
    losses = run.column(metrics.TRAIN_LOSS).values
    if not losses:
        return None
    finite = [loss for loss in losses[-math.ceil(_TAIL * len(losses)) :] if math.isfinite(loss)]
    return statistics.fmean(finite) if finite else math.nan


def _prediction_error(run: RunFacts) -> float | None:
    peak, predicted = max(run.column(metrics.PEAK_ALLOCATED_GIB).finite, default=0.0), run.traits.predicted_gib
    return run.last(metrics.PREDICTION_ERROR) if peak <= 0 or predicted is None else predicted / peak - 1


def compute_cost(run: RunFacts) -> float | None:
    """Return the cost of a run's wall-clock time at the planned price; None if either is unknown."""
    seconds, price = compute_wall_clock(run), run.traits.price_per_hour
    return None if seconds is None or price is None else seconds / _SECONDS_PER_HOUR * price


def _steps(run: RunFacts) -> float | None:
    return float(run.steps_done) if run.status != "not started" or run.columns else None


def _same_data(run: RunFacts) -> Hashable:
    """Return a key that groups finished runs of the same base on the same data; None for a meaningless loss."""
    traits = run.traits
    is_comparable = run.status == "done" and traits.data_key is not None and not traits.random_weights
    return (traits.base, traits.data_key) if is_comparable else None


def _same_model(run: RunFacts) -> Hashable:
    """Return a key that groups runs of the same model; None if unknown, or if an OOM fallback changed the settings."""
    traits = run.traits
    is_known = traits.base is not None and traits.sequence_length is not None
    return (traits.base, traits.sequence_length) if is_known and not run.oom_fallbacks else None


def _same_machine(run: RunFacts) -> Hashable:
    """Return a key that groups runs of the same model and hardware; None if unknown, too short or not steady."""
    model = _same_model(run)
    is_known = model is not None and run.traits.hardware is not None
    is_steady = run.steps_done >= MIN_STEPS and find_speed_change(run) is None
    return (model, run.traits.hardware) if is_known and is_steady else None


def find_speed_change(run: RunFacts) -> tuple[float, float, int] | None:
    """Return the speeds before and after a change by a factor of 1.8 or more, and its step; None without such a change.

    They are the highest and the lowest median of several consecutive steps, so single slow steps and the first one do
    not count. The step is approximate.
    """
    points = [*run.column(metrics.TOKENS_PER_SECOND).by_step.items()][1:]
    size = max(_MIN_STEPS, math.ceil(len(points) / _MAX_PARTS))
    parts = [points[at : at + size] for at in range(0, len(points) - size + 1, size)]
    medians = [statistics.median(value for _, value in part) for part in parts]
    if not medians or min(medians) <= 0 or max(medians) < _SPEED_FACTOR * min(medians):
        return None
    high, low = medians.index(max(medians)), medians.index(min(medians))
    edge = math.sqrt(max(medians) * min(medians))
    later = next(at for at in range(min(high, low), len(parts)) if (medians[at] < edge) == (low > high))
    return medians[min(high, low)], medians[max(high, low)], parts[later][0][0]


def _same_job(run: RunFacts) -> Hashable:
    """Return a key that groups runs of the same work; None if unfinished, of unknown data, or if the speed changed."""
    traits = run.traits
    if run.status != "done" or traits.data_key is None or find_speed_change(run) is not None:
        return None
    return (traits.base, traits.data_key, traits.global_batch_size, run.num_steps, run.steps_done)


def compute_waited_seconds(run: RunFacts) -> float:
    """Return the seconds that a run waited for data: the wait of the device if measured, else that of the host."""
    steps, shares, hosts = (
        run.column(name).by_step for name in (metrics.STEP_SECONDS, metrics.DATA_WAIT_SHARE, metrics.DATA_WAIT_SECONDS)
    )
    waits = ((seconds, shares[at] * seconds if at in shares else hosts.get(at, 0.0)) for at, seconds in steps.items())
    return math.fsum(min(seconds, wait) for seconds, wait in waits)


def compute_data_wait(run: RunFacts) -> float | None:
    """Return the share of the time of all steps that waited for data; None if it was not measured."""
    seconds = math.fsum(run.column(metrics.STEP_SECONDS).finite)
    is_measured = run.column(metrics.DATA_WAIT_SHARE).finite or run.column(metrics.DATA_WAIT_SECONDS).finite
    return compute_waited_seconds(run) / seconds if seconds and is_measured else None


def _same_cost(run: RunFacts) -> Hashable:
    job = _same_job(run)
    return None if job is None else (job, run.traits.currency)


def _steady_runs(run: RunFacts) -> Hashable:
    return None if find_speed_change(run) is not None else True


def _all_runs(_run: RunFacts) -> Hashable:
    return True


_SPEED_PEERS = (_same_machine, _same_job, _steady_runs)


def _make_spec(key: str, metric: str, compute: Compute, peers: Peers, title: str = "", note: str = "") -> MetricSpec:
    """Make the spec of a summary metric, with the unit and direction (lower or higher is better) of a logged metric."""
    known = METRICS_BY_NAME[metric]
    return MetricSpec(
        key=key,
        title=title or known.title,
        compute=compute,
        peers=peers,
        unit=known.unit,
        better=known.better,
        note=note,
        alike=_ALIKE_LOSS if peers is _same_data else _ALIKE_SPEED if peers in _SPEED_PEERS else _ALIKE,
        needs_equal_speed=metric == metrics.GOODPUT,
    )


def _make_median(key: str, metric: str, peers: Peers, title: str = "", note: str = "median over steps") -> MetricSpec:
    return _make_spec(key, metric, _reduce(metric, statistics.median), peers, title, note)


def _make_peak(key: str, metric: str, title: str) -> MetricSpec:
    return _make_spec(key, metric, _reduce(metric, max), _same_model, title)


_GOODPUT_NOTE = "share of the wall-clock time spent on training steps that were not skipped or repeated"
_DATA_WAIT_NOTE = "share of the time of all steps that waits for data"
_TAIL_NOTE, _ERROR_NOTE = "mean of the last 5 % of the steps", "predicted / measured - 1, allocated memory"
_CLOCK_NOTE, _COST_NOTE = "all attempts, without pauses between them", "wall-clock time at the planned price"
_EVAL, _TRAIN, _VRAM = metrics.EVAL_LOSS, metrics.TRAIN_LOSS, metrics.PREDICTED_GIB
EVAL_LOSS = _make_spec("eval_loss_final", _EVAL, _last(_EVAL), _same_data, "validation loss, final")
TRAIN_LOSS = _make_spec("train_loss_final", _TRAIN, _tail_mean, _same_data, "training loss, final", _TAIL_NOTE)
TOKENS_PER_SECOND = _make_median("tokens_per_second", metrics.TOKENS_PER_SECOND, _same_machine)
_SPECS: tuple[MetricSpec, ...] = (
    EVAL_LOSS,
    _make_spec("eval_loss_best", _EVAL, _reduce(_EVAL, min), _same_data, "validation loss, best"),
    TRAIN_LOSS,
    TOKENS_PER_SECOND,
    _make_median("mfu", metrics.DEVICE_MFU, _steady_runs, "MFU"),
    _make_peak("peak_allocated_gib", metrics.PEAK_ALLOCATED_GIB, "peak VRAM, allocated"),
    _make_peak("peak_reserved_gib", metrics.PEAK_RESERVED_GIB, "peak VRAM, reserved"),
    _make_spec("predicted_gib", _VRAM, lambda run: run.traits.predicted_gib, _all_runs, "VRAM, predicted"),
    _make_spec("card_gib", _VRAM, lambda run: run.traits.card_gib, _all_runs, "VRAM of the GPU"),
    _make_spec(
        "prediction_error",
        metrics.PREDICTION_ERROR,
        _prediction_error,
        _all_runs,
        "VRAM prediction error",
        _ERROR_NOTE,
    ),
    _make_spec("data_wait_share", metrics.DATA_WAIT_SHARE, compute_data_wait, _all_runs, "data wait", _DATA_WAIT_NOTE),
    replace(_make_median("gpu_utilization", metrics.GPU_UTILIZATION, _all_runs), better=None),
    _make_median("joules_per_token", metrics.JOULES_PER_TOKEN, _same_machine),
    _make_spec("goodput", metrics.GOODPUT, _last(metrics.GOODPUT), _same_machine, note=_GOODPUT_NOTE),
    _make_spec("wall_clock", metrics.TOTAL_SECONDS, compute_wall_clock, _same_job, note=_CLOCK_NOTE),
    MetricSpec(
        key="cost",
        title="cost",
        compute=compute_cost,
        peers=_same_cost,
        better="lower",
        note=_COST_NOTE,
        alike=_ALIKE_SPEED,
    ),
    _make_spec("tokens_seen", metrics.TOKENS_SEEN, _last(metrics.TOKENS_SEEN), _all_runs),
    MetricSpec(key="steps", title="steps", compute=_steps, peers=_all_runs),
    _make_spec("skipped", metrics.SKIPPED, _reduce(metrics.SKIPPED, math.fsum), _all_runs),
)
