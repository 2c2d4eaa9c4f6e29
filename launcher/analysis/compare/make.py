"""Build a Comparison from the facts of several runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from launcher import __version__
from launcher.analysis.compare.comparability import collect_cautions, group_by_data
from launcher.analysis.compare.config_diff import clean_text, diff_settings
from launcher.analysis.compare.curves import compute_max_points, make_axis, make_series, make_shares
from launcher.analysis.compare.load_run import Judged, RunFacts
from launcher.analysis.compare.model import Chart, ComparedRun, Comparison, Figure, Series, Skipped
from launcher.analysis.compare.summary_metrics import make_figures, round_finite
from launcher.analysis.compare.tasks import choose_evaluations, make_task_charts, make_task_specs
from launcher.analysis.compare.verdict import make_verdicts
from launcher.core import metrics
from launcher.core.metrics import METRICS_BY_NAME
from launcher.runs.calibration_store import MIN_STEPS

# Metric, chart title, and the result that summarizes it. Those after the first _NUM_MAJOR are drawn smaller.
_CHARTS: tuple[tuple[str, str, str | None], ...] = (
    (metrics.TRAIN_LOSS, "training loss", "train_loss_final"),
    (metrics.EVAL_LOSS, "validation loss", "eval_loss_final"),
    (metrics.TOKENS_PER_SECOND, "tokens per second", "tokens_per_second"),
    (metrics.DEVICE_MFU, "MFU", "mfu"),
    (metrics.PEAK_ALLOCATED_GIB, "VRAM", "peak_allocated_gib"),
    (metrics.GPU_UTILIZATION, "GPU utilization", "gpu_utilization"),
    (metrics.DATA_WAIT_SHARE, "data wait", "data_wait_share"),
    (metrics.DATA_WAIT_SECONDS, "host data wait", None),
    (metrics.GRAD_NORM, "gradient norm", None),
    (metrics.LEARNING_RATE, "learning rate", None),
)
_NUM_MAJOR = 3
_SPARSE = frozenset({metrics.EVAL_LOSS})
_FLAT = 1 / 50  # a loss that falls below this share of its first value is drawn on a logarithmic axis
_BEST = (
    "★ marks the best of comparable runs: losses of finished runs of the same base on the same data, memory of the "
    "same model, speed on the same hardware, goodput at the same speed, time and cost of the same finished job. "
    f"Runs with an OOM fallback or fewer than {MIN_STEPS} steps have no ★ for speed. Values within 0.5 % of the best "
    "(losses: 0.1 %, speed, time and cost: 2 %) are marked too."
)
_BEST_TASKS = (
    " Task metrics are comparable on the same rows with the same judge; runs that are not significantly worse "
    "(McNemar's test, 5 %) are marked too. A tie means that no comparable run is significantly worse."
)
_LEFT_OUT = "No run recorded: {}. MFU, VRAM and GPU utilization are measured on GPUs only."
_INTERVALS = " In parentheses: 95 % confidence intervals of task metrics."


def make_comparison(
    runs: Sequence[RunFacts], *, made_at: str, title: str = "", skipped: Sequence[Skipped] = ()
) -> Comparison:
    """Compare runs: charts, results, settings, time breakdown and caveats."""
    runs = _make_names_unique(runs)
    groups = group_by_data(runs)
    known = (*make_task_charts(runs), *(_make_chart(number, runs) for number in range(len(_CHARTS))))
    recorded = {chart.metric: [run.column(chart.metric).has_values for run in runs] for chart in known}
    _prefer_device(recorded)
    charted = [chart.metric for chart in known if any(recorded[chart.metric])]
    max_points = compute_max_points(sum(sum(recorded[metric]) for metric in charted))
    left_out = tuple(
        name for metric, name, _ in _CHARTS if metric not in charted and metric != metrics.DATA_WAIT_SECONDS
    )
    figures, pick = make_figures(runs, [*make_task_specs(runs)]), choose_evaluations(runs)
    verdicts, about_verdicts = make_verdicts(runs, figures, pick)
    settings, num_equal = diff_settings([run.settings for run in runs])
    compared = []
    for index, (run, group) in enumerate(zip(runs, groups, strict=True)):
        run_metrics = [metric for metric in charted if recorded[metric][index]]
        series = tuple(made for metric in run_metrics if (made := make_series(run, metric, max_points)) is not None)
        compared.append(_make_compared_run(run, group, series, max_points, pick(run)))
    return Comparison(
        launcher_version=__version__,
        made_at=made_at,
        title=title or ("1 run" if len(runs) == 1 else f"{len(runs)} runs compared"),
        runs=tuple(compared),
        verdicts=verdicts,
        about_verdicts=about_verdicts,
        cautions=collect_cautions(runs),
        charts=tuple(chart for chart in known if chart.metric in charted),
        left_out=left_out,
        about_left_out=_LEFT_OUT.format(", ".join(left_out)) if left_out else "",
        figures=figures,
        about_best=_explain_best(figures),
        settings=settings,
        num_equal_settings=num_equal,
        skipped=tuple(skipped),
    )


def _prefer_device(recorded: dict[str, list[bool]]) -> None:
    """Show the data wait of the host only for runs that did not measure the wait of the device."""
    device, host = recorded[metrics.DATA_WAIT_SHARE], recorded[metrics.DATA_WAIT_SECONDS]
    shown = [is_host and not is_device for is_host, is_device in zip(host, device, strict=True)]
    recorded[metrics.DATA_WAIT_SECONDS] = shown


def _make_chart(number: int, runs: Sequence[RunFacts]) -> Chart:
    metric, title, figure = _CHARTS[number]
    known = METRICS_BY_NAME[metric]
    return Chart(
        metric=metric,
        title=title,
        unit=known.unit,
        better=known.better,
        is_sparse=metric in _SPARSE,
        is_minor=number >= _NUM_MAJOR,
        is_log=metric.endswith("/loss") and any(_is_flat(run.column(metric).finite) for run in runs),
        figure=figure,
    )


def _is_flat(losses: Sequence[float]) -> bool:
    return len(losses) > 1 and min(losses) > 0 and losses[-1] < _FLAT * losses[0]


def _make_compared_run(
    run: RunFacts, group: str | None, series: tuple[Series, ...], max_points: int, judged: Judged | None
) -> ComparedRun:
    shares, are_recorded = make_shares(run)
    traits = run.traits
    return ComparedRun(
        name=run.name,
        place=run.place,
        status=run.status,
        expert=traits.expert,
        base=traits.base,
        hardware=traits.hardware,
        started_at=run.started_at,
        steps_done=run.steps_done,
        num_steps=run.num_steps,
        data_key=traits.data_key,
        data_group=group,
        card=traits.card,
        card_gib=round_finite(traits.card_gib),
        predicted_gib=round_finite(traits.predicted_gib),
        axis=make_axis(run, max_points),
        series=series,
        shares=shares,
        shares_are_recorded=are_recorded,
        judged_on=None if judged is None else clean_text(judged.rows),
        judged_by=None if judged is None else clean_text(judged.checks[judged.main].checker),
    )


def _make_names_unique(runs: Sequence[RunFacts]) -> list[RunFacts]:
    """Return the runs with cleaned names; runs that have the same name get their path appended."""
    runs = [replace(run, name=clean_text(run.name), place=clean_text(run.place)) for run in runs]
    counts = Counter(run.name for run in runs)
    return [run if counts[run.name] == 1 else replace(run, name=f"{run.name} ({run.place})") for run in runs]


def _explain_best(figures: Sequence[Figure]) -> str:
    has_tasks = any(figure.intervals for figure in figures)
    if any(figure.best or figure.ties for figure in figures):
        text = _BEST + (_BEST_TASKS if has_tasks else "")
    else:
        text = "No run is marked as best: the values are not comparable, or equal."
    return text + (_INTERVALS if any(any(figure.intervals) for figure in figures) else "")
