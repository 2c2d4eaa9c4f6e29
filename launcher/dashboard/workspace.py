"""Dashboard -> wandb-workspaces -> the text that W&B is sent. No network; the package is imported only here.

Its model of a view is private and changes between versions: WANDB_WORKSPACES pins the one that this was written for.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib import metadata, util
from typing import TYPE_CHECKING

from launcher.dashboard.model import Bars, Comparer, Dashboard, Lines, Number, Panel, Section
from launcher.errors import InputError
from launcher.tracking import STEP_AXIS

if TYPE_CHECKING:
    from wandb_workspaces import workspaces
    from wandb_workspaces.reports.v2.interface import BarPlot, LinePlot, PanelTypes, RunComparer, ScalarChart
    from wandb_workspaces.workspaces import internal

WANDB_WORKSPACES = "0.4.13"
PIP_LINE = f"pip install wandb-workspaces=={WANDB_WORKSPACES}"
_ID_LENGTH = 11
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a saved view lies, and what it is called."""

    entity: str  # "": the key's own, which only the server knows
    project: str
    name: str
    view: str | None = None  # what stands behind nw= in its URL; None: the one that name and place make


def check_installed() -> None:
    if util.find_spec("wandb_workspaces") is None:
        raise InputError("the dashboard needs a package that is not installed: wandb-workspaces", hint=PIP_LINE)


def name_view(place: Place) -> str:
    """The same for the same place: whoever updates the dashboard, from wherever, updates the one that is there."""
    return place.view or _make_id(place.entity, place.project, place.name)


def render_specification(dashboard: Dashboard, place: Place) -> str:
    """The whole view, the same each time: what `save()` sends stands under "spec"."""
    return dump_view(build_workspace(dashboard, place)._to_model())


def dump_view(view: internal.View) -> str:
    """Not sorted: the order of columns is that of their keys. The model's own order never changes."""
    tree = json.loads(view.model_dump_json(by_alias=True, exclude_none=True))
    return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"


def build_workspace(dashboard: Dashboard, place: Place) -> workspaces.Workspace:
    check_installed()
    try:
        return _build(dashboard, place)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        found = metadata.version("wandb-workspaces")
        if found == WANDB_WORKSPACES:
            raise
        raise InputError(
            f"wandb-workspaces {found} does not take this dashboard: {type(error).__name__}", hint=PIP_LINE
        ) from error


def _build(dashboard: Dashboard, place: Place) -> workspaces.Workspace:
    from wandb_workspaces import expr, workspaces
    from wandb_workspaces.workspaces import internal

    runs = dashboard.runs
    workspace = workspaces.Workspace(
        entity=place.entity,
        project=place.project,
        name=place.name,
        sections=[_build_section(section) for section in dashboard.sections],
        settings=workspaces.WorkspaceSettings(x_axis=STEP_AXIS, max_runs=20),
        runset_settings=workspaces.RunsetSettings(
            groupby=[expr.Config(key) for key in runs.group_by],
            order=[expr.Ordering(expr.Metric("CreatedTimestamp"), ascending=False)],
            pinned_columns=[
                "run:displayName",
                *(f"config:{key}.value" for key in runs.group_by),
                *(f"summary:{key}" for key in runs.results),
                *(f"config:{key}.value" for key in runs.settings),
            ],
        ),
    )
    workspace._internal_name = internal._url_query_str_to_internal_name(name_view(place))
    return workspace


def _build_section(section: Section) -> workspaces.Section:
    from wandb_workspaces import workspaces

    panels: list[PanelTypes] = []
    for panel in section.panels:
        built = _build_panel(panel)
        built._id = _make_id(section.title, type(panel).__name__, panel.title)
        panels.append(built)
    return workspaces.Section(
        name=section.title,
        panels=panels,
        is_open=True,
        layout_settings=workspaces.SectionLayoutSettings(columns=section.columns, rows=section.rows),
        panel_settings=workspaces.SectionPanelSettings(x_axis=STEP_AXIS),
    )


def _build_panel(panel: Panel) -> LinePlot | BarPlot | ScalarChart | RunComparer:
    from wandb_workspaces.reports.v2 import interface

    match panel:
        case Lines():
            return _build_lines(panel)
        case Bars():
            return interface.BarPlot(title=panel.title, metrics=list(panel.metrics), title_x=panel.unit or None)
        case Number():
            return interface.ScalarChart(title=panel.title, metric=panel.metric, groupby_aggfunc="mean")
        case Comparer():
            return interface.RunComparer(diff_only=True)


def _build_lines(panel: Lines) -> LinePlot:
    from wandb_workspaces.reports.v2 import interface

    return interface.LinePlot(
        title=panel.title,
        x=panel.x,
        y=list(panel.metrics),
        metric_regex=panel.pattern,
        title_y=panel.unit or None,
        log_y=True if panel.has_log_scale else None,
        plot_type="stacked-area" if panel.is_stacked else None,
        smoothing_type="exponential" if panel.smoothing else None,
        smoothing_factor=panel.smoothing or None,
        smoothing_show_original=True if panel.smoothing else None,
    )


def _make_id(*parts: str) -> str:
    """In the form of W&B's own, but made of what it names, so that two specifications can be compared."""
    number = int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:8], "big")
    digits = ""
    for _ in range(_ID_LENGTH):
        number, digit = divmod(number, len(_DIGITS))
        digits += _DIGITS[digit]
    return digits
