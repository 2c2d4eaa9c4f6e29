"""Task metrics of runs side by side: which evaluation counts, what of it compares, and who is the best."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence

from launcher.compare.facts import RunFacts
from launcher.compare.judged import Judged, JudgedRun, guess_main
from launcher.compare.kinds import Kind
from launcher.compare.model import Chart, Interval
from launcher.compare.settings import clean_text
from launcher.metrics import EVAL_PREFIX, is_task_metric
from launcher.quality.gate import P_LIMIT
from launcher.quality.results import CheckResult
from launcher.quality.scores import Change, make_change

_ALIKE = 0.005  # of rates without rows to compare them by

Pick = Callable[[RunFacts], Judged | None]


def choose_evaluations(runs: Sequence[RunFacts]) -> Pick:
    """One kind for all runs: what `launcher eval` found, where all have that, unless only what was found while they
    trained is of the same rows."""
    told = [run.judged for run in runs if run.judged.trained is not None or run.judged.whole is not None]
    wholes = {None if one.whole is None else one.whole.rows for one in told}
    slices = {None if one.trained is None else one.trained.rows for one in told}
    if None not in wholes and (len(wholes) == 1 or len(slices - {None}) != 1 or None in slices):
        return lambda run: run.judged.whole
    return lambda run: run.judged.trained or run.judged.whole


def find_mains(runs: Sequence[RunFacts], pick: Pick) -> list[str]:
    """The checks that experts are measured by, each once."""
    known = dict.fromkeys(judged.main for run in runs if (judged := pick(run)) is not None)
    for run in runs:
        names = _told_names(run)
        if pick(run) is None and names and not known.keys() & set(names):
            known[guess_main(names) or names[-1]] = None
    return list(known)


def _told_names(run: RunFacts) -> list[str]:
    told = [name for name, column in run.columns.items() if is_task_metric(name) and column.tells]
    return [name.removeprefix(EVAL_PREFIX) for name in told]


def make_task_charts(runs: Sequence[RunFacts]) -> tuple[Chart, ...]:
    pick = choose_evaluations(runs)
    return tuple(_make_chart(name, runs, pick) for name in find_mains(runs, pick))


def _make_chart(name: str, runs: Sequence[RunFacts], pick: Pick) -> Chart:
    words = next((check.title for run in runs if (check := _find_check(pick(run), name)) is not None), "")
    metric = f"{EVAL_PREFIX}{name}"
    title = clean_text(f"{words} ({metric})" if words else f"task metric {metric}")
    return Chart(metric=metric, title=title, unit="share", better="higher", is_sparse=True)


def make_task_kinds(runs: Sequence[RunFacts]) -> Iterator[Kind]:
    """The main checks first, each with the base and what was gained over it; then the others in their judges' order."""
    pick = choose_evaluations(runs)
    mains = find_mains(runs, pick)
    for name in mains:
        yield _make_rate_kind(name, runs, pick, is_main=True)
        yield from _make_base_kinds(name)
    others = (name for run in runs for name in (*_judged_names(pick(run)), *_told_names(run)))
    for name in dict.fromkeys(others):
        if name not in mains:
            yield _make_rate_kind(name, runs, pick, is_main=False)


def _judged_names(judged: Judged | None) -> tuple[str, ...]:
    return () if judged is None else tuple(judged.checks)


def _find_check(judged: Judged | None, name: str) -> CheckResult | None:
    check = None if judged is None else judged.checks.get(name)
    return check if check is not None and check.num_judged else None


def _make_rate_kind(name: str, runs: Sequence[RunFacts], pick: Pick, *, is_main: bool) -> Kind:
    metric = f"{EVAL_PREFIX}{name}"

    def compute(run: RunFacts) -> float | None:
        check = _find_check(pick(run), name)
        if pick(run) is None:
            return run.last(metric)
        return None if check is None else check.rate

    def peers(run: RunFacts) -> Hashable:
        """The same rows, judged by the same; of runs that do not tell, the same data."""
        judged = pick(run)
        check = _find_check(judged, name)
        if run.traits.random_weights:
            return None
        if judged is None or check is None:
            return run.traits.data_key
        return (judged.rows, check.checker, judged.is_greedy)

    def is_told_apart(best: RunFacts, other: RunFacts) -> bool:
        one, two = pick(best), pick(other)
        if one is None or two is None:
            return abs((compute(best) or 0.0) - (compute(other) or 0.0)) > _ALIKE
        return _compare(one, two, name).p_worse < P_LIMIT

    found = [check for run in runs if (check := _find_check(pick(run), name)) is not None]
    checkers = dict.fromkeys(check.checker for check in found)
    notes = ["what the expert is measured by" if is_main else "", *dict.fromkeys(check.title for check in found)]
    notes += [f"judged by {next(iter(checkers))}"] if len(checkers) == 1 else []
    return Kind(
        key=clean_text(f"task_{name}"),
        title=clean_text(metric),
        compute=compute,
        peers=peers,
        unit="share",
        better="higher",
        note=clean_text("; ".join(filter(None, notes))),
        reach=lambda run: _find_reach(pick(run), name),
        is_told_apart=is_told_apart,
    )


def _make_base_kinds(name: str) -> Iterator[Kind]:
    metric = f"{EVAL_PREFIX}{name}"

    def compute_base(run: RunFacts) -> float | None:
        if run.judged == JudgedRun():
            column = run.column(metric)
            return next((rate for step, rate in zip(column.steps, column.values, strict=True) if step == 0), None)
        check = _find_check(run.judged.base, name)
        return None if check is None else check.rate

    def gain(run: RunFacts) -> Change | None:
        base, trained = run.judged.base, run.judged.trained
        if base is None or trained is None or _find_check(base, name) is None or _find_check(trained, name) is None:
            return None
        change = _compare(base, trained, name)
        return change if change.num_rows else None

    def compute_gain(run: RunFacts) -> float | None:
        if run.judged == JudgedRun():
            base, last = compute_base(run), run.last(metric)
            return None if base is None or last is None else last - base
        change = gain(run)
        return None if change is None else change.difference

    def reach_of_gain(run: RunFacts) -> Interval | None:
        change = gain(run)
        return None if change is None else Interval(low=change.low, high=change.high, num_rows=change.num_rows)

    yield Kind(
        key=clean_text(f"task_base_{name}"),
        title=clean_text(f"{metric}, base"),
        compute=compute_base,
        peers=lambda _run: None,
        unit="share",
        note="before the first step, on the rows that were asked while it trained",
        reach=lambda run: _find_reach(run.judged.base, name),
    )
    yield Kind(
        key=clean_text(f"task_gain_{name}"),
        title=clean_text(f"{metric}, gained"),
        compute=compute_gain,
        peers=lambda _run: None,
        unit="points",
        better="higher",
        note="over the base, on the same rows while it trained",
        reach=reach_of_gain,
    )


def _find_reach(judged: Judged | None, name: str) -> Interval | None:
    check = _find_check(judged, name)
    return None if check is None else Interval(low=check.low, high=check.high, num_rows=check.num_judged)


def _compare(before: Judged, now: Judged, name: str) -> Change:
    shared = [key for key in before.verdicts if key in now.verdicts]
    return make_change(*([judged.verdicts[key].get(name) for key in shared] for judged in (before, now)))
