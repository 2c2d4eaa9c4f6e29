"""One line per pair of runs: which answers better, which has the lower loss, which is faster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

from launcher.analysis.compare.comparability import collect_cautions
from launcher.analysis.compare.config_diff import clean_text
from launcher.analysis.compare.load_run import Judged, RunFacts
from launcher.analysis.compare.model import Comparison, Figure, Verdict, VerdictAspect, VerdictPart
from launcher.analysis.compare.summary_metrics import EVAL_LOSS, TOKENS_PER_SECOND, TRAIN_LOSS, MetricSpec, is_alike
from launcher.analysis.compare.tasks import Pick, compare_answers, do_limits_matter
from launcher.core.units import format_percent
from launcher.judges.gate import SIGNIFICANCE_LEVEL

_ALL_PAIRS = 5  # with more runs, each is compared with the leading one only


def make_verdicts(runs: Sequence[RunFacts], figures: Sequence[Figure], pick: Pick) -> tuple[tuple[Verdict, ...], str]:
    """Compare all pairs of up to five runs, or each of more runs with the best one, which the returned text names."""
    if len(runs) <= _ALL_PAIRS:
        pairs, about = [(later, earlier) for earlier, later in combinations(range(len(runs)), 2)], ""
    else:
        leader, why = _choose_leader(figures)
        pairs = [(index, leader) for index in range(len(runs)) if index != leader]
        about = f"Each run against {runs[leader].name}, {why}."
    verdicts = (
        Verdict(run=one, against=other, parts=tuple(_compare(runs[one], runs[other], pick))) for one, other in pairs
    )
    return tuple(verdict for verdict in verdicts if verdict.parts), about


def format_verdict(comparison: Comparison, verdict: Verdict) -> tuple[str, str]:
    """Return a verdict as two texts: the names of both runs, and the results of their comparison."""
    names = [comparison.runs[index].name for index in (verdict.run, verdict.against)]
    return " against ".join(names), f": {', '.join(part.text for part in verdict.parts)}"


def _choose_leader(figures: Sequence[Figure]) -> tuple[int, str]:
    for figure in figures:
        if figure.best:
            sign = -1 if figure.better == "higher" else 1
            leader = min(figure.best, key=lambda index: sign * (figure.values[index] or 0.0))
            return leader, f"the best by {figure.title}"
    return 0, "the first one"


def _compare(run: RunFacts, against: RunFacts, pick: Pick) -> Iterator[VerdictPart]:
    yield from _compare_answers(run, against, pick)
    blockers: dict[str, str] = {}
    for caution in collect_cautions((against, run)):
        if caution.level == "warning" or caution.title == "The hardware differs":
            for aspect in caution.spoils:
                blockers.setdefault(aspect, caution.title[0].lower() + caution.title[1:])
    has_held_out = all(EVAL_LOSS.compute(one) is not None for one in (run, against))
    if has_held_out:
        yield from _compare_values(EVAL_LOSS, run, against, "validation loss", blockers.get("validation loss", ""))
    else:
        yield from _compare_values(TRAIN_LOSS, run, against, "training loss", blockers.get("loss", ""))
    yield from _compare_values(TOKENS_PER_SECOND, run, against, "speed", blockers.get("speed", ""))


def _compare_answers(run: RunFacts, against: RunFacts, pick: Pick) -> Iterator[VerdictPart]:
    judged, other = pick(run), pick(against)
    if judged is None or other is None:
        missing = [one.name for one, result in ((run, judged), (against, other)) if result is None]
        if len(missing) == 1:
            yield _refuse("answers", f"{missing[0]} has none")
        return
    if why := _explain_different_evaluations(judged, other) or (
        "random weights" if run.traits.random_weights or against.traits.random_weights else ""
    ):
        yield _refuse("answers", why)
        return
    name = judged.main
    change, back = compare_answers(other, judged, name), compare_answers(judged, other, name)
    num_different = change.num_won + change.num_lost
    differ = f"{num_different} of {change.num_rows:,} {'differs' if num_different == 1 else 'differ'}"
    if min(change.p_worse, back.p_worse) >= SIGNIFICANCE_LEVEL:
        chance = ", may be chance" if num_different > 1 else ""
        yield VerdictPart(aspect="answers", outcome="tie", text=f"answers tie ({differ}{chance})")
        return
    rates = " against ".join(format_percent(result.checks[name].rate) for result in (judged, other))
    is_better = change.num_won > change.num_lost
    word = "better" if is_better else "worse"
    yield VerdictPart(
        aspect="answers", outcome="better" if is_better else "worse", text=f"answers {word} ({rates}, {differ})"
    )


def _explain_different_evaluations(one: Judged, other: Judged) -> str:
    if one.main != other.main:
        return clean_text(f"judged by {one.main} and {other.main}")
    if one.rows != other.rows:
        return "different rows"
    if one.checks[one.main].checker != other.checks[other.main].checker:
        return "different judges"
    if one.is_greedy != other.is_greedy:
        return "different decoding"
    if do_limits_matter((one, other)):
        return "different limits of the answers' length"
    return "" if all(result.checks[result.main].num_judged for result in (one, other)) else "no answer was judged"


def _compare_values(
    spec: MetricSpec, run: RunFacts, against: RunFacts, aspect: VerdictAspect, blocker: str
) -> Iterator[VerdictPart]:
    value, other = spec.compute(run), spec.compute(against)
    if value is None or other is None:
        return
    is_speed = aspect == "speed"
    if not (math.isfinite(value) and math.isfinite(other)) or (is_speed and min(value, other) <= 0):
        yield _refuse(aspect, blocker or "not a plausible number")
        return
    if blocker or spec.peers(run) is None or spec.peers(run) != spec.peers(against):
        yield _refuse(aspect, blocker or "the runs differ too much")
        return
    if is_alike(spec, value, other):
        yield VerdictPart(aspect=aspect, outcome="tie", text=f"{aspect} equal")
        return
    word = "higher" if value > other else "lower"
    by = f" by {abs(value / other - 1):.0%}".replace("%", " %") if is_speed else f" ({value:#.4g} against {other:#.4g})"
    yield VerdictPart(
        aspect=aspect, outcome="better" if (value > other) == is_speed else "worse", text=f"{aspect} {word}{by}"
    )


def _refuse(aspect: VerdictAspect, why: str) -> VerdictPart:
    return VerdictPart(aspect=aspect, outcome="not comparable", text=f"{aspect} not comparable ({why})")
