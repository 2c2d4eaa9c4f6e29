"""Build the W&B view specification of a dashboard with wandb-workspaces, without a network.

The package's model of a view is private and changes between versions, so WANDB_WORKSPACES pins one version.
"""

from __future__ import annotations

import hashlib
import json
from importlib import util
from typing import TYPE_CHECKING

from launcher.analysis.wandb_dashboard.content import GROUP_BY, RESULTS, SECTIONS, SETTINGS
from launcher.core.errors import InputError
from launcher.core.frozen_model import Frozen
from launcher.runs.wandb_settings import STEP_AXIS

if TYPE_CHECKING:
    from wandb_workspaces import workspaces
    from wandb_workspaces.workspaces import internal

    from launcher.analysis.wandb_dashboard.content import Panel

WANDB_WORKSPACES = "0.4.13"
INSTALL_COMMAND = f"pip install wandb-workspaces=={WANDB_WORKSPACES}"
_ID_LENGTH = 11
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
# Names of panel types in ids; other names would change the ids of existing views.
_KINDS = {"LinePlot": "Lines", "BarPlot": "Bars", "ScalarChart": "Number", "RunComparer": "Comparer"}


class ViewTarget(Frozen):
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


def render_specification(target: ViewTarget) -> str:
    """Return the view as JSON, deterministically; `save()` sends the part under "spec"."""
    return dump_view(build_workspace(target)._to_model())


def dump_view(view: internal.View) -> str:
    """Dump a view as JSON with unsorted keys, since key order is column order."""
    tree = json.loads(view.model_dump_json(by_alias=True, exclude_none=True))
    return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"


def build_workspace(target: ViewTarget) -> workspaces.Workspace:
    """Build the workspace; raise InputError if wandb-workspaces is missing."""
    check_installed()
    from wandb_workspaces import expr, workspaces
    from wandb_workspaces.workspaces import internal

    workspace = workspaces.Workspace(
        entity=target.entity,
        project=target.project,
        name=target.name,
        sections=[_build_section(title, make(), columns, rows) for title, make, columns, rows in SECTIONS],
        settings=workspaces.WorkspaceSettings(x_axis=STEP_AXIS, max_runs=20),
        runset_settings=workspaces.RunsetSettings(
            groupby=[expr.Config(key) for key in GROUP_BY],
            order=[expr.Ordering(expr.Metric("CreatedTimestamp"), ascending=False)],
            pinned_columns=[
                "run:displayName",
                *(f"config:{key}.value" for key in GROUP_BY),
                *(f"summary:{key}" for key in RESULTS),
                *(f"config:{key}.value" for key in SETTINGS),
            ],
        ),
    )
    workspace._internal_name = internal._url_query_str_to_internal_name(derive_view_name(target))
    return workspace


def _build_section(title: str, panels: list[Panel], columns: int, rows: int) -> workspaces.Section:
    from wandb_workspaces import workspaces

    for panel in panels:
        panel._id = _make_id(title, _KINDS[type(panel).__name__], getattr(panel, "title", "differences"))
    return workspaces.Section(
        name=title,
        panels=[*panels],
        is_open=True,
        layout_settings=workspaces.SectionLayoutSettings(columns=columns, rows=rows),
        panel_settings=workspaces.SectionPanelSettings(x_axis=STEP_AXIS),
    )


def _make_id(*parts: str) -> str:
    """Return an id in W&B's format, derived from the names so that specifications are reproducible."""
    number = int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:8], "big")
    digits = ""
    for _ in range(_ID_LENGTH):
        number, digit = divmod(number, len(_DIGITS))
        digits += _DIGITS[digit]
    return digits
