"""What a dashboard is: sections of panels over metrics' names. Pure values, drawn by whoever knows how."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.tracking import STEP_AXIS


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """Curves over an axis, one for each run and metric."""

    title: str
    metrics: tuple[str, ...] = ()
    pattern: str | None = None  # in place of metrics: those whose names match
    x: str = STEP_AXIS
    unit: str = ""
    smoothing: float = 0.0  # 0 to 1, exponential; what was measured stays visible
    has_log_scale: bool = False
    is_stacked: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """Last values, one bar for each run, or for each group of them."""

    title: str
    metrics: tuple[str, ...]
    unit: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """One last value, large."""

    title: str
    metric: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparer:
    """Settings and results of runs side by side: only those that differ."""

    title: str


Panel = Lines | Bars | Number | Comparer


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    title: str
    panels: tuple[Panel, ...]
    columns: int = 3
    rows: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTable:
    """The table of runs beside the panels: one row for each combination of the keys that it is grouped by."""

    group_by: tuple[str, ...]  # keys of a run's config
    results: tuple[str, ...]  # columns: keys of a run's summary
    settings: tuple[str, ...]  # columns: keys of a run's config


@dataclass(frozen=True, kw_only=True, slots=True)
class Dashboard:
    sections: tuple[Section, ...]
    runs: RunTable

    @property
    def metrics(self) -> frozenset[str]:
        """All that are shown, as a curve, a bar, a number, a column or an axis."""
        found = set(self.runs.results)
        for panel in (panel for section in self.sections for panel in section.panels):
            if isinstance(panel, Lines):
                found |= {*panel.metrics, panel.x}
            elif isinstance(panel, Bars):
                found |= set(panel.metrics)
            elif isinstance(panel, Number):
                found.add(panel.metric)
        return frozenset(found)
