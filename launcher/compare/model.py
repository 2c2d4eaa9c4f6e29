"""A comparison as a value: what the page, the tables and `--format json` are made of."""

from __future__ import annotations

from typing import Literal

from launcher.record import Status
from launcher.values import Frozen

MADE_BY: Literal["launcher compare"] = "launcher compare"

# What a difference between runs spoils; what is not named still compares.
Aspect = Literal["loss", "loss by step", "held-out loss", "task metrics", "speed", "memory", "time"]
Section = Literal["what is learnt", "how it runs", "where it runs", "versions", "W&B config"]


class Axis(Frozen):
    """Where a run stood at some of its steps: tokens and seconds of the steps between lie on a straight line."""

    step: tuple[int, ...]
    tokens: tuple[float, ...] | None
    seconds: tuple[float, ...] | None


class Series(Frozen):
    """One metric of one run. Of a long one, each point stands for several steps: their mean, least and greatest."""

    metric: str
    step: tuple[int, ...]
    mean: tuple[float | None, ...]  # None: no number
    low: tuple[float | None, ...] | None  # None: every step is there
    high: tuple[float | None, ...] | None


class Share(Frozen):
    part: str
    seconds: float


class ComparedRun(Frozen):
    name: str
    place: str
    kind: Literal["launcher", "wandb"]
    status: Status | Literal["not started"]
    expert: str | None
    base: str | None
    hardware: str | None
    started_at: str | None
    steps_done: int
    num_steps: int | None
    data_key: str | None
    data_group: str | None  # a letter: losses compare inside a group; None: the data are not known
    card: str | None  # the GPU's name
    card_gib: float | None
    predicted_gib: float | None
    axis: Axis
    series: tuple[Series, ...]
    shares: tuple[Share, ...]
    shares_are_recorded: bool  # False: added up from the steps, so something may be missing
    judged_on: str | None = None  # the rows whose answers its task metrics are of; None: none, or not known
    judged_by: str | None = None  # who made the main check


class Chart(Frozen):
    metric: str
    title: str
    unit: str
    better: Literal["lower", "higher"] | None
    is_sparse: bool  # single points, not a curve: an evaluation now and then


class Interval(Frozen):
    """Where a figure lies with 95 %."""

    low: float
    high: float
    num_rows: int  # that were judged


class Figure(Frozen):
    """One final figure of every run, in the order of the runs."""

    key: str
    title: str
    unit: str
    better: Literal["lower", "higher"] | None
    values: tuple[float | None, ...]
    intervals: tuple[Interval | None, ...] = ()  # as the values; empty where this figure has none
    best: dict[int, int]  # index of a run -> of how many comparable runs it is the best
    note: str


class Setting(Frozen):
    section: Section
    key: str
    values: tuple[str | None, ...]  # None: this run does not have it


class Caution(Frozen):
    """Where runs are not comparable, and what still is."""

    level: Literal["warning", "note"]
    title: str
    spoils: tuple[Aspect, ...]
    detail: str


class Skipped(Frozen):
    place: str
    why: str


class Comparison(Frozen):
    """schema_version grows when a field changes its meaning or goes away; new fields may come without that."""

    made_by: Literal["launcher compare"] = MADE_BY
    schema_version: Literal[1] = 1
    launcher_version: str
    made_at: str  # ISO 8601, UTC
    title: str
    runs: tuple[ComparedRun, ...]
    cautions: tuple[Caution, ...]
    charts: tuple[Chart, ...]
    left_out: tuple[str, ...]  # titles of charts that no run has figures for
    about_left_out: str  # empty where nothing is left out
    figures: tuple[Figure, ...]
    about_best: str  # what a mark of the best means
    settings: tuple[Setting, ...]
    num_equal_settings: int
    skipped: tuple[Skipped, ...]
