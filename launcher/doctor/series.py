"""Numbers of a run over its steps: medians, patterns and trends, without the steps that are never like the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from statistics import median

from launcher.metrics import STEP_SECONDS, TOKENS_PER_SECOND, StepMetrics, find_values
from launcher.record import RunRecord

# The first steps of a process compile, fill caches and raise clocks.
_WARM_UP, _WARM_UP_SHARE = 5, 4
ENOUGH_STEPS = 8  # to speak of a median
_MOST_STEPS = 2000  # of a long run, the last ones: what it does now, and found within a second
_SLOW = 1.5  # times the usual: a slow step
_REGULAR = 0.8  # of the steps that are due are slow, and of the slow ones due
_LEAST_REPEATS = 5
_SHORTEST_PERIOD = 2


def judged_steps(record: RunRecord) -> tuple[StepMetrics, ...]:
    """Without the first ones of each attempt; of a short run, fewer are left out."""
    steps = record.steps
    starts = {0, *(attempt.from_step for attempt in (record.outcome.attempts if record.outcome else ()))}
    warm_up = min(_WARM_UP, len(steps) // _WARM_UP_SHARE)
    cold = {start + offset for start in starts for offset in range(1, warm_up + 1)}
    return tuple(step for step in steps if step.step not in cold)


def recent_steps(record: RunRecord) -> tuple[StepMetrics, ...]:
    """Of the last attempt where it has enough: earlier ones may have run elsewhere, or otherwise."""
    steps = judged_steps(record)
    begun = record.outcome.attempts[-1].from_step if record.outcome and record.outcome.attempts else 0
    last = tuple(step for step in steps if step.step > begun)
    return (last if len(last) >= ENOUGH_STEPS else steps)[-_MOST_STEPS:]


def median_of(steps: Sequence[StepMetrics], name: str) -> float | None:
    values = find_values(steps, name)
    return median(values) if values else None


def usual_of(steps: Sequence[StepMetrics], name: str, *, is_low_good: bool) -> float | None:
    """What the better third reaches: where every second step is slow, the median would call that usual."""
    values = sorted(find_values(steps, name), reverse=not is_low_good)
    return values[len(values) // 3] if values else None


def find_slow_steps(steps: Sequence[StepMetrics], times: float = _SLOW) -> list[StepMetrics]:
    """Slow by the clock and by the token: a step that has more to do takes longer, and is not slow."""
    seconds = usual_of(steps, STEP_SECONDS, is_low_good=True)
    rate = usual_of(steps, TOKENS_PER_SECOND, is_low_good=False)
    if seconds is None or rate is None:
        return []

    def is_slow(step: StepMetrics) -> bool:
        took, reached = step.get(STEP_SECONDS), step.get(TOKENS_PER_SECOND)
        return took is not None and reached is not None and took > times * seconds and reached * times < rate

    return [step for step in steps if is_slow(step)]


def lost_share(steps: Sequence[StepMetrics], slow: Sequence[StepMetrics]) -> float:
    """Of all seconds of the steps, what the slow ones took longer than usual."""
    seconds = usual_of(steps, STEP_SECONDS, is_low_good=True)
    total = sum(find_values(steps, STEP_SECONDS))
    if not seconds or not total:
        return 0.0
    return sum(value - seconds for value in find_values(slow, STEP_SECONDS)) / total


def find_period(numbers: Sequence[int], slow: Collection[int]) -> int | None:
    """Every how many steps the slow ones come, seen five times; None where they come as they please."""
    if len(slow) < _LEAST_REPEATS:
        return None
    for period in range(_SHORTEST_PERIOD, len(numbers) // _LEAST_REPEATS + 1):
        phase, hits = Counter(number % period for number in slow).most_common(1)[0]
        if hits >= max(_LEAST_REPEATS, _REGULAR * len(slow)):
            num_due = sum(number % period == phase for number in numbers)
            if hits >= _REGULAR * num_due:
                return period
    return None


def parts_of(values: Sequence[float], count: int) -> list[list[float]]:
    """In order, as even as can be."""
    size = len(values) / count
    return [list(values[round(size * index) : round(size * (index + 1))]) for index in range(count)]


def compare_ends(values: Sequence[float], count: int, measure: Callable[[Sequence[float]], float] = median) -> float:
    """The last part over the first, as a ratio."""
    parts = parts_of(values, count)
    first, last = measure(parts[0]), measure(parts[-1])
    return last / first if first else 1.0
