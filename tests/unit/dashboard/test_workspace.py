"""The specification: by exact equality, whole in what it shows, and read back by wandb-workspaces as it was written.

After a change that was meant: UPDATE_GOLDEN=1 pytest tests/unit/dashboard.
"""

from __future__ import annotations

import json
import os
import re
import socket
from importlib import metadata, util
from typing import Any

import pytest

from launcher import metrics
from launcher.compare.judged import _KNOWN_MAINS
from launcher.dashboard import workspace
from launcher.dashboard.content import DASHBOARD, MAIN_CHECKS, TASK_METRICS
from launcher.dashboard.model import Bars, Comparer, Lines
from launcher.dashboard.workspace import PIP_LINE, WANDB_WORKSPACES, Place, dump_view, name_view, render_specification
from launcher.errors import InputError
from launcher.inputs import Request, plan_request
from launcher.metrics import METRICS_BY_NAME
from launcher.quality.command import MAIN
from launcher.quality.cypher import CypherJudge
from launcher.quality.sql import SqlJudge
from launcher.tracking import MEDIANS, STEP_AXIS, make_config, name_median
from tests.conftest import ROOT

pytest.importorskip("wandb_workspaces", reason=f"the dashboard needs wandb-workspaces: {PIP_LINE}")

GOLDEN = ROOT / "tests/golden/dashboard.json"
PLACE = Place(entity="team", project="expert-launcher", name="expert launcher")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the specification is made without a network")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def sections(text: str) -> dict[str, list[dict[str, Any]]]:
    bank = json.loads(text)["spec"]["section"]["panelBankConfig"]
    return {section["name"]: section["panels"] for section in bank["sections"]}


def test_the_specification_equals_the_golden_file() -> None:
    text = render_specification(DASHBOARD, PLACE)
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


def test_the_golden_file_is_of_the_pinned_version() -> None:
    assert metadata.version("wandb-workspaces") == WANDB_WORKSPACES


def test_the_specification_goes_through_wandb_workspaces_and_back() -> None:
    from wandb_workspaces.workspaces import Workspace, internal

    text = render_specification(DASHBOARD, PLACE)
    view = internal.View.model_validate_json(text)
    assert dump_view(view) == text
    assert dump_view(Workspace._from_model(view)._to_model()) == text
    # What `save()` sends is what the file has.
    sent = json.loads(view.spec.model_dump_json(by_alias=True, exclude_none=True))
    assert sent == json.loads(text)["spec"]


def test_every_panel_is_read_back_as_what_it_is() -> None:
    from wandb_workspaces.reports.v2.interface import UnknownPanel
    from wandb_workspaces.workspaces import Workspace, internal

    view = internal.View.model_validate_json(render_specification(DASHBOARD, PLACE))
    built = Workspace._from_model(view)
    panels = [panel for section in built.sections for panel in section.panels]
    assert len(panels) == sum(len(section.panels) for section in DASHBOARD.sections)
    assert not any(isinstance(panel, UnknownPanel) for panel in panels)


def test_every_metric_is_shown_or_left_out_for_a_reason() -> None:
    shown = DASHBOARD.metrics
    assert set(METRICS_BY_NAME) - shown == {metrics.SAMPLES_PER_SECOND, metrics.STEPS_PER_SECOND}
    medians = {name_median(name) for name in MEDIANS}
    assert shown - set(METRICS_BY_NAME) - medians - {"eval/parses"} == {STEP_AXIS, "status", *MAIN_CHECKS}


def test_the_sections_are_those_that_were_asked_for() -> None:
    by_title = {section.title: section for section in DASHBOARD.sections}
    assert list(by_title) == ["speed", "memory", "learning", "stability", "goodput", "runs compared"]
    lines = {title: [one for one in by_title[title].panels if isinstance(one, Lines)] for title in by_title}
    speed = {name for panel in lines["speed"] for name in panel.metrics}
    wanted = {metrics.TOKENS_PER_SECOND, metrics.DEVICE_MFU, metrics.GPU_UTILIZATION, metrics.DATA_WAIT_SHARE}
    assert wanted <= speed
    assert any({metrics.PEAK_ALLOCATED_GIB, metrics.PREDICTED_GIB} <= set(panel.metrics) for panel in lines["memory"])
    axes = {panel.x for panel in lines["learning"] if panel.metrics == (metrics.TRAIN_LOSS,)}
    assert axes == {STEP_AXIS, metrics.TOKENS_SEEN, metrics.TOTAL_SECONDS}
    stability = {name for panel in lines["stability"] for name in panel.metrics}
    assert stability == {metrics.GRAD_NORM, metrics.SKIPPED}
    assert any(metrics.GOODPUT in panel.metrics for panel in lines["goodput"])
    assert any(isinstance(panel, Bars) for panel in by_title["memory"].panels)
    assert [type(panel) for panel in by_title["runs compared"].panels] == [Comparer]


def test_runs_are_grouped_by_expert_and_hardware() -> None:
    run_set = json.loads(render_specification(DASHBOARD, PLACE))["spec"]["section"]["runSets"][0]
    assert [key["name"] for key in run_set["grouping"]] == ["expert.value", "hardware.value"]
    assert run_set["runFeed"]["columnOrder"][:3] == ["run:displayName", "config:expert.value", "config:hardware.value"]
    assert "summary:median/throughput/tokens_per_sec" in run_set["runFeed"]["columnPinned"]


def test_settings_of_the_table_are_what_runs_tell_wandb() -> None:
    plan = plan_request(Request(expert="neo4j", profile="smoke")).plan
    told = make_config(plan, {}, data_key=None)
    assert {*DASHBOARD.runs.group_by, *DASHBOARD.runs.settings} <= set(told)


def test_right_answers_are_shown_by_what_our_judges_measure_experts_by() -> None:
    # JSON: equal. TypeScript: behaves, or equal without Node.
    mains = {SqlJudge.main_check, CypherJudge.main_check, MAIN, "equal", "behaves"}
    assert {f"eval/{name}" for name in mains} == set(MAIN_CHECKS)
    learning = next(section for section in DASHBOARD.sections if section.title == "learning")
    shown = [panel for panel in learning.panels if isinstance(panel, Lines | Bars) and panel.metrics == MAIN_CHECKS]
    assert [type(panel) for panel in shown] == [Lines, Bars]
    assert {f"eval/{name}" for name in _KNOWN_MAINS} == set(MAIN_CHECKS)  # as compare knows them
    assert set(MAIN_CHECKS) <= set(DASHBOARD.runs.results)


def test_task_metrics_are_all_of_an_evaluation_but_its_loss() -> None:
    names = ("eval/exact_match", "eval/parses", "eval/lo_fi", "eval/losses", "eval/l2")
    assert all(re.search(TASK_METRICS, name) for name in names)
    assert not any(re.search(TASK_METRICS, name) for name in (metrics.EVAL_LOSS, metrics.TRAIN_LOSS, "time/evaluation"))


def test_ids_are_made_of_titles() -> None:
    panels = [panel for found in sections(render_specification(DASHBOARD, PLACE)).values() for panel in found]
    ids = [panel["__id__"] for panel in panels]
    assert len(set(ids)) == len(ids)
    again = [panel for found in sections(render_specification(DASHBOARD, PLACE)).values() for panel in found]
    assert [panel["__id__"] for panel in again] == ids


def test_a_view_is_named_by_where_it_lies() -> None:
    assert name_view(PLACE) == name_view(Place(entity="team", project="expert-launcher", name="expert launcher"))
    others = [
        Place(entity="other", project="expert-launcher", name="expert launcher"),
        Place(entity="team", project="other", name="expert launcher"),
        Place(entity="team", project="expert-launcher", name="other"),
    ]
    assert len({name_view(place) for place in (PLACE, *others)}) == 4
    assert name_view(Place(entity="team", project="p", name="n", view="abc123")) == "abc123"


def test_a_missing_package_is_told_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(util, "find_spec", lambda _name: None)
    with pytest.raises(InputError, match="not installed: wandb-workspaces") as raised:
        render_specification(DASHBOARD, PLACE)
    assert raised.value.hint == f"pip install wandb-workspaces=={WANDB_WORKSPACES}"


def test_another_version_that_does_not_take_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AttributeError("_to_model")

    monkeypatch.setattr(workspace, "_build", fail)
    with pytest.raises(AttributeError):  # ours, with the version that we pinned
        render_specification(DASHBOARD, PLACE)
    monkeypatch.setattr(metadata, "version", lambda _name: "0.5.0")
    with pytest.raises(InputError, match=r"wandb-workspaces 0\.5\.0 does not take this dashboard"):
        render_specification(DASHBOARD, PLACE)
