"""Choose how many validation rows the model answers at each evaluation, within a share of the training time."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from pathlib import Path

from launcher.core.frozen_model import Frozen
from launcher.core.run_files import load_model_or_none
from launcher.core.run_paths import write_text_atomically
from launcher.training.inference.answer_length import DEFAULT_NEW_TOKENS, allow_longer

_FRACTIONS = (1.0, 0.5, 0.25, 0.125)  # of the available rows
_MIN_ROWS = 8


class TaskSlice(Frozen):
    """How many validation rows are answered at which evaluations of a run; saved as evaluations/slice.json."""

    num_rows: int
    max_new_tokens: int
    only_ends: bool  # evaluate only before the first and after the last step
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationSpeed:
    """Measured time of generation with a full batch on every rank, and of judging."""

    first_token_seconds: float  # prefill
    token_seconds: float
    rows_at_once: int  # over all ranks
    judge_seconds: float = 0.0  # to start the judge
    row_seconds: float = 0.0  # to judge an answer

    def predict(self, num_rows: int, num_tokens: int) -> float:
        """Return the seconds that generating and judging `num_rows` answers of `num_tokens` tokens takes."""
        batch = self.first_token_seconds + num_tokens * self.token_seconds
        return ceil(num_rows / self.rows_at_once) * batch + self.judge_seconds + num_rows * self.row_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeBudget:
    """The share of the training time that all evaluations together may take."""

    training_seconds: float
    share: float
    num_evaluations: int  # including the one before step 1

    @property
    def seconds(self) -> float:
        """Allowed seconds for all evaluations."""
        return self.training_seconds * self.share


def limit_new_tokens(longest_reference: int) -> int:
    """Return how many tokens an answer may have during training: at most 512, which keeps evaluations short."""
    return min(DEFAULT_NEW_TOKENS, allow_longer(longest_reference))


def choose_slice(max_rows: int, max_new_tokens: int, speed: GenerationSpeed, budget: TimeBudget) -> TaskSlice | None:
    """Return the most rows that fit the budget at all evaluations, else at the first and last; None if none fit."""
    sizes = [max(_MIN_ROWS, int(max_rows * fraction)) for fraction in _FRACTIONS]
    for only_ends in (False, True):
        times = 2 if only_ends else budget.num_evaluations
        for rows in dict.fromkeys(min(max_rows, size) for size in sizes):
            seconds = times * speed.predict(rows, max_new_tokens)
            if seconds <= budget.seconds:
                reason = (
                    f"{times} x {rows} answers take at most {seconds:.0f} s, and the training about "
                    f"{budget.training_seconds:.0f} s"
                )
                return TaskSlice(num_rows=rows, max_new_tokens=max_new_tokens, only_ends=only_ends, why=reason)
    return None


def load_slice(file: Path) -> TaskSlice | None:
    """Load the slice that an earlier attempt of this run chose; None if there is none."""
    return load_model_or_none(TaskSlice, file)


def save_slice(file: Path, task_slice: TaskSlice) -> None:
    """Save the slice for later attempts of this run."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(file, task_slice.model_dump_json(indent=1) + "\n")
