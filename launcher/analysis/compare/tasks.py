"""Comparison of task metrics: which evaluation to use, which runs are comparable, and which is best."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from launcher.analysis.compare.config_diff import clean_text
from launcher.analysis.compare.load_run import Judged, RunFacts
from launcher.analysis.compare.model import Chart, Interval
from launcher.analysis.compare.summary_metrics import MetricSpec
from launcher.core.metrics import EVAL_PREFIX
from launcher.judges.gate import SIGNIFICANCE_LEVEL
from launcher.judges.results import CheckResult
from launcher.judges.statistics import PairedChange, compare_paired

Pick = Callable[[RunFacts], Judged | None]


def choose_evaluations(runs: Sequence[RunFacts]) -> Pick:
    """Return a function that picks which evaluation of a run to compare: if possible, the same kind for all runs.

    It picks that of `launcher eval` if all runs have one, unless only the evaluations during training are on the same
    rows in all runs.
    """
    judged_runs = [run.judged for run in runs if run.judged.trained is not None or run.judged.full_eval is not None]
    full_rows = {None if judged.full_eval is None else judged.full_eval.rows for judged in judged_runs}
    training_rows = {None if judged.trained is None else judged.trained.rows for judged in judged_runs}
    if None not in full_rows and (len(full_rows) == 1 or len(training_rows - {None}) != 1 or None in training_rows):
        return lambda run: run.judged.full_eval
    return lambda run: run.judged.trained or run.judged.full_eval


def do_limits_matter(evaluations: Iterable[Judged]) -> bool:
    """Return whether a limit of new tokens that is lower than that of another evaluation cut off any answer."""
    known = list(evaluations)
    longest = max((judged.max_new_tokens for judged in known), default=0)
    return any(judged.num_cut and judged.max_new_tokens < longest for judged in known)


def list_main_checks(runs: Sequence[RunFacts], pick: Pick) -> list[str]:
    """Return the names of all runs' main checks (which decide whether an answer is correct), without duplicates."""
    return [*dict.fromkeys(judged.main for run in runs if (judged := pick(run)) is not None)]


def make_task_charts(runs: Sequence[RunFacts]) -> tuple[Chart, ...]:
    """Make a chart for each check that decides whether an answer is correct."""
    pick = choose_evaluations(runs)
    return tuple(_make_chart(name, runs, pick) for name in list_main_checks(runs, pick))


def _make_chart(name: str, runs: Sequence[RunFacts], pick: Pick) -> Chart:
    check_title = next((check.title for run in runs if (check := _find_check(pick(run), name)) is not None), "")
    metric = f"{EVAL_PREFIX}{name}"
    title = clean_text(f"{check_title} ({metric})" if check_title else f"task metric {metric}")
    return Chart(
        metric=metric, title=title, unit="share", better="higher", is_sparse=True, figure=clean_text(f"task_{name}")
    )


def make_task_specs(runs: Sequence[RunFacts]) -> Iterator[MetricSpec]:
    """Yield specs of each main check's rate, the base model's rate and the gain over it; then of other checks."""
    pick = choose_evaluations(runs)
    mains = list_main_checks(runs, pick)
    for name in mains:
        yield _make_rate_spec(name, runs, pick, is_main=True)
        yield from _make_base_specs(name)
    others = (name for run in runs if (judged := pick(run)) is not None for name in judged.checks)
    for name in dict.fromkeys(others):
        if name not in mains:
            yield _make_rate_spec(name, runs, pick, is_main=False)


def _find_check(judged: Judged | None, name: str) -> CheckResult | None:
    check = None if judged is None else judged.checks.get(name)
    return check if check is not None and check.num_judged else None


def _make_rate_spec(name: str, runs: Sequence[RunFacts], pick: Pick, *, is_main: bool) -> MetricSpec:
    matters = do_limits_matter(judged for run in runs if (judged := pick(run)) is not None)

    def peers(run: RunFacts) -> Hashable:
        # Comparable: same rows, judge, decoding and, if it cut off answers, limit of their length.
        judged = pick(run)
        check = _find_check(judged, name)
        if run.traits.random_weights or judged is None or check is None:
            return None
        return (judged.rows, check.checker, judged.is_greedy, judged.max_new_tokens if matters else None)

    def is_significant(best: RunFacts, other: RunFacts) -> bool:
        best_judged, other_judged = pick(best), pick(other)
        assert best_judged is not None, "runs without an evaluation have no value"
        assert other_judged is not None
        return compare_answers(best_judged, other_judged, name).p_worse < SIGNIFICANCE_LEVEL

    checks = [check for run in runs if (check := _find_check(pick(run), name)) is not None]
    checkers = dict.fromkeys(check.checker for check in checks)
    notes = ["main check" if is_main else "", *dict.fromkeys(check.title for check in checks)]
    notes += [f"judged by {next(iter(checkers))}"] if len(checkers) == 1 else []
    return MetricSpec(
        key=clean_text(f"task_{name}"),
        title=clean_text(f"{EVAL_PREFIX}{name}"),
        compute=lambda run: _get_rate(pick(run), name),
        peers=peers,
        unit="share",
        better="higher",
        note=clean_text("; ".join(filter(None, notes))),
        interval=lambda run: _get_interval(pick(run), name),
        is_significant=is_significant,
    )


def _make_base_specs(name: str) -> Iterator[MetricSpec]:
    def gain(run: RunFacts) -> PairedChange | None:
        base, trained = run.judged.base, run.judged.trained
        if base is None or trained is None or _find_check(base, name) is None or _find_check(trained, name) is None:
            return None
        change = compare_answers(base, trained, name)
        return change if change.num_rows else None

    def compute_gain_interval(run: RunFacts) -> Interval | None:
        change = gain(run)
        return None if change is None else Interval(low=change.low, high=change.high, num_rows=change.num_rows)

    yield MetricSpec(
        key=clean_text(f"task_base_{name}"),
        title=clean_text(f"{EVAL_PREFIX}{name}, base"),
        compute=lambda run: _get_rate(run.judged.base, name),
        peers=lambda _run: None,
        unit="share",
        note="before the first step, on the rows evaluated during training",
        interval=lambda run: _get_interval(run.judged.base, name),
    )
    yield MetricSpec(
        key=clean_text(f"task_gain_{name}"),
        title=clean_text(f"{EVAL_PREFIX}{name}, gain"),
        compute=lambda run: None if (change := gain(run)) is None else change.difference,
        peers=lambda _run: None,
        unit="points",
        better="higher",
        note="over the base model, on the rows evaluated during training",
        interval=compute_gain_interval,
    )


def _get_rate(judged: Judged | None, name: str) -> float | None:
    check = _find_check(judged, name)
    return None if check is None else check.rate


def _get_interval(judged: Judged | None, name: str) -> Interval | None:
    check = _find_check(judged, name)
    return None if check is None else Interval(low=check.low, high=check.high, num_rows=check.num_judged)


def compare_answers(before: Judged, now: Judged, name: str) -> PairedChange:
    """Compare the results of one check in two evaluations, on the rows that both have."""
    shared = [key for key in before.verdicts if key in now.verdicts]
    return compare_paired(*([judged.verdicts[key].get(name) for key in shared] for judged in (before, now)))
