"""W&B mode, project, ids and config of a run, decided without importing wandb."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from launcher.analysis.compare.load_run import _collect_traits
from launcher.core.run_paths import RunPaths
from launcher.request.arguments import add_request_arguments, make_request
from launcher.request.request import Request, plan_request
from launcher.runs.record import Outcome, WandbTrace
from launcher.runs.wandb_settings import (
    WandbProject,
    decide_tracking,
    find_base_url,
    find_key,
    get_project,
    load_trace,
    make_config,
    make_id,
    write_trace,
)

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("planned", "environment", "mode", "reason"),
    [
        (None, {}, "disabled", "not requested, and no key"),
        (None, {"WANDB_PROJECT": "experts"}, "offline", "no key"),
        (None, {"WANDB_API_KEY": KEY}, "online", "WANDB_API_KEY"),
        ("offline", {"WANDB_API_KEY": KEY}, "offline", "as planned"),
        ("online", {}, "online", "as planned"),
        ("disabled", {"WANDB_API_KEY": KEY}, "disabled", "as planned"),
        ("online", {"WANDB_MODE": "disabled"}, "disabled", "WANDB_MODE=disabled"),
        ("disabled", {"WANDB_MODE": "online"}, "disabled", "as planned"),
        (None, {"WANDB_MODE": "offline", "WANDB_API_KEY": KEY}, "offline", "WANDB_MODE=offline"),
        (None, {"WANDB_MODE": "online"}, "online", "WANDB_MODE=online"),
        ("online", {"WANDB_DISABLED": "true"}, "disabled", "WANDB_DISABLED"),
        (None, {"WANDB_MODE": " "}, "disabled", "no key"),
    ],
)
def test_mode_depends_on_login_and_environment(
    planned: str | None, environment: dict[str, str], mode: str, reason: str, tmp_path: Path
) -> None:
    tracking = decide_tracking(planned, {"HOME": str(tmp_path), **environment})  # type: ignore[arg-type]
    assert tracking.mode == mode
    assert reason in tracking.reason
    assert KEY not in tracking.reason


def test_any_setting_of_the_manifest_requests_offline_files(tmp_path: Path) -> None:
    tracking = decide_tracking(None, {"HOME": str(tmp_path)}, is_requested=True)
    assert (tracking.mode, tracking.reason[:6]) == ("offline", "no key")


def where_is_key(environment: Mapping[str, str]) -> str:
    key = find_key(environment)
    assert key is not None
    return key.where


def test_login_is_read_from_netrc(tmp_path: Path) -> None:
    file = tmp_path / ".netrc"
    environment = {"HOME": str(tmp_path)}
    file.write_text("machine example.org login user password x\n")
    assert find_key(environment) is None, "of somebody else"
    file.write_text(f"machine api.wandb.ai login user password {KEY}\n")
    assert where_is_key(environment) == str(file)
    assert find_key({**environment, "WANDB_BASE_URL": "https://wandb.example.org"}) is None, "of another server"
    file.write_text("machine wandb.example.org login user password x\n")
    assert where_is_key({**environment, "WANDB_BASE_URL": "https://wandb.example.org:8080"}) == str(file)
    file.write_text("machine\n")
    assert find_key(environment) is None, "not one that can be read"
    other = tmp_path / "elsewhere"
    other.write_text(f"machine api.wandb.ai login user password {KEY}\n")
    assert where_is_key({**environment, "NETRC": str(other)}) == str(other)


def test_self_hosted_server_is_read_from_the_login(tmp_path: Path) -> None:
    """As `wandb login --host` writes it."""
    environment = {"HOME": str(tmp_path)}
    settings = tmp_path / ".config/wandb/settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nbase_url = https://wandb.example.org\n")
    (tmp_path / ".netrc").write_text("machine wandb.example.org login user password x\n")
    assert find_base_url(environment) == "https://wandb.example.org"
    assert where_is_key(environment) == str(tmp_path / ".netrc")
    assert find_base_url({**environment, "WANDB_BASE_URL": "http://other"}) == "http://other"
    settings.write_text("no settings")
    assert find_base_url(environment) is None


def test_environment_sets_the_default_project() -> None:
    plan = plan_request(Request(expert="neo4j", gpu="rtx4090")).plan.wandb
    environment = {"WANDB_PROJECT": "theirs", "WANDB_ENTITY": "team"}
    assert get_project(plan, environment) == WandbProject(project="theirs", entity="team")
    named = plan.model_copy(update={"project": "ours", "entity": "us"})
    assert get_project(named, environment) == WandbProject(project="ours", entity="us")
    assert get_project(plan, {}) == WandbProject(project="expert-launcher", entity=None)


def test_ids_are_unique_and_the_trace_can_be_loaded(tmp_path: Path) -> None:
    assert make_id("test") != make_id("test")
    paths = RunPaths(tmp_path)
    assert load_trace(paths) is None
    trace = WandbTrace(id="a-1", project="p", mode="offline", folders=("wandb/offline-run-1",), told_seconds=3.5)
    write_trace(paths, trace)
    assert load_trace(paths) == trace
    paths.wandb.write_text("{")
    assert load_trace(paths) is None


@pytest.mark.parametrize(
    ("name", "start"), [("a:b#c/d?'e", "a-b-c-d-e-"), ("\u00fc\u65e5 x", "-x-"), ("x" * 300, "x" * 100 + "-")]
)
def test_id_is_valid_whatever_the_directory_is_called(name: str, start: str) -> None:
    made = make_id(name)
    assert re.fullmatch(rf"{re.escape(start)}[0-9a-f]{{8}}", made)


@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_runs_in_fp8_are_called_so(adapter: str) -> None:
    """By the columns of W&B and by the traits that `launcher compare` compares."""
    overrides = [f"training.config.adapter_type={adapter}", "training.config.precision="]
    plans = [
        plan_request(Request(expert="neo4j", gpu="h200", overrides=(overrides[0], overrides[1] + value))).plan
        for value in ("fp8", "bf16")
    ]
    assert [make_config(plan, {})["precision"] for plan in plans] == ["fp8", "bf16"]
    assert [_collect_traits(plan, None, {}).precision for plan in plans] == ["fp8", "bf16"]


def test_config_has_flat_keys_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "planted-secret-value")
    plan = plan_request(Request(expert="neo4j", gpu="rtx4090", gpus_per_node=2)).plan
    places = "read from /srv/alice/rows.jsonl, https://example.org/a/b and a/b/c"
    manifest = {
        "description": places,
        "notes": "planted-secret-value",
        "api_key": "another-one",
        "training": {"config": {"rank": 16}},
    }
    outcome = Outcome(run_id="a", status="running", started_at="2026-11-15T10:00:00+00:00", pid=1, data_key="13c8")
    config = make_config(plan, manifest, outcome)
    assert config["expert"] == "neo4j"
    assert config["hardware"] == "2 x GeForce RTX 4090 (24.0 GiB)"
    assert (config["gpu"], config["gpus_per_node"], config["num_ranks"]) == ("rtx4090", 2, 2)
    assert config["data_key"] == "13c8", "a fingerprint, not a key"
    flat = {name: value for name, value in config.items() if name not in ("manifest", "plan", "decisions")}
    assert all(isinstance(value, str | int | float | bool | None) for value in flat.values())
    text = json.dumps(config)
    assert "planted-secret-value" not in text
    assert "another-one" not in text
    assert str(Path.cwd()) not in text, "no local paths"
    assert config["manifest"]["description"] == (  # type: ignore[index]
        "read from …/rows.jsonl, https://example.org/a/b and a/b/c"
    )
    assert config["manifest"]["training"] == {"config": {"rank": 16}}  # type: ignore[index]


def test_flags_reach_the_plan() -> None:
    parser = argparse.ArgumentParser()
    add_request_arguments(parser)
    words = ["neo4j", "--gpu", "rtx4090", "--wandb", "offline", "--wandb-project", "123", "--wandb-entity", "team"]
    words += ["--wandb-group", "g", "--wandb-name", "n", "--wandb-notes", "a=b", "--wandb-tags", "x, y"]
    planned = plan_request(
        make_request(parser.parse_args([*words, "--wandb-artifacts", "adapter,manifest"]))
    ).plan.wandb
    assert planned.model_dump() == {
        "project": "123",
        "entity": "team",
        "group": "g",
        "name": "n",
        "tags": ("x", "y"),
        "notes": "a=b",
        "mode": "offline",
        "is_requested": True,
        "artifacts": ("adapter", "manifest"),
    }


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--wandb-tags", "a,,b", "'a,,b' is not a comma-separated list of words"),
        ("--wandb-artifacts", "weights", "'weights' is neither adapter nor manifest"),
    ],
)
def test_invalid_wandb_flags_are_refused(flag: str, value: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_request_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["neo4j", flag, value])
    assert words in capsys.readouterr().err
