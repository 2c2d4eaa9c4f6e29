"""What was found of a run's answers: the base's, the adapter's on the same rows, and what `launcher eval` found."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from launcher.errors import InputError
from launcher.quality.results import EvalResult, compare_results, load_result
from launcher.quality.scores import Change
from launcher.record import RunRecord

_FILE = re.compile(r"step-(\d{1,12})\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    result: EvalResult
    step: int | None  # of the training that was interrupted for it; None: by `launcher eval`


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEvaluations:
    base: Evaluation | None = None  # before the first step
    trained: Evaluation | None = None  # the same rows, by what was trained
    whole: Evaluation | None = None  # by `launcher eval`: as many rows as somebody wanted to wait for
    kept_step: int = 0  # whose weights the adapter holds
    unreadable: tuple[str, ...] = ()  # files that are there and tell nothing
    is_outdated: bool = False  # `launcher eval` asked an earlier state of this run, which is left out

    @property
    def adapter(self) -> Evaluation | None:
        """The one with the most answers; of two alike, that which asked the adapter as it was saved."""
        found = [one for one in (self.whole, self.trained) if one is not None]
        return max(found, key=lambda one: len(one.result.answers), default=None)

    @property
    def gain(self) -> tuple[str, Change, tuple[str, ...]] | None:
        """Of which check, from the base to what was trained, row by row, and what spoils that. None: no row was judged
        both times."""
        for now in (self.trained, self.whole):
            if self.base is not None and now is not None:
                with suppress(InputError):
                    change, warnings = compare_results(self.base.result, now.result)
                    if change.num_rows:
                        return now.result.main_check, change, warnings
        return None


def load_evaluations(record: RunRecord) -> RunEvaluations:
    """Files that are missing, or not to be read, are no error: what they would have told is not told."""
    paths, unreadable = record.paths, list[str]()

    def load(file: Path) -> EvalResult | None:
        try:
            result = load_result(file)
            if any(check.name == result.main_check for check in result.checks):
                return result
        except InputError:
            if not file.exists():
                return None
        unreadable.append(str(file.relative_to(paths.root)))
        return None

    def load_step(step: int) -> Evaluation | None:
        result = load(paths.evaluation_at(step))
        return None if result is None else Evaluation(result=result, step=step)

    kept = find_kept_step(record)
    steps = order_steps(list(_find_steps(record)), kept)
    trained = next((found for step in steps if (found := load_step(step)) is not None), None)
    whole = load(paths.evaluation)
    is_outdated = whole is not None and _is_outdated(record, whole)
    return RunEvaluations(
        base=load_step(0),
        trained=trained,
        whole=None if whole is None or is_outdated else Evaluation(result=whole, step=None),
        kept_step=kept,
        unreadable=tuple(unreadable),
        is_outdated=is_outdated,
    )


def find_kept_step(record: RunRecord) -> int:
    """The best one where the run was to end with it, else the last."""
    outcome = record.outcome
    if outcome is not None and outcome.best_step is not None and record.plan.schedule.load_best_model_at_end:
        return outcome.best_step
    return record.steps[-1].step if record.steps else 0


def order_steps(steps: Sequence[int], kept: int) -> list[int]:
    """What tells of the adapter, the best first: the step that it holds, then the last ones."""
    return sorted(steps, key=lambda step: (step == kept, step), reverse=True)


def _find_steps(record: RunRecord) -> Iterator[int]:
    """Without those that are yet to be trained again: a run that was taken up from an earlier checkpoint."""
    last = max((row.step for row in record.rows), default=None)
    folder = record.paths.evaluations
    for file in folder.iterdir() if folder.is_dir() else ():
        match = _FILE.fullmatch(file.name)
        step = int(match[1]) if match else 0
        if step and (last is None or step <= last):
            yield step


def _is_outdated(record: RunRecord, result: EvalResult) -> bool:
    """Made before the run ended the last time: of weights that are no longer there."""
    ended = None if record.outcome is None else record.outcome.ended_at
    try:
        return ended is not None and datetime.fromisoformat(result.made_at) < datetime.fromisoformat(ended)
    except (ValueError, TypeError):
        return False
