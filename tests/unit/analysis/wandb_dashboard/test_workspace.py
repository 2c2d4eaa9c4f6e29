"""The dashboard's specification: equal to a golden file, complete, and parsed back by wandb-workspaces unchanged.

After an intended change: UPDATE_GOLDEN=1 pytest tests/unit/analysis/wandb_dashboard.
"""

from __future__ import annotations

import json
import os
import re
import socket
from importlib import metadata, util
from typing import Any

import pytest

from launcher.analysis.wandb_dashboard.content import (
    GROUP_BY,
    MAIN_CHECKS,
    RESULTS,
    SECTIONS,
    SETTINGS,
    TASK_METRICS,
)
from launcher.analysis.wandb_dashboard.workspace import (
    INSTALL_COMMAND,
    WANDB_WORKSPACES,
    ViewTarget,
    derive_view_name,
    dump_view,
    render_specification,
)
from launcher.core import metrics
from launcher.core.errors import InputError
from launcher.core.metrics import METRICS_BY_NAME
from launcher.judges.base import CORRECT_CHECK
from launcher.judges.cypher.judge import CypherJudge
from launcher.judges.sql.judge import SqlJudge
from launcher.request.request import Request, plan_request
from launcher.runs.wandb_settings import MEDIANS, STEP_AXIS, make_config, name_median
from tests.conftest import ROOT

pytest.importorskip("wandb_workspaces", reason=f"the dashboard needs wandb-workspaces: {INSTALL_COMMAND}")

from wandb_workspaces.reports.v2.interface import BarPlot, LinePlot, RunComparer, ScalarChart

GOLDEN = ROOT / "tests/golden/dashboard.json"
TARGET = ViewTarget(entity="team", project="expert-launcher", name="expert launcher")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("building the specification must not use the network")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def sections(text: str) -> dict[str, list[dict[str, Any]]]:
    bank = json.loads(text)["spec"]["section"]["panelBankConfig"]
    return {section["name"]: section["panels"] for section in bank["sections"]}


def list_panels(title: str) -> list[Any]:
    return next([*make()] for name, make, _, _ in SECTIONS if name == title)


def list_metrics(panel: Any) -> list[Any]:
    """Return the metrics that a panel shows."""
    if isinstance(panel, LinePlot):
        return list(panel.y)
    if isinstance(panel, BarPlot):
        return list(panel.metrics)
    return [panel.metric] if isinstance(panel, ScalarChart) else []


def test_specification_equals_golden_file() -> None:
    text = render_specification(TARGET)
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


def test_installed_version_is_the_pinned_one() -> None:
    assert metadata.version("wandb-workspaces") == WANDB_WORKSPACES


def test_specification_round_trips_through_wandb_workspaces() -> None:
    from wandb_workspaces.workspaces import Workspace, internal

    text = render_specification(TARGET)
    view = internal.View.model_validate_json(text)
    assert dump_view(view) == text
    assert dump_view(Workspace._from_model(view)._to_model()) == text
    # `save()` sends what is in the file.
    sent = json.loads(view.spec.model_dump_json(by_alias=True, exclude_none=True))
    assert sent == json.loads(text)["spec"]


def test_every_panel_type_is_recognized() -> None:
    from wandb_workspaces.reports.v2.interface import UnknownPanel
    from wandb_workspaces.workspaces import Workspace, internal

    view = internal.View.model_validate_json(render_specification(TARGET))
    built = Workspace._from_model(view)
    panels = [panel for section in built.sections for panel in section.panels]
    assert len(panels) == sum(len(list_panels(title)) for title, *_ in SECTIONS)
    assert not any(isinstance(panel, UnknownPanel) for panel in panels)


def test_all_metrics_but_three_are_shown() -> None:
    panels = [panel for title, *_ in SECTIONS for panel in list_panels(title)]
    axes = {panel.x for panel in panels if isinstance(panel, LinePlot)}
    shown = {*RESULTS, *axes, *(name for panel in panels for name in list_metrics(panel))}
    others = {metrics.SAMPLES_PER_SECOND, metrics.STEPS_PER_SECOND, metrics.HOST_LOAD}  # W&B has the load itself
    assert set(METRICS_BY_NAME) - shown == others
    medians = {name_median(name) for name in MEDIANS}
    assert shown - set(METRICS_BY_NAME) - medians - {"eval/parses"} == {STEP_AXIS, "status", *MAIN_CHECKS}


def test_sections_show_their_main_metrics() -> None:
    titles = [title for title, *_ in SECTIONS]
    assert titles == ["speed", "memory", "learning", "stability", "goodput", "run comparison"]
    lines = {title: [panel for panel in list_panels(title) if isinstance(panel, LinePlot)] for title in titles}
    speed = {name for panel in lines["speed"] for name in panel.y}
    expected = {metrics.TOKENS_PER_SECOND, metrics.DEVICE_MFU, metrics.GPU_UTILIZATION, metrics.DATA_WAIT_SHARE}
    assert expected <= speed
    assert any({metrics.PEAK_ALLOCATED_GIB, metrics.PREDICTED_GIB} <= set(panel.y) for panel in lines["memory"])
    axes = {panel.x for panel in lines["learning"] if panel.y == [metrics.TRAIN_LOSS]}
    assert axes == {STEP_AXIS, metrics.TOKENS_SEEN, metrics.TOTAL_SECONDS}
    stability = {name for panel in lines["stability"] for name in panel.y}
    assert stability == {metrics.GRAD_NORM, metrics.SKIPPED}
    assert any(metrics.GOODPUT in panel.y for panel in lines["goodput"])
    assert any(isinstance(panel, BarPlot) for panel in list_panels("memory"))
    assert [type(panel) for panel in list_panels("run comparison")] == [RunComparer]


def test_runs_are_grouped_by_expert_and_hardware() -> None:
    run_set = json.loads(render_specification(TARGET))["spec"]["section"]["runSets"][0]
    assert [key["name"] for key in run_set["grouping"]] == ["expert.value", "hardware.value"]
    assert run_set["runFeed"]["columnOrder"][:3] == ["run:displayName", "config:expert.value", "config:hardware.value"]
    assert "summary:median/throughput/tokens_per_sec" in run_set["runFeed"]["columnPinned"]


def test_table_settings_are_logged_to_wandb() -> None:
    plan = plan_request(Request(expert="neo4j", profile="smoke")).plan
    config = make_config(plan, {})
    assert {*GROUP_BY, *SETTINGS} <= set(config)


def test_correct_answers_are_shown_by_the_judges_main_checks() -> None:
    # JSON: equal. TypeScript: behaves, or equal without Node.
    mains = {SqlJudge.main_check, CypherJudge.main_check, CORRECT_CHECK, "equal", "behaves"}
    assert {f"eval/{name}" for name in mains} == set(MAIN_CHECKS)
    shown = [panel for panel in list_panels("learning") if list_metrics(panel) == [*MAIN_CHECKS]]
    assert [type(panel) for panel in shown] == [LinePlot, BarPlot]
    assert set(MAIN_CHECKS) <= set(RESULTS)


def test_task_metric_pattern_excludes_the_loss() -> None:
    names = ("eval/exact_match", "eval/parses", "eval/lo_fi", "eval/losses", "eval/l2")
    assert all(re.search(TASK_METRICS, name) for name in names)
    assert not any(re.search(TASK_METRICS, name) for name in (metrics.EVAL_LOSS, metrics.TRAIN_LOSS, "time/evaluation"))


def test_ids_are_unique_and_reproducible() -> None:
    panels = [panel for group in sections(render_specification(TARGET)).values() for panel in group]
    ids = [panel["__id__"] for panel in panels]
    assert len(set(ids)) == len(ids)
    again = [panel for group in sections(render_specification(TARGET)).values() for panel in group]
    assert [panel["__id__"] for panel in again] == ids


def test_view_name_depends_on_entity_project_and_name() -> None:
    assert derive_view_name(TARGET) == derive_view_name(
        ViewTarget(entity="team", project="expert-launcher", name="expert launcher")
    )
    others = [
        ViewTarget(entity="other", project="expert-launcher", name="expert launcher"),
        ViewTarget(entity="team", project="other", name="expert launcher"),
        ViewTarget(entity="team", project="expert-launcher", name="other"),
    ]
    assert len({derive_view_name(target) for target in (TARGET, *others)}) == 4
    assert derive_view_name(ViewTarget(entity="team", project="p", name="n", view="abc123")) == "abc123"


def test_missing_package_comes_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(util, "find_spec", lambda _name: None)
    with pytest.raises(InputError, match="wandb-workspaces is not installed") as raised:
        render_specification(TARGET)
    assert raised.value.hint == f"pip install wandb-workspaces=={WANDB_WORKSPACES}"
