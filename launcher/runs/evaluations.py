"""Task evaluations of a run: of the base model, of the adapter on the same rows, and by `launcher eval`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.core.errors import InputError
from launcher.core.run_paths import RunPaths
from launcher.judges.results import EvalResult, compare_results, load_result
from launcher.judges.statistics import PairedChange
from launcher.runs.record import Outcome, RunRecord, seconds_between

_FILE = re.compile(r"step-(\d{1,12})\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Answers with their judgements, and the training step that they were generated at."""

    result: EvalResult
    step: int | None  # of the training; None: by `launcher eval`


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEvaluations:
    """All evaluations of a run."""

    base: Evaluation | None = None  # before the first step
    trained: Evaluation | None = None  # the same rows, after training
    full_eval: Evaluation | None = None  # by `launcher eval`, usually on more rows
    kept_step: int = 0  # step whose weights the adapter has
    unreadable: tuple[str, ...] = ()  # existing files that cannot be used
    is_outdated: bool = False  # `launcher eval` judged an earlier state of this run, which is omitted

    @property
    def adapter(self) -> Evaluation | None:
        """The adapter's evaluation with the most answers, on a tie that by `launcher eval`; None if there is none."""
        evaluations = [evaluation for evaluation in (self.full_eval, self.trained) if evaluation is not None]
        return max(evaluations, key=lambda evaluation: len(evaluation.result.answers), default=None)

    @property
    def gain(self) -> tuple[str, PairedChange, tuple[str, ...]] | None:
        """Main check, its change from base to trained model on common rows, and caveats; None if not comparable."""
        for now in (self.trained, self.full_eval):
            if self.base is not None and now is not None:
                with suppress(InputError):
                    change, warnings = compare_results(self.base.result, now.result)
                    if change.num_rows:
                        return now.result.main_check, change, warnings
        return None


def load_evaluations(record: RunRecord) -> RunEvaluations:
    """Load all evaluations of a run; missing or unreadable files are skipped."""
    paths, unreadable = record.paths, list[str]()

    def load(file: Path) -> EvalResult | None:
        try:
            return load_result(file)
        except InputError:
            if file.exists():
                unreadable.append(str(file.relative_to(paths.root)))
            return None

    def load_step(step: int) -> Evaluation | None:
        result = load(paths.evaluation_at(step))
        return None if result is None else Evaluation(result=result, step=step)

    kept = find_kept_step(record)
    steps = order_steps(list(_find_steps(record)), kept)
    trained = next((loaded for step in steps if (loaded := load_step(step)) is not None), None)
    full = load(paths.evaluation)
    is_old = full is not None and is_outdated(record.outcome, full)
    return RunEvaluations(
        base=load_step(0),
        trained=trained,
        full_eval=None if full is None or is_old else Evaluation(result=full, step=None),
        kept_step=kept,
        unreadable=tuple(unreadable),
        is_outdated=is_old,
    )


def find_kept_step(record: RunRecord) -> int:
    """Return the step whose weights were saved: the best one if the plan loads it at the end, else the last."""
    outcome = record.outcome
    if outcome is not None and outcome.best_step is not None and record.plan.schedule.load_best_model_at_end:
        return outcome.best_step
    return record.steps[-1].step if record.steps else 0


def order_steps(steps: Sequence[int], kept: int) -> list[int]:
    """Sort steps: first `kept`, the step whose weights the adapter has, then the others from last to first."""
    return sorted(steps, key=lambda step: (step == kept, step), reverse=True)


def _find_steps(record: RunRecord) -> Iterator[int]:
    """Yield evaluated steps, except 0 and those after the last logged step, which a resumed run trains again."""
    last = max((row.step for row in record.rows), default=None)
    for step, _ in list_evaluations(record.paths):
        if step and (last is None or step <= last):
            yield step


def list_evaluations(paths: RunPaths) -> list[tuple[int, Path]]:
    """List the files of task evaluations with their steps."""
    files = paths.evaluations.iterdir() if paths.evaluations.is_dir() else ()
    return [(int(match[1]), file) for file in files if (match := _FILE.fullmatch(file.name))]


def is_outdated(outcome: Outcome | None, result: EvalResult) -> bool:
    """Return whether an evaluation was made before the run ended, with weights that may have been trained further."""
    ended = None if outcome is None else outcome.ended_at
    seconds = None if ended is None else seconds_between(ended, result.made_at)
    return seconds is not None and seconds < 0
