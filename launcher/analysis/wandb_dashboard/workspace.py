"""Build the W&B view specification of a dashboard with wandb-workspaces, without a network.

The package's model of a view is private and changes between versions, so WANDB_WORKSPACES pins one version.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib import metadata, util
from typing import TYPE_CHECKING

from launcher.analysis.wandb_dashboard.content import Dashboard, Panel, Section
from launcher.core.errors import InputError
from launcher.runs.wandb_settings import STEP_AXIS

if TYPE_CHECKING:
    from wandb_workspaces import workspaces
    from wandb_workspaces.reports.v2.interface import BarPlot, LinePlot, PanelTypes, RunComparer, ScalarChart
    from wandb_workspaces.workspaces import internal

WANDB_WORKSPACES = "0.4.13"
INSTALL_COMMAND = f"pip install wandb-workspaces=={WANDB_WORKSPACES}"
_ID_LENGTH = 11
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewTarget:
    """Entity, project and name of a saved view."""

    entity: str  # "": the default entity of the API key, known to the server only
    project: str
    name: str
    view: str | None = None  # value of nw= in its URL; None: derived from the other fields


def check_installed() -> None:
    """Raise InputError if wandb-workspaces is missing."""
    if util.find_spec("wandb_workspaces") is None:
        raise InputError("wandb-workspaces is not installed; the dashboard needs it", hint=INSTALL_COMMAND)


def derive_view_name(target: ViewTarget) -> str:
    """Return the view's name in URLs; equal targets get the same name, so saving updates the existing view."""
    return target.view or _make_id(target.entity, target.project, target.name)


def render_specification(dashboard: Dashboard, target: ViewTarget) -> str:
    """Return the view as JSON, deterministically; `save()` sends the part under "spec"."""
    return dump_view(build_workspace(dashboard, target)._to_model())


def dump_view(view: internal.View) -> str:
    """Dump a view as JSON with unsorted keys, since key order is column order."""
    tree = json.loads(view.model_dump_json(by_alias=True, exclude_none=True))
    return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"


def build_workspace(dashboard: Dashboard, target: ViewTarget) -> workspaces.Workspace:
    """Build the workspace; raise InputError if another version of wandb-workspaces cannot."""
    check_installed()
    try:
        return _build(dashboard, target)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        version = metadata.version("wandb-workspaces")
        if version == WANDB_WORKSPACES:
            raise
        raise InputError(
            f"wandb-workspaces {version} cannot build this dashboard: {type(error).__name__}", hint=INSTALL_COMMAND
        ) from error


def _build(dashboard: Dashboard, target: ViewTarget) -> workspaces.Workspace:
    from wandb_workspaces import expr, workspaces
    from wandb_workspaces.workspaces import internal

    workspace = workspaces.Workspace(
        entity=target.entity,
        project=target.project,
        name=target.name,
        sections=[_build_section(section) for section in dashboard.sections],
        settings=workspaces.WorkspaceSettings(x_axis=STEP_AXIS, max_runs=20),
        runset_settings=workspaces.RunsetSettings(
            groupby=[expr.Config(key) for key in dashboard.group_by],
            order=[expr.Ordering(expr.Metric("CreatedTimestamp"), ascending=False)],
            pinned_columns=[
                "run:displayName",
                *(f"config:{key}.value" for key in dashboard.group_by),
                *(f"summary:{key}" for key in dashboard.results),
                *(f"config:{key}.value" for key in dashboard.settings),
            ],
        ),
    )
    workspace._internal_name = internal._url_query_str_to_internal_name(derive_view_name(target))
    return workspace


def _build_section(section: Section) -> workspaces.Section:
    from wandb_workspaces import workspaces

    panels: list[PanelTypes] = []
    for panel in section.panels:
        built = _build_panel(panel)
        built._id = _make_id(section.title, panel.kind, panel.title)
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

    if panel.kind == "Bars":
        return interface.BarPlot(title=panel.title, metrics=list(panel.metrics), title_x=panel.unit or None)
    if panel.kind == "Number":
        return interface.ScalarChart(title=panel.title, metric=panel.metrics[0], groupby_aggfunc="mean")
    if panel.kind == "Comparer":
        return interface.RunComparer(diff_only=True)
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
    """Return an id in W&B's format, derived from the names so that specifications are reproducible."""
    number = int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:8], "big")
    digits = ""
    for _ in range(_ID_LENGTH):
        number, digit = divmod(number, len(_DIGITS))
        digits += _DIGITS[digit]
    return digits
