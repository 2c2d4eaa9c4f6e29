"""Code named by manifests and run directories runs only if the operator says so."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from launcher.core.errors import InputError
from launcher.manifest import load_manifest
from launcher.manifest.trust import allow_remote_code, check_trust, is_trust_granted, list_code
from tests.conftest import ROOT, WriteManifest, expert_manifests, python_path
from tests.forked_python import run_python

CODE = ("evaluation.judge: own:Judge",)
COMMAND = {"judge_command": ["sh", "-c", "touch executed"]}


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("LAUNCHER_TRUST", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    file = tmp_path / "config/expert-launcher/trust"
    file.parent.mkdir(parents=True)
    return file


@pytest.mark.parametrize("file", expert_manifests(), ids=lambda file: file.parent.name)
def test_bundled_experts_need_no_trust(file: Path) -> None:
    assert list_code(load_manifest(file).manifest) == ()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"evaluation": COMMAND}, "evaluation.judge_command: sh -c 'touch executed'"),
        ({"evaluation": {"judge": "os:abort"}}, "evaluation.judge: os:abort"),
        (
            {"base_models.0.trust_remote_code": True, "base_models.0.revision": "0123"},
            "trust_remote_code: the Python files of the base model Qwen/Qwen3-0.6B",
        ),
    ],
)
def test_every_kind_of_code_is_listed(write_manifest: WriteManifest, changes: dict[str, Any], code: str) -> None:
    assert list_code(load_manifest(write_manifest(changes)).manifest) == (code,)


def test_without_trust_the_error_names_code_source_and_flag(tmp_path: Path) -> None:
    check_trust((), tmp_path)
    with pytest.raises(InputError, match=r"run names code that .* only with --trust: evaluation.judge: own") as caught:
        check_trust(CODE, tmp_path / "run")
    assert str(tmp_path / "config/expert-launcher/trust") in caught.value.hint
    with pytest.raises(InputError, match="--trust"):
        allow_remote_code(True, "base")
    assert allow_remote_code(False, "base") is False


@pytest.mark.parametrize(
    ("line", "is_trusted"),
    [
        ("{folder}/run", True),
        ("  {folder}/run/  ", True),
        ("# comment\n\n{folder}", True),
        ("{folder}/ru", False),
        ("# {folder}/run", False),
        ("run", False),
        ("", False),
        ("{folder}/other", False),
        ("{folder}/run/../other", False),
    ],
)
def test_the_operators_file_lists_paths(tmp_path: Path, config: Path, line: str, is_trusted: bool) -> None:
    (tmp_path / "run").mkdir()
    config.write_text(line.format(folder=tmp_path))
    if is_trusted:
        check_trust(CODE, tmp_path / "run")
    else:
        with pytest.raises(InputError):
            check_trust(CODE, tmp_path / "run")
    assert is_trust_granted() == is_trusted


def test_a_link_is_as_trusted_as_its_target(tmp_path: Path, config: Path) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "good/link").symlink_to(tmp_path / "bad")
    config.write_text(str(tmp_path / "good"))
    with pytest.raises(InputError):
        check_trust(CODE, tmp_path / "good/link")


def launcher(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": python_path(), "COLUMNS": "300", "LAUNCHER_DATA_DIR": str(folder)}
    return run_python(["-m", "launcher", *words], cwd=folder, env=environment)


def write_expert(folder: Path, name: str, **changes: object) -> Path:
    manifest = json.loads((ROOT / "experts/json/manifest.json").read_text())
    target = folder / "experts" / name
    (target / "sample").mkdir(parents=True)
    for file in (ROOT / "experts/json/sample").glob("*.jsonl"):
        with file.open() as lines:  # planning counts the tokens of hundreds
            (target / "sample" / file.name).write_text("".join(islice(lines, 20)))
    (target / "manifest.json").write_text(json.dumps({**manifest, "name": f"expert-{name}", **changes}))
    return target / "manifest.json"


def check_refused(result: subprocess.CompletedProcess[str], folder: Path) -> None:
    assert (result.returncode, "--trust" in result.stderr) == (2, True), result.stderr + result.stdout
    assert "Traceback" not in result.stderr
    assert not (folder / "executed").exists()


@pytest.mark.process
def test_a_manifest_is_data_until_trusted(tmp_path: Path) -> None:
    write_expert(tmp_path, "evil", evaluation=COMMAND)
    for words in (["train", "evil", "--max-steps", "1"], ["eval", "evil", "--base"], ["regression", "evil"]):
        check_refused(launcher(tmp_path, *words), tmp_path)
    bench = launcher(tmp_path, "bench", "evil", "--vary", "packing=true,false")
    check_refused(bench, tmp_path)
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "datasets_optimized").exists()
    for words in (
        ["plan", "evil"],
        ["validate", "evil"],
        ["train", "evil", "--dry-run"],
        ["doctor", "evil", "--quick"],
    ):
        shown = launcher(tmp_path, *words)
        assert "touch executed" in shown.stdout.replace("\n", " "), shown.stdout + shown.stderr
    assert not (tmp_path / "executed").exists()


@pytest.mark.process
def test_a_run_directory_is_data_until_trusted(tmp_path: Path) -> None:
    write_expert(tmp_path, "good")
    assert launcher(tmp_path, "train", "good", "--dry-run", "--run-id", "r").returncode == 0
    run = tmp_path / "runs/r"
    (run / "adapter").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (run / "adapter" / name).write_text("{}")

    def edit(name: str, **changes: object) -> str:
        before = (run / name).read_text()
        (run / name).write_text(json.dumps({**json.loads(before), **changes}))
        return before

    before = edit("manifest.json", evaluation=COMMAND)
    check_refused(launcher(tmp_path, "eval", "--run", "r"), tmp_path)
    report = launcher(tmp_path, "report", "r").stdout
    assert "touch executed" in report
    (run / "manifest.json").write_text(before)
    before = edit("plan.json", trust_remote_code=True)
    for words in (["ask", "r", "hello"], ["eval", "--run", "r"], ["export", "r"]):
        check_refused(launcher(tmp_path, *words), tmp_path)
    compared = launcher(tmp_path, "compare", "r", "--format", "md")
    assert "Python files of the base model" in compared.stdout + compared.stderr
    (run / "plan.json").write_text(before)
    before = edit("request.json", overrides=["evaluation.judge_command=" + json.dumps(COMMAND["judge_command"])])
    check_refused(launcher(tmp_path, "train", "good", "--resume", "r"), tmp_path)
    assert launcher(tmp_path, "train", "good", "--resume", "r", "--dry-run").returncode == 0
    (run / "request.json").write_text(before)
    other = write_expert(tmp_path / "elsewhere", "good")
    edit("request.json", expert=str(other))
    resumed = launcher(tmp_path, "train", "good", "--resume", "r")
    check_refused(resumed, tmp_path)
    assert f"the manifest {other}, which request.json names instead of good's" in resumed.stderr
    dry = launcher(tmp_path, "train", "good", "--resume", "r", "--dry-run")
    check_refused(dry, tmp_path)
    assert dry.stderr == resumed.stderr
    assert launcher(tmp_path, "train", "--resume", "r", "--dry-run").returncode == 0  # the run's own expert
