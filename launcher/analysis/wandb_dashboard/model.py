"""Data model of a dashboard: sections of panels over metric names."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.runs.wandb_settings import STEP_AXIS


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """Line plot with one curve per run and metric."""

    title: str
    metrics: tuple[str, ...] = ()
    pattern: str | None = None  # instead of metrics: a regex for their names
    x: str = STEP_AXIS
    unit: str = ""
    smoothing: float = 0.0  # exponential, 0 to 1; the original curve stays visible
    has_log_scale: bool = False
    is_stacked: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """Bar chart of last values, one bar per run or group of runs."""

    title: str
    metrics: tuple[str, ...]
    unit: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """Panel with a single last value."""

    title: str
    metric: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparer:
    """Table of the settings and results that differ between runs."""

    title: str


Panel = Lines | Bars | Number | Comparer


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A titled grid of panels."""

    title: str
    panels: tuple[Panel, ...]
    columns: int = 3
    rows: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTable:
    """Table of runs next to the panels, grouped by config keys."""

    group_by: tuple[str, ...]  # keys of a run's config
    results: tuple[str, ...]  # columns: keys of a run's summary
    settings: tuple[str, ...]  # columns: keys of a run's config


@dataclass(frozen=True, kw_only=True, slots=True)
class Dashboard:
    """Sections of panels and a table of runs."""

    sections: tuple[Section, ...]
    runs: RunTable

    @property
    def metrics(self) -> frozenset[str]:
        """Names of all metrics shown as a curve, bar, number, column or axis."""
        names = set(self.runs.results)
        for panel in (panel for section in self.sections for panel in section.panels):
            if isinstance(panel, Lines):
                names |= {*panel.metrics, panel.x}
            elif isinstance(panel, Bars):
                names |= set(panel.metrics)
            elif isinstance(panel, Number):
                names.add(panel.metric)
        return frozenset(names)
