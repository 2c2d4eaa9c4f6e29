"""Caveats of a comparison: what differs between runs, and which metrics that makes incomparable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

from launcher.analysis.compare.config_diff import clean_text
from launcher.analysis.compare.load_run import Judged, RunFacts
from launcher.analysis.compare.model import Aspect, Caution
from launcher.analysis.compare.summary_metrics import (
    EVAL_LOSS,
    TRAIN_LOSS,
    MetricSpec,
    find_speed_change,
    round_finite,
)
from launcher.analysis.compare.tasks import choose_evaluations, do_limits_matter, list_main_checks
from launcher.base_models.catalogue import TINY_BASE_NAME
from launcher.core import metrics
from launcher.core.metrics import EVAL_PREFIX, STEP_SECONDS, TOTAL_SECONDS
from launcher.core.units import format_count
from launcher.runs.calibration_store import MIN_STEPS

_MAX_NAMES = 4  # more runs are counted
_KEY_DIGITS = 12  # of a data key

Label = Callable[[RunFacts], str | None]  # None: unknown, or nothing to say


def group_by_data(runs: Sequence[RunFacts]) -> tuple[str | None, ...]:
    """Return a letter for each run, equal for runs trained on the same data; None for a run whose data are unknown."""
    keys = list(dict.fromkeys(run.traits.data_key for run in runs if run.traits.data_key is not None))
    return tuple(None if run.traits.data_key is None else _letters(keys.index(run.traits.data_key)) for run in runs)


def _letters(number: int) -> str:
    # A to Z, AA, AB, …
    above, last = divmod(number, 26)
    return (_letters(above - 1) if above else "") + chr(ord("A") + last)


def collect_cautions(runs: Sequence[RunFacts]) -> tuple[Caution, ...]:
    """Return all caveats, warnings first."""
    cautions = [caution for check in _CHECKS for caution in check(runs)]
    return tuple(sorted(cautions, key=lambda caution: caution.level == "note"))


def name_runs(runs: Sequence[RunFacts]) -> str:
    """Return the names of runs, comma-separated; of more than five runs, the first four and how many more there are."""
    names = [run.name for run in runs]
    if len(names) <= _MAX_NAMES + 1:
        return ", ".join(names)
    return f"{', '.join(names[:_MAX_NAMES])} and {len(names) - _MAX_NAMES} more"


def _check_data(runs: Sequence[RunFacts]) -> Iterator[Caution]:
    groups: dict[str, list[RunFacts]] = {}
    for run, letter in zip(runs, group_by_data(runs), strict=True):
        if letter is not None:
            groups.setdefault(letter, []).append(run)
    if len(groups) > 1:
        parts = [
            f"{letter}: {name_runs(group)} (data key {str(group[0].traits.data_key)[:_KEY_DIGITS]})"
            for letter, group in groups.items()
        ]
        yield Caution(
            level="warning",
            title="The runs were trained on different data",
            spoils=("loss", "validation loss"),
            detail=f"{'; '.join(parts)}. Losses are comparable within a group only: the data key covers rows, "
            "tokenizer, template, sequence length, packing and loss mask. Speed and memory are still comparable.",
        )


def _check_unknown_data(runs: Sequence[RunFacts]) -> Iterator[Caution]:
    unknown = [run for run in runs if run.traits.data_key is None and run.columns]
    if unknown and len(runs) > 1:
        yield Caution(
            level="warning",
            title="The training data of some runs are unknown",
            spoils=("loss", "validation loss"),
            detail=f"{name_runs(unknown)}: no data key was recorded, so losses may not be comparable.",
        )


def _get_checker(name: str, judged: Judged) -> str | None:
    return judged.checks[name].checker if name in judged.checks else None


def _check_evaluations(runs: Sequence[RunFacts]) -> Iterator[Caution]:
    """Yield a warning if the judges, the evaluated rows or the decoding of the runs' answers differ."""
    pick = choose_evaluations(runs)

    def flag(title: str, label: Callable[[Judged], str | None], consequence: str) -> Iterator[Caution]:
        def get_label(run: RunFacts) -> str | None:
            judged = pick(run)
            value = None if judged is None else label(judged)
            return None if value is None else clean_text(value)

        yield from _flag(clean_text(title), get_label, ("task metrics",), consequence)(runs)

    for name in list_main_checks(runs, pick):
        yield from flag(
            f"Answers were judged by different judges ({EVAL_PREFIX}{name})",
            partial(_get_checker, name),
            "Judges may disagree; launcher eval --run RUN judges the answers again.",
        )
    yield from flag(
        "Different rows were evaluated",
        lambda judged: judged.rows,
        "Some rows are harder than others; launcher eval --run RUN with the same --rows evaluates the same rows.",
    )
    yield from flag(
        "The decoding differs",
        lambda judged: "greedy" if judged.is_greedy else "sampled",
        "Sampled answers differ each time.",
    )
    if do_limits_matter(judged for run in runs if (judged := pick(run)) is not None):
        yield from flag(
            "The answers' length was limited differently",
            lambda judged: f"at most {judged.max_new_tokens:,} new tokens ({judged.num_cut:,} answers cut off)",
            "An answer that is cut off rarely passes; launcher eval --run RUN with the same --max-new-tokens is fair.",
        )


def _flag(
    title: str,
    label: Label,
    spoils: tuple[Aspect, ...],
    consequence: str,
    level: Literal["warning", "note"] = "warning",
    *,
    each: bool = False,
) -> Callable[[Sequence[RunFacts]], Iterator[Caution]]:
    """Return a check that yields a caveat if runs have different labels, or with `each`, if any run has a label."""

    def check(runs: Sequence[RunFacts]) -> Iterator[Caution]:
        groups: dict[str, list[RunFacts]] = {}
        for run in runs:
            if (value := label(run)) is not None:
                groups.setdefault(value, []).append(run)
        if each:
            parts = [f"{name_runs(group)}{f' ({value})' if value else ''}" for value, group in groups.items()]
        else:
            parts = [f"{value}: {name_runs(group)}" for value, group in groups.items()]
        if len(groups) > (0 if each else 1):
            yield Caution(level=level, title=title, spoils=spoils, detail=f"{'; '.join(parts)}. {consequence}")

    return check


def _format(value: object) -> str | None:
    return None if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _unfinished(run: RunFacts) -> str | None:
    if run.status == "done":
        return None
    total = "" if run.num_steps is None else f" of {run.num_steps:,}"
    return "not started" if run.status == "not started" else f"{run.status}, step {run.steps_done:,}{total}"


def _unrecorded_clock(run: RunFacts) -> str | None:
    is_estimated = not run.column(TOTAL_SECONDS).has_values and run.column(STEP_SECONDS).has_values
    return "" if is_estimated else None


def _diverged(spec: MetricSpec, metric: str) -> Label:
    """Return the label of runs whose final value of a loss is not a finite number."""

    def label(run: RunFacts) -> str | None:
        column = run.column(metric)
        if not column.values or round_finite(spec.compute(run)) is not None:
            return None
        known = column.by_step
        return f"the last finite one at step {max(known):,}" if known else "never finite"

    return label


def _count_steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count:,} steps"


def _changed_speed(run: RunFacts) -> str | None:
    change = find_speed_change(run)
    if change is None:
        return None
    before, after, step = change
    return f"{format_count(before)} to {format_count(after)} tokens per second at about step {step:,}"


_CHECKS: tuple[Callable[[Sequence[RunFacts]], Iterator[Caution]], ...] = (
    _check_data,
    _check_unknown_data,
    _check_evaluations,
    _flag(
        "Evaluations were left out",
        lambda run: run.left_out,
        (),
        "Other evaluations of these runs are compared, if there are any; launcher eval --run RUN makes a new one.",
        each=True,
    ),
    _flag(
        "Trained from random weights",
        lambda run: "" if run.traits.random_weights else None,
        ("loss", "validation loss"),
        "The base model has random weights: losses are meaningless, speed and memory are not.",
        each=True,
    ),
    _flag(
        "Smoke runs",
        lambda run: "" if run.traits.base == TINY_BASE_NAME else None,
        (),
        "A tiny base model on a small sample: the results say nothing about the full training.",
        "note",
        each=True,
    ),
    _flag(
        "The runs have different base models",
        lambda run: run.traits.base,
        ("loss", "validation loss", "speed", "memory"),
        "A lower loss may come from the base; tokens per second and memory depend on the model. MFU is comparable.",
    ),
    _flag(
        "The loss is computed on different tokens",
        lambda run: run.traits.loss_on,
        ("loss", "validation loss"),
        "A mean over completions is not comparable with a mean over all tokens.",
    ),
    _flag(
        "The global batch differs",
        lambda run: _format(run.traits.global_batch_size),
        ("loss by step",),
        "Steps differ in the amount of data: compare curves by tokens, not by step. Final losses are comparable.",
    ),
    _flag(
        "The sequence length differs",
        lambda run: _format(run.traits.sequence_length),
        ("loss", "speed", "memory"),
        "Longer sequences cost more per token, need more memory, and truncate fewer rows.",
    ),
    _flag(
        "The validation rows differ",
        lambda run: run.traits.held_out,
        ("validation loss",),
        "Validation losses are computed on different rows.",
    ),
    _flag(
        "The number of planned steps differs",
        lambda run: None if run.num_steps is None else _count_steps(run.num_steps),
        ("loss by step", "time"),
        "Learning rates differ at the same step: compare final losses only.",
    ),
    _flag(
        "The manifest names external code",
        lambda run: run.code,
        (),
        "It is executed only with --trust; comparing runs executes nothing.",
        "note",
        each=True,
    ),
    _flag(
        "The training loss at the end is not a number",
        _diverged(TRAIN_LOSS, metrics.TRAIN_LOSS),
        ("loss",),
        "These runs diverged, or their last steps were skipped.",
        each=True,
    ),
    _flag(
        "The validation loss at the end is not a number",
        _diverged(EVAL_LOSS, metrics.EVAL_LOSS),
        ("loss", "validation loss"),
        "These runs diverged.",
        each=True,
    ),
    _flag(
        "Not finished",
        _unfinished,
        ("loss", "validation loss", "time"),
        "Results cover the steps so far.",
        each=True,
    ),
    _flag(
        "CUDA out of memory during the run",
        lambda run: ", then ".join(run.oom_fallbacks) if run.oom_fallbacks else None,
        ("speed", "memory"),
        "Speed and memory mix the settings before and after the fallback; global batch and losses are not affected.",
        each=True,
    ),
    _flag(
        "The speed changed during the run",
        _changed_speed,
        ("speed", "time"),
        "Another program may have used the machine, or it was throttled. Speed, goodput and time of these runs "
        "are not compared.",
        each=True,
    ),
    _flag(
        "Too few steps to compare speeds",
        lambda run: _count_steps(run.steps_done) if 0 < run.steps_done < MIN_STEPS else None,
        ("speed", "time"),
        f"The first steps are slower than the others: train at least {MIN_STEPS} steps to compare speed.",
        each=True,
    ),
    _flag(
        "The seed differs",
        lambda run: None if run.traits.seed is None else str(run.traits.seed),
        (),
        "Runs with equal settings differ by chance between seeds: small differences of losses and answers prove "
        "nothing.",
        "note",
    ),
    _flag(
        "The precision differs",
        lambda run: run.traits.precision,
        ("speed", "memory"),
        "Speed and memory depend on it; losses differ by rounding and by quantization error.",
        "note",
    ),
    _flag(
        "The hardware differs",
        lambda run: run.traits.hardware,
        ("speed", "time"),
        "Tokens per second and wall-clock time depend on it. MFU and losses are comparable.",
        "note",
    ),
    _flag(
        "The prices are in different currencies",
        lambda run: None if run.traits.currency is None else run.traits.currency or "no currency given",
        ("time",),
        "Costs are shown without a currency and are not compared.",
    ),
    _flag(
        "The wall-clock axis is estimated",
        _unrecorded_clock,
        ("time",),
        "These runs did not record elapsed time: steps and evaluations are summed, without startup and checkpoints.",
        "note",
        each=True,
    ),
)
