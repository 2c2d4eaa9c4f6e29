"""Selection of the run that `--resume` continues."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from launcher.core.errors import InputError, ManifestError
from launcher.core.run_paths import RunPaths, write_files
from launcher.launch.resume import plan_resumed
from launcher.manifest import load_manifest
from launcher.plan import load_plan
from launcher.request.request import Request, format_request, load_request, plan_request
from launcher.request.run_directory import find_run_to_resume, input_texts
from launcher.runs.record import Outcome, Status, write_outcome
from tests.conftest import WriteManifest
from tests.made_runs import MadeRun, write_run

_BEGAN = 1_700_000_000


def write(runs: Path, run_id: str, status: Status | None, *, age: int = 0, **asked: Any) -> RunPaths:
    """Write the files by which a run is found. `age`: hours since the request was written."""
    paths = RunPaths(runs / run_id)
    paths.root.mkdir(parents=True)
    paths.plan.write_text("{}")
    paths.request.write_text(format_request(Request(**{"expert": "neo4j", **asked})))
    os.utime(paths.request, (_BEGAN - 3600 * age,) * 2)
    if status is not None:
        write_outcome(paths.outcome, Outcome(run_id=run_id, status=status, started_at="2026-11-01T00:00:00", pid=1))
    return paths


@pytest.mark.parametrize("status", ["running", "stopped", "failed", "crashed"])
def test_resume_finds_the_last_unfinished_run(tmp_path: Path, status: Status) -> None:
    write(tmp_path, "older", "stopped", age=3)
    wanted = write(tmp_path, "cut", status, age=2)
    write(tmp_path, "done", "done", age=1)
    write(tmp_path, "other", "stopped", expert="sql")
    write(tmp_path, "planned", None)  # a dry run
    assert find_run_to_resume(tmp_path, "", "neo4j") == wanted


def test_resume_accepts_a_manifest_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requested by name at first and now by path, and the other way round."""
    wanted = write(tmp_path, "cut", "stopped")
    assert find_run_to_resume(tmp_path, "", "experts/neo4j/manifest.json") == wanted
    by_path = write(tmp_path, "by-path", "stopped", age=-1, expert="experts/neo4j/manifest.json")
    monkeypatch.chdir(tmp_path)
    assert find_run_to_resume(tmp_path, "", "neo4j") == by_path


def test_resume_accepts_an_id_or_a_path(tmp_path: Path) -> None:
    wanted = write(tmp_path / "runs", "one", "done")
    write(tmp_path / "runs", "two", "stopped")
    assert find_run_to_resume(tmp_path / "runs", "one", "neo4j") == wanted
    assert find_run_to_resume(tmp_path / "elsewhere", str(wanted.root), "neo4j") == wanted


def test_run_of_another_expert_is_refused_before_anything_else(tmp_path: Path) -> None:
    paths = write_run(tmp_path, MadeRun(run_id="one"))
    (paths.root / "link").symlink_to(tmp_path.parent)  # would need trust
    with pytest.raises(InputError, match=r"one is a run of neo4j, not of sql") as refused:
        find_run_to_resume(tmp_path, "one", "sql")
    assert "name neo4j to resume it; without --resume, a new run of sql starts" in refused.value.hint


def test_resume_without_an_unfinished_run_is_refused(tmp_path: Path) -> None:
    for runs in (tmp_path / "missing", tmp_path):
        with pytest.raises(InputError, match=r"no unfinished run of neo4j in") as refused:
            find_run_to_resume(runs, "", "neo4j")
        assert "--resume RUN chooses a run" in refused.value.hint
        write(tmp_path, f"done-{runs.name[:4]}", "done")


def test_resume_of_a_folder_without_a_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for named in ("photos", "missing", str(tmp_path / "photos")):
        with pytest.raises(InputError, match=r"cannot be resumed: (it has no plan\.json|there is no such run)"):
            find_run_to_resume(tmp_path, named, "neo4j")
    with pytest.raises(InputError, match="a run id has 1 to 100 letters"):
        find_run_to_resume(tmp_path, "../outside", "neo4j")


@pytest.mark.parametrize(
    ("link", "is_refused"),
    [
        ("wandb/offline-run-20261117_103121-one/logs/debug-core.log", False),
        ("wandb/offline-run-20261117_103121-one/logs/debug.log", True),
        ("wandb/offline-run-20261117_103121-one/logs", True),
        ("wandb/debug-core.log", True),
        ("checkpoints/wandb/a/logs/debug-core.log", True),
        ("metrics.jsonl", True),
    ],
)
def test_links_out_of_a_run_need_trust_except_those_of_wandb(tmp_path: Path, link: str, is_refused: bool) -> None:
    paths = write(tmp_path / "runs", "one", "stopped")
    (paths.root / link).parent.mkdir(parents=True, exist_ok=True)
    (paths.root / link).unlink(missing_ok=True)
    (paths.root / link).symlink_to(tmp_path / "elsewhere")
    if is_refused:
        with pytest.raises(InputError, match="has links that lead outside and need --trust"):
            find_run_to_resume(tmp_path / "runs", "one", "neo4j")
    else:
        assert find_run_to_resume(tmp_path / "runs", "one", "neo4j") == paths


def test_run_in_the_working_directory_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write(tmp_path / "runs", "one", "stopped").root)
    assert find_run_to_resume(Path("runs"), ".", "neo4j").run_id == "one"


def test_resume_of_an_unknown_expert_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean neo4j"):
        find_run_to_resume(tmp_path, "", "noe4j")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"expert": 5}', "\udcff"])
def test_damaged_request_is_refused(tmp_path: Path, text: str) -> None:
    """Skipped in the search for the last run; refused if requested by its id."""
    damaged = write(tmp_path, "damaged", "stopped")
    damaged.request.write_text(text, errors="surrogateescape")
    with pytest.raises(InputError, match=r"not a valid request|not UTF-8"):
        plan_resumed(tmp_path, "damaged", Request(expert="neo4j"))
    with pytest.raises(InputError, match="no unfinished run of neo4j"):
        find_run_to_resume(tmp_path, "", "neo4j")
    other = write(tmp_path, "other", "stopped", age=9)
    assert find_run_to_resume(tmp_path, "", "neo4j") == other


def test_missing_request_is_refused(tmp_path: Path) -> None:
    lost = write(tmp_path, "lost", "stopped")
    lost.request.unlink()
    with pytest.raises(InputError, match=r"request\.json: cannot be read: No such file"):
        plan_resumed(tmp_path, "lost", Request(expert="neo4j"))


def test_request_can_be_loaded(tmp_path: Path) -> None:
    asked = Request(expert="neo4j", overrides=("training.config.rank=8",), max_steps=7, strategy="fsdp2", nodes=2)
    file = tmp_path / "request.json"
    file.write_text(format_request(asked))
    found = load_request(file)
    assert json.loads(format_request(found)) == json.loads(format_request(asked))
    assert tuple(found.overrides) == asked.overrides


def test_no_file_of_a_run_contains_a_secret_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it was copied to; the files stay loadable, and the settings of the training stay."""
    secret, hub = "wJalrXUtnFEMI/K7MDENG+bPxRfi", f"hf_{'Ab1' * 10}"
    for name, value in (("AWS_SECRET_ACCESS_KEY", secret), ("A_KEY", "disabled"), ("B_TOKEN", "gpu_memory_key")):
        monkeypatch.setenv(name, value)
    overrides = (
        f"training.config.wandb.notes=by {secret}",
        f"training.config.wandb.tags={json.dumps([secret, hub])}",
        f"description=the key is {secret}",
        f"tags={json.dumps([secret])}",
        "training.config.wandb.mode=disabled",
    )
    planned = plan_request(Request(expert="experts/json/manifest.json", overrides=overrides, gpu="h100"))
    paths = RunPaths(tmp_path)
    write_files(paths.root, input_texts(planned, paths))
    for file in tmp_path.iterdir():
        assert secret not in file.read_text(), file
        assert hub not in file.read_text(), file
    plan = load_plan(paths.plan)
    assert plan == planned.plan
    assert (plan.wandb.notes, plan.wandb.tags, plan.wandb.mode) == ("by ***", ("***", "***"), "disabled")
    assert load_manifest(paths.manifest).manifest.description == "the key is ***"
    assert load_request(paths.request).overrides[0] == "training.config.wandb.notes=by ***"


@pytest.mark.parametrize("link", ["console.log", "metrics.jsonl", "logs", "checkpoints/step-000001", "logs/a"])
def test_a_run_with_links_to_other_places_is_resumed_only_with_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str
) -> None:
    paths = write(tmp_path / "runs", "one", "stopped")
    (paths.root / link).parent.mkdir(exist_ok=True)
    (paths.root / "latest.txt").symlink_to("plan.json")
    assert find_run_to_resume(tmp_path / "runs", "", "neo4j") == paths
    (paths.root / link).symlink_to(tmp_path / "precious")
    for name in ("one", ""):
        with pytest.raises(InputError, match=f"has links that lead outside and need --trust: {link} -> "):
            find_run_to_resume(tmp_path / "runs", name, "neo4j")
    monkeypatch.setenv("LAUNCHER_TRUST", "1")
    assert find_run_to_resume(tmp_path / "runs", "one", "neo4j") == paths


@pytest.mark.parametrize(
    "path", ["name", "base_models.0.revision", "base_models.0.end_token", "training.config.torch_compile_backend"]
)
def test_a_secret_in_a_value_that_the_training_uses_is_refused(
    write_manifest: WriteManifest, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("MY_API_TOKEN", "pl4nted-Value-77")
    file = write_manifest({path: "x-pl4nted-Value-77"})
    with pytest.raises(ManifestError, match="contains a password or a token") as caught:
        plan_request(Request(expert=str(file), gpu="h100"))
    assert "pl4nted" not in str(caught.value)


def test_the_end_token_is_no_secret(write_manifest: WriteManifest, tmp_path: Path) -> None:
    planned = plan_request(Request(expert=str(write_manifest({"base_models.0.end_token": "<|im_end|>"})), gpu="h100"))
    assert "<|im_end|>" in input_texts(planned, RunPaths(tmp_path))["manifest.json"]


def test_resume_of_an_unknown_run_lists_the_runs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such run") as caught:
        find_run_to_resume(tmp_path, "nosuch", "neo4j")
    assert "has no runs" in caught.value.hint
    (tmp_path / "first").mkdir()
    (tmp_path / "first/plan.json").write_text("{}")
    with pytest.raises(InputError, match="there is no such run") as caught:
        find_run_to_resume(tmp_path, "nosuch", "neo4j")
    assert caught.value.hint.startswith(
        f"{tmp_path} has the runs first; to find a run that was started in another folder"
    )
