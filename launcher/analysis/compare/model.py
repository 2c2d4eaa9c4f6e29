"""Data model of a comparison, which all output formats render."""

from __future__ import annotations

from typing import Literal

from launcher.core.frozen_model import Frozen
from launcher.runs.record import Status

MADE_BY: Literal["launcher compare"] = "launcher compare"

# What a difference between runs makes incomparable.
Aspect = Literal["loss", "loss by step", "validation loss", "task metrics", "speed", "memory", "time"]
VerdictAspect = Literal["answers", "validation loss", "training loss", "speed"]
RunStatus = Status | Literal["not started", "killed or elsewhere"]
Section = Literal["what is learnt", "how it runs", "where it runs", "versions"]


class Axis(Frozen):
    """X-axis values of a run: tokens seen and seconds elapsed at some steps; between them, interpolate linearly."""

    step: tuple[int, ...]
    tokens: tuple[float, ...] | None
    seconds: tuple[float, ...] | None


class Series(Frozen):
    """Curve of one metric of one run; in long runs each point is the mean, minimum and maximum of several steps."""

    metric: str
    step: tuple[int, ...]
    mean: tuple[float | None, ...]  # None: non-finite
    low: tuple[float | None, ...] | None  # None: not downsampled
    high: tuple[float | None, ...] | None


class Share(Frozen):
    """Time spent on one activity."""

    part: str
    seconds: float


class ComparedRun(Frozen):
    """One run of a comparison."""

    name: str
    place: str
    status: RunStatus
    expert: str | None
    base: str | None
    hardware: str | None
    started_at: str | None
    steps_done: int
    num_steps: int | None
    data_key: str | None
    data_group: str | None  # a letter; losses are comparable within a group; None: unknown data
    card: str | None  # the GPU's name
    card_gib: float | None
    predicted_gib: float | None
    axis: Axis
    series: tuple[Series, ...]
    shares: tuple[Share, ...]
    shares_are_recorded: bool  # False: sums of steps and evaluations, possibly incomplete
    judged_on: str | None = None  # evaluated rows; None: none, or unknown
    judged_by: str | None = None  # judge of the main check


class Chart(Frozen):
    """A chart of one metric."""

    metric: str
    title: str
    unit: str
    better: Literal["lower", "higher"] | None
    is_sparse: bool  # a few points, such as evaluations
    is_minor: bool = False  # drawn smaller: explains speed or memory, not the result
    is_log: bool = False  # falls so far that a linear axis shows a flat line
    figure: str | None = None  # key of the result that summarizes this curve


class Interval(Frozen):
    """95 % confidence interval of a result."""

    low: float
    high: float
    num_rows: int  # judged


class Figure(Frozen):
    """One summary metric, with its value for every run, in the order of the runs."""

    key: str
    title: str
    unit: str
    better: Literal["lower", "higher"] | None
    values: tuple[float | None, ...]
    intervals: tuple[Interval | None, ...] = ()  # like values; empty if not applicable
    best: dict[int, int]  # index of a best run -> number of comparable runs
    ties: tuple[int, ...] = ()  # indices of runs none of whose comparable runs is significantly worse
    note: str


class VerdictPart(Frozen):
    """How one run differs from another in one aspect."""

    aspect: VerdictAspect
    outcome: Literal["better", "worse", "tie", "not comparable"]
    text: str  # as in "answers tie (1 of 24 differs)"


class Verdict(Frozen):
    """Comparison of two runs: which one is better in which aspect, and which aspects are not comparable."""

    run: int  # index
    against: int
    parts: tuple[VerdictPart, ...]


class Setting(Frozen):
    """A setting that differs between runs."""

    section: Section
    key: str
    values: tuple[str | None, ...]  # None: this run does not have it


class Caution(Frozen):
    """A caveat: what differs between runs, and which metrics are affected."""

    level: Literal["warning", "note"]
    title: str
    spoils: tuple[Aspect, ...]
    detail: str


class Skipped(Frozen):
    """A run directory that cannot be loaded."""

    place: str
    why: str


class Comparison(Frozen):
    """Comparison of runs; schema_version changes if a field is removed or changes its meaning, not if one is added."""

    made_by: Literal["launcher compare"] = MADE_BY
    schema_version: Literal[2] = 2
    launcher_version: str
    made_at: str  # ISO 8601, UTC
    title: str
    runs: tuple[ComparedRun, ...]
    verdicts: tuple[Verdict, ...] = ()
    about_verdicts: str = ""
    cautions: tuple[Caution, ...]
    charts: tuple[Chart, ...]
    left_out: tuple[str, ...]  # titles of charts without data
    about_left_out: str  # empty if all charts have data
    figures: tuple[Figure, ...]
    about_best: str  # meaning of the mark of the best run
    settings: tuple[Setting, ...]
    num_equal_settings: int
    skipped: tuple[Skipped, ...]
