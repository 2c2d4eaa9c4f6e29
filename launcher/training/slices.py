"""How many answers a training can afford, of how many tokens, and when: decided once, and kept for the run's life."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from pathlib import Path

from pydantic import ValidationError

from launcher.paths import write_text_atomically
from launcher.values import Frozen

_SIZES = (1.0, 0.5, 0.25, 0.125)  # of the most rows
_FEWEST = 8
_LONGEST_ANSWER = 512
_ROOM = 1.25  # an answer may be longer than the longest reference, and no more: a loop would go on for ever


class TaskSlice(Frozen):
    num_rows: int
    max_new_tokens: int
    only_ends: bool  # before the first step and after the last one, not in between
    why: str  # for people


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Of generating, with a full batch on every rank, and of judging."""

    first_token_seconds: float  # reads the prompts
    token_seconds: float
    rows_at_once: int  # over all ranks
    judge_seconds: float = 0.0  # until a judge is ready
    row_seconds: float = 0.0  # to judge an answer

    def predict(self, num_rows: int, num_tokens: int) -> float:
        batch = self.first_token_seconds + num_tokens * self.token_seconds
        return ceil(num_rows / self.rows_at_once) * batch + self.judge_seconds + num_rows * self.row_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowance:
    training_seconds: float
    share: float
    num_evaluations: int  # with that of the base

    @property
    def seconds(self) -> float:
        return self.training_seconds * self.share


def bound_answer(longest_reference: int) -> int:
    return min(_LONGEST_ANSWER, ceil(_ROOM * longest_reference) + 8)


def choose_slice(most_rows: int, max_new_tokens: int, pace: Pace, allowance: Allowance) -> TaskSlice | None:
    """The most rows at every evaluation; then at both ends only; None: not even that."""
    sizes = [max(_FEWEST, int(most_rows * size)) for size in _SIZES]
    for only_ends in (False, True):
        times = 2 if only_ends else allowance.num_evaluations
        for rows in dict.fromkeys(min(most_rows, size) for size in sizes):
            seconds = times * pace.predict(rows, max_new_tokens)
            if seconds <= allowance.seconds:
                why = f"{times} x {rows} answers take at most {seconds:.0f} s of {allowance.training_seconds:.0f} s"
                return TaskSlice(num_rows=rows, max_new_tokens=max_new_tokens, only_ends=only_ends, why=why)
    return None


def load_slice(file: Path) -> TaskSlice | None:
    try:
        return TaskSlice.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError):
        return None


def save_slice(file: Path, chosen: TaskSlice) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(file, chosen.model_dump_json(indent=1) + "\n")
