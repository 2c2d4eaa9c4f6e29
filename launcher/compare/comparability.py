"""Where runs do not compare: what differs between them, which comparison that spoils, and which it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from launcher.compare.facts import RunFacts
from launcher.compare.model import Aspect, Caution
from launcher.compare.settings import clean_text
from launcher.compare.tasks import choose_evaluations, find_mains
from launcher.metrics import EVAL_PREFIX, STEP_SECONDS, TOTAL_SECONDS

_NAMED = 4  # runs, before the others are counted
_SHOWN_DIGITS = 12  # of a data key

Trait = Callable[[RunFacts], str | None]


def group_by_data(runs: Sequence[RunFacts]) -> tuple[str | None, ...]:
    """A letter for each data key, in order of appearance; None where a run's data are not known."""
    keys = list(dict.fromkeys(run.traits.data_key for run in runs if run.traits.data_key is not None))
    return tuple(None if run.traits.data_key is None else _letters(keys.index(run.traits.data_key)) for run in runs)


def _letters(number: int) -> str:
    """A to Z, AA, AB …"""
    above, last = divmod(number, 26)
    return (_letters(above - 1) if above else "") + chr(ord("A") + last)


def find_cautions(runs: Sequence[RunFacts]) -> tuple[Caution, ...]:
    """The gravest first."""
    found = [caution for check in _CHECKS for caution in check(runs)]
    return tuple(sorted(found, key=lambda caution: caution.level == "note"))


def name_runs(runs: Sequence[RunFacts]) -> str:
    names = [run.name for run in runs]
    if len(names) <= _NAMED + 1:
        return ", ".join(names)
    return f"{', '.join(names[:_NAMED])} and {len(names) - _NAMED} more"


def _check_data(runs: Sequence[RunFacts]) -> Iterator[Caution]:
    groups: dict[str, list[RunFacts]] = {}
    for run, letter in zip(runs, group_by_data(runs), strict=True):
        if letter is not None:
            groups.setdefault(letter, []).append(run)
    if len(groups) > 1:
        parts = [
            f"{letter}: {name_runs(group)} (data key {str(group[0].traits.data_key)[:_SHOWN_DIGITS]})"
            for letter, group in groups.items()
        ]
        yield Caution(
            level="warning",
            title="The runs were trained on different data",
            spoils=("loss", "held-out loss"),
            detail=f"{'; '.join(parts)}. Losses compare inside a group only: rows, tokenizer, template, sequence "
            "length, packing and what the loss is taken on all belong to the data key. Speed and memory still compare.",
        )


def _check_unknown_data(runs: Sequence[RunFacts]) -> Iterator[Caution]:
    unknown = [run for run in runs if run.traits.data_key is None and run.columns]
    if unknown and len(runs) > 1:
        yield Caution(
            level="warning",
            title="Of some runs it is not known what they were trained on",
            spoils=("loss", "held-out loss"),
            detail=f"{name_runs(unknown)}: no data key was recorded, so nobody can tell whether losses compare.",
        )


def _check_judges(runs: Sequence[RunFacts]) -> Iterator[Caution]:
    pick = choose_evaluations(runs)
    for name in find_mains(runs, pick):

        def find_checker(run: RunFacts, name: str = name) -> str | None:
            judged = pick(run)
            check = None if judged is None else judged.checks.get(name)
            return None if check is None else clean_text(check.checker)

        yield from _differ(
            clean_text(f"Answers were judged by different checkers ({EVAL_PREFIX}{name})"),
            find_checker,
            ("task metrics",),
            "What one calls right another may not; launcher eval --run RUN judges anew.",
        )(runs)


def _check_judged_rows(runs: Sequence[RunFacts]) -> Iterator[Caution]:
    pick = choose_evaluations(runs)
    yield from _differ(
        "The answers are to different rows",
        lambda run: None if (judged := pick(run)) is None else clean_text(judged.rows),
        ("task metrics",),
        "Some rows are harder than others; launcher eval --run RUN with the same --rows asks all of them the same.",
    )(runs)


def _check_decoding(runs: Sequence[RunFacts]) -> Iterator[Caution]:
    pick = choose_evaluations(runs)
    words = {True: "greedy", False: "sampled"}
    yield from _differ(
        "The answers were generated otherwise",
        lambda run: None if (judged := pick(run)) is None else words[judged.is_greedy],
        ("task metrics",),
        "Sampled answers are another draw each time.",
    )(runs)


def _check_unknown_judges(runs: Sequence[RunFacts]) -> Iterator[Caution]:
    pick = choose_evaluations(runs)
    told = [run for run in runs if pick(run) is not None or find_mains([run], pick)]
    unknown = [run for run in told if pick(run) is None]
    if unknown and len(told) > 1:
        yield Caution(
            level="warning",
            title="Of some runs it is not known who judged their answers, and to which rows",
            spoils=("task metrics",),
            detail=f"{name_runs(unknown)}: only the rates were recorded. Our run directories keep every answer.",
        )


def _group(runs: Sequence[RunFacts], words: Callable[[RunFacts], str | None]) -> dict[str, list[RunFacts]]:
    """Runs of which the same is to be said; those of which nothing is are left out."""
    groups: dict[str, list[RunFacts]] = {}
    for run in runs:
        if (said := words(run)) is not None:
            groups.setdefault(said, []).append(run)
    return groups


def _differ(
    title: str,
    trait: Trait,
    spoils: tuple[Aspect, ...],
    consequence: str,
    level: Literal["warning", "note"] = "warning",
) -> Callable[[Sequence[RunFacts]], Iterator[Caution]]:
    """A check of one trait: runs whose value is not known are left out."""

    def check(runs: Sequence[RunFacts]) -> Iterator[Caution]:
        groups = _group(runs, trait)
        if len(groups) > 1:
            parts = "; ".join(f"{value}: {name_runs(group)}" for value, group in groups.items())
            yield Caution(level=level, title=title, spoils=spoils, detail=f"{parts}. {consequence}")

    return check


def _tell(
    title: str,
    applies: Callable[[RunFacts], str | None],
    spoils: tuple[Aspect, ...],
    consequence: str,
    level: Literal["warning", "note"] = "warning",
) -> Callable[[Sequence[RunFacts]], Iterator[Caution]]:
    """A check of each run for itself; `applies` gives the words, or None."""

    def check(runs: Sequence[RunFacts]) -> Iterator[Caution]:
        groups = _group(runs, applies)
        if groups:
            parts = "; ".join(f"{name_runs(group)}{f' ({words})' if words else ''}" for words, group in groups.items())
            yield Caution(level=level, title=title, spoils=spoils, detail=f"{parts}. {consequence}")

    return check


def _write(value: object) -> str | None:
    return None if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _unfinished(run: RunFacts) -> str | None:
    if run.status == "done":
        return None
    total = "" if run.num_steps is None else f" of {run.num_steps:,}"
    return "not started" if run.status == "not started" else f"{run.status}, step {run.steps_done:,}{total}"


def _planned_steps(run: RunFacts) -> str | None:
    return None if run.num_steps is None else f"{run.num_steps:,} steps"


def _unrecorded_clock(run: RunFacts) -> str | None:
    is_added_up = not run.column(TOTAL_SECONDS).tells and run.column(STEP_SECONDS).tells
    return "" if is_added_up else None


_CHECKS: tuple[Callable[[Sequence[RunFacts]], Iterator[Caution]], ...] = (
    _check_data,
    _check_unknown_data,
    _check_judges,
    _check_judged_rows,
    _check_decoding,
    _check_unknown_judges,
    _tell(
        "Trained from random weights",
        lambda run: "" if run.traits.random_weights else None,
        ("loss", "held-out loss"),
        "The base had its shape but not its weights: losses say nothing, speed and memory do.",
    ),
    _differ(
        "The runs have different base models",
        lambda run: run.traits.base,
        ("loss", "held-out loss", "speed", "memory"),
        "A lower loss may be the base's doing; tokens a second and memory are those of another model. MFU compares.",
    ),
    _differ(
        "The loss is taken on different tokens",
        lambda run: run.traits.loss_on,
        ("loss", "held-out loss"),
        "A mean over the answers is another figure than a mean over all tokens.",
    ),
    _differ(
        "The global batch differs",
        lambda run: _write(run.traits.global_batch_size),
        ("loss by step",),
        "A step is not the same amount of data: compare the curves by tokens, not by step. Final losses compare.",
    ),
    _differ(
        "The sequence length differs",
        lambda run: _write(run.traits.sequence_length),
        ("loss", "speed", "memory"),
        "Longer rows cost more a token, take more memory, and are cut elsewhere.",
    ),
    _differ(
        "The held-out data differ",
        lambda run: run.traits.held_out,
        ("held-out loss",),
        "Held-out losses are of different rows.",
    ),
    _differ(
        "The number of planned steps differs",
        _planned_steps,
        ("loss by step", "time"),
        "The learning rate falls at another pace, so losses at the same step stand at different points of the "
        "schedule: compare the ends.",
    ),
    _tell(
        "Not finished",
        _unfinished,
        ("loss", "held-out loss", "time"),
        "Final figures are those of the steps so far.",
    ),
    _tell(
        "Memory ran out on the way",
        lambda run: ", then ".join(run.rungs) if run.rungs else None,
        ("speed", "memory"),
        "Speed and memory are of two ways to run; the global batch, and so the losses, stayed the same.",
    ),
    _differ(
        "The precision differs",
        lambda run: run.traits.precision,
        ("speed", "memory"),
        "Speed and memory are of other arithmetic; losses differ by rounding, and by what a quantised base has lost.",
        "note",
    ),
    _differ(
        "The hardware differs",
        lambda run: run.traits.hardware,
        ("speed", "time"),
        "Tokens a second and wall-clock time are of different machines. MFU and the losses compare.",
        "note",
    ),
    _tell(
        "The wall-clock axis is added up",
        _unrecorded_clock,
        ("time",),
        "These runs recorded no clock: their axis counts steps and evaluations, without start and checkpoints.",
        "note",
    ),
)
