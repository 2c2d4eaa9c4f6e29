"""Statistics of a run's steps: medians, periodic slow steps and trends, without warm-up steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from statistics import median

from launcher.core.metrics import STEP_SECONDS, TOKENS_PER_SECOND, StepMetrics, find_values
from launcher.runs.record import RunRecord

# The first steps of a process compile, fill caches and raise clocks.
_WARM_UP, _WARM_UP_SHARE = 5, 4
ENOUGH_STEPS = 8  # enough for a median
_MAX_STEPS = 2000  # the last ones of a long run: recent, and fast to analyse
_SLOW = 1.5  # times the usual duration
_REGULAR = 0.8  # share of the due steps that are slow, and of the slow steps that are due
_MIN_REPEATS = 5
_MIN_PERIOD = 2


def select_warm_steps(record: RunRecord) -> tuple[StepMetrics, ...]:
    """Return the steps without the warm-up steps of each attempt; short runs have fewer of these."""
    steps = record.steps
    starts = {0, *(attempt.from_step for attempt in (record.outcome.attempts if record.outcome else ()))}
    warm_up = min(_WARM_UP, len(steps) // _WARM_UP_SHARE)
    cold = {start + offset for start in starts for offset in range(1, warm_up + 1)}
    return tuple(step for step in steps if step.step not in cold)


def select_recent_steps(record: RunRecord) -> tuple[StepMetrics, ...]:
    """Return the steps of the last attempt if it has enough; earlier ones may have run on other hardware."""
    steps = select_warm_steps(record)
    begun = record.outcome.attempts[-1].from_step if record.outcome and record.outcome.attempts else 0
    last = tuple(step for step in steps if step.step > begun)
    return (last if len(last) >= ENOUGH_STEPS else steps)[-_MAX_STEPS:]


def compute_median(steps: Sequence[StepMetrics], name: str) -> float | None:
    """Return the median of a metric, or None if it was not recorded."""
    values = find_values(steps, name)
    return median(values) if values else None


def compute_usual(steps: Sequence[StepMetrics], name: str, *, is_low_good: bool) -> float | None:
    """Return the value at the best third: if every second step is slow, the median would be too."""
    values = sorted(find_values(steps, name), reverse=not is_low_good)
    return values[len(values) // 3] if values else None


def find_slow_steps(steps: Sequence[StepMetrics], times: float = _SLOW) -> list[StepMetrics]:
    """Return steps that took long and had low tokens/s; a step that only has more tokens is not slow."""
    seconds = compute_usual(steps, STEP_SECONDS, is_low_good=True)
    rate = compute_usual(steps, TOKENS_PER_SECOND, is_low_good=False)
    if seconds is None or rate is None:
        return []

    def is_slow(step: StepMetrics) -> bool:
        took, reached = step.get(STEP_SECONDS), step.get(TOKENS_PER_SECOND)
        return took is not None and reached is not None and took > times * seconds and reached * times < rate

    return [step for step in steps if is_slow(step)]


def compute_lost_share(steps: Sequence[StepMetrics], slow: Sequence[StepMetrics]) -> float:
    """Return the share of the time that slow steps took longer than usual."""
    seconds = compute_usual(steps, STEP_SECONDS, is_low_good=True)
    total = sum(find_values(steps, STEP_SECONDS))
    if not seconds or not total:
        return 0.0
    return sum(value - seconds for value in find_values(slow, STEP_SECONDS)) / total


def find_period(numbers: Sequence[int], slow: Collection[int]) -> int | None:
    """Return the period of slow steps, if it was seen at least five times."""
    if len(slow) < _MIN_REPEATS:
        return None
    for period in range(_MIN_PERIOD, len(numbers) // _MIN_REPEATS + 1):
        phase, hits = Counter(number % period for number in slow).most_common(1)[0]
        if hits >= max(_MIN_REPEATS, _REGULAR * len(slow)):
            num_due = sum(number % period == phase for number in numbers)
            if hits >= _REGULAR * num_due:
                return period
    return None


def split_evenly(values: Sequence[float], count: int) -> list[list[float]]:
    """Split into consecutive parts of nearly equal size."""
    size = len(values) / count
    return [list(values[round(size * index) : round(size * (index + 1))]) for index in range(count)]


def compare_ends(values: Sequence[float], count: int, measure: Callable[[Sequence[float]], float] = median) -> float:
    """Return the ratio of the last part to the first."""
    parts = split_evenly(values, count)
    first, last = measure(parts[0]), measure(parts[-1])
    return last / first if first else 1.0
