"""Several runs become one comparison: pure, and the same for a page, a table and a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from launcher import __version__, metrics
from launcher.compare.comparability import find_cautions, group_by_data
from launcher.compare.facts import RunFacts
from launcher.compare.figures import make_figures
from launcher.compare.judged import Judged
from launcher.compare.model import Chart, ComparedRun, Comparison, Figure, Series, Skipped
from launcher.compare.series import make_axis, make_series, points_per_series
from launcher.compare.settings import clean_text, find_differences
from launcher.compare.shares import make_shares
from launcher.compare.tasks import choose_evaluations, make_task_charts
from launcher.metrics import METRICS_BY_NAME

# Metric, and its title where a person says it shorter.
_CHARTS: tuple[tuple[str, str], ...] = (
    (metrics.TRAIN_LOSS, "training loss"),
    (metrics.EVAL_LOSS, "held-out loss"),
    (metrics.TOKENS_PER_SECOND, "tokens a second"),
    (metrics.DEVICE_MFU, "MFU"),
    (metrics.PEAK_ALLOCATED_GIB, "VRAM"),
    (metrics.GPU_UTILIZATION, "GPU utilisation"),
    (metrics.DATA_WAIT_SHARE, "data wait"),
    (metrics.DATA_WAIT_SECONDS, "host waits for data"),
    (metrics.GRAD_NORM, "norm of the gradients"),
    (metrics.LEARNING_RATE, "learning rate"),
)
_SPARSE = frozenset({metrics.EVAL_LOSS})
_BEST = (
    "★ is the best among runs whose figures compare: losses on the same data, speed and memory of the same model, "
    "time and cost of the same finished job. Figures within 0.5 % of the best (losses: 0.1 %) share its mark."
)
_BEST_TASKS = (
    " Task metrics compare on the same rows, judged by the same; what may be as good by chance (McNemar's test, 5 %) "
    "shares the mark."
)
_INTERVALS = " In brackets: where a task metric lies with 95 %."


def make_comparison(
    runs: Sequence[RunFacts], *, made_at: str, title: str = "", skipped: Sequence[Skipped] = ()
) -> Comparison:
    runs = _name_apart(runs)
    groups = group_by_data(runs)
    known = (*make_task_charts(runs), *(_make_chart(metric, name) for metric, name in _CHARTS))
    told = {chart.metric: [run.column(chart.metric).tells for run in runs] for chart in known}
    _prefer_device(told)
    charted = [chart.metric for chart in known if any(told[chart.metric])]
    max_points = points_per_series(sum(sum(told[metric]) for metric in charted))
    left_out = tuple(name for metric, name in _CHARTS if metric not in charted and metric != metrics.DATA_WAIT_SECONDS)
    figures, pick = make_figures(runs), choose_evaluations(runs)
    settings, num_equal = find_differences([run.settings for run in runs])
    compared = []
    for index, (run, group) in enumerate(zip(runs, groups, strict=True)):
        metrics_told = [metric for metric in charted if told[metric][index]]
        series = tuple(made for metric in metrics_told if (made := make_series(run, metric, max_points)) is not None)
        compared.append(_compare_run(run, group, series, max_points, pick(run)))
    return Comparison(
        launcher_version=__version__,
        made_at=made_at,
        title=title or _count(len(runs)),
        runs=tuple(compared),
        cautions=find_cautions(runs),
        charts=tuple(chart for chart in known if chart.metric in charted),
        left_out=left_out,
        about_left_out=_explain_left_out(left_out),
        figures=figures,
        about_best=_explain_best(figures),
        settings=settings,
        num_equal_settings=num_equal,
        skipped=tuple(skipped),
    )


def _prefer_device(told: dict[str, list[bool]]) -> None:
    """How long the host waited is shown only of runs that cannot tell how long their device did."""
    device, host = told[metrics.DATA_WAIT_SHARE], told[metrics.DATA_WAIT_SECONDS]
    shown = [is_host and not is_device for is_host, is_device in zip(host, device, strict=True)]
    told[metrics.DATA_WAIT_SECONDS] = shown


def _make_chart(metric: str, title: str) -> Chart:
    known = METRICS_BY_NAME[metric]
    return Chart(metric=metric, title=title, unit=known.unit, better=known.better, is_sparse=metric in _SPARSE)


def _compare_run(
    run: RunFacts, group: str | None, series: tuple[Series, ...], max_points: int, judged: Judged | None
) -> ComparedRun:
    shares, are_recorded = make_shares(run)
    traits = run.traits
    return ComparedRun(
        name=run.name,
        place=run.place,
        kind=run.kind,
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
        card_gib=None if traits.card_gib is None else float(f"{traits.card_gib:.6g}"),
        predicted_gib=None if traits.predicted_gib is None else float(f"{traits.predicted_gib:.6g}"),
        axis=make_axis(run, max_points),
        series=series,
        shares=shares,
        shares_are_recorded=are_recorded,
        judged_on=None if judged is None else clean_text(judged.rows),
        judged_by=None if judged is None else clean_text(judged.checks[judged.main].checker),
    )


def _name_apart(runs: Sequence[RunFacts]) -> list[RunFacts]:
    """Runs of the same name are told apart by who wrote them, then by where they lie, then by a number."""
    runs = [replace(run, name=clean_text(run.name), place=clean_text(run.place)) for run in runs]
    runs = _tell_apart(runs, lambda run: f"{run.name} (W&B)" if run.kind == "wandb" else run.name)
    runs = _tell_apart(runs, lambda run: f"{run.name} ({run.place})")
    numbers: Counter[str] = Counter()
    apart = []
    for run in runs:
        numbers[run.name] += 1
        apart.append(run if numbers[run.name] == 1 else replace(run, name=f"{run.name} #{numbers[run.name]}"))
    return apart


def _tell_apart(runs: Sequence[RunFacts], rename: Callable[[RunFacts], str]) -> list[RunFacts]:
    counts = Counter(run.name for run in runs)
    return [run if counts[run.name] == 1 else replace(run, name=rename(run)) for run in runs]


def _explain_left_out(left_out: Sequence[str]) -> str:
    if not left_out:
        return ""
    return f"No run recorded: {', '.join(left_out)}. MFU, VRAM and GPU utilisation are told by runs on a GPU."


def _explain_best(figures: Sequence[Figure]) -> str:
    has_tasks = any(figure.intervals for figure in figures)
    if any(figure.best for figure in figures):
        told = _BEST + (_BEST_TASKS if has_tasks else "")
    else:
        told = "No run is marked as the best: none of these figures compare, or they are alike."
    return told + (_INTERVALS if any(any(figure.intervals) for figure in figures) else "")


def _count(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs compared"
