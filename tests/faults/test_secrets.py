"""Secrets that a user might pass anywhere appear in no file and no output of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.core.redaction import REDACTED, collect_known_secrets, is_secret_name, redact_text, redact_tree
from launcher.render import Command
from tests import forked_python
from tests.conftest import ROOT, python_path
from tests.distributed.harness import Harness, TrainingCase, make_harness
from tests.faults.fork_server import ForkServer

PASSWORD = "correct-horse-battery-9"
HUB_TOKEN = "hf_QwErTyUiOpAsDfGhJkLzXcVbNm"
WANDB_KEY = "0123456789abcdef0123456789abcdef01234567"
PLANTED = (PASSWORD, HUB_TOKEN, WANDB_KEY)


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "WANDB_API_KEY", "api_key", "password", "AWS_SECRET_ACCESS_KEY", "client-secret", "auth.token"]
)
def test_secret_names_are_recognized(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "max_new_tokens",
        "new_tokens",
        "tokens_per_row",
        "mean_tokens",
        "eos_token",
        "tokenizer",
        "author",
        "keyword",
        "keys",
    ],
)
def test_similar_names_are_no_secrets(name: str) -> None:
    assert not is_secret_name(name)


def test_secrets_in_texts_and_trees_are_redacted() -> None:
    assert redact_text(f"clone https://me:{PASSWORD}@host/x?y=1") == f"clone https://{REDACTED}@host/x?y=1"
    assert redact_text(f"use {HUB_TOKEN}.") == f"use {REDACTED}."
    assert redact_text(f"key {WANDB_KEY} was refused", (WANDB_KEY,)) == f"key {REDACTED} was refused"
    assert redact_text("mail me@host, see https://host/a@b") == "mail me@host, see https://host/a@b"
    tree = {"a": {"api_key": "x", "b": [f"https://{PASSWORD}@h"]}, "token": "", "max_new_tokens": 5}
    assert redact_tree(tree) == {
        "a": {"api_key": REDACTED, "b": [f"https://{REDACTED}@h"]},
        "token": "",
        "max_new_tokens": 5,
    }
    assert collect_known_secrets({"PWD": "/a/long/place", "OLDPWD": "/another/place"}) == (), (
        "the working directory of a shell"
    )
    assert collect_known_secrets({"DB_PWD": PASSWORD}) == (PASSWORD,)
    assert collect_known_secrets({"HF_TOKEN": HUB_TOKEN, "OTHER": "aaaaaaaaaaaa", "X_TOKEN": "short"}) == (HUB_TOKEN,)


def launcher(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    return subprocess.run(
        [sys.executable, "-m", "launcher", *arguments],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": python_path(), "LAUNCHER_DATA_DIR": str(folder / "data"), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def find_leaks(folder: Path) -> list[str]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert files
    return [f"{file}: {secret}" for file in files for secret in PLANTED if secret.encode() in file.read_bytes()]


def test_run_directory_contains_no_secret(harness: Harness, fork_server: ForkServer, tmp_path: Path) -> None:
    tree = json.loads(harness.manifest(TrainingCase(strategy="single", ranks_per_node=1)).read_text())
    tree["author"] = f"https://me:{PASSWORD}@host/me"
    tree.setdefault("training", {}).setdefault("config", {})["max_steps"] = 2
    manifest, runs = harness.folder / "planted.json", tmp_path / "runs"
    manifest.write_text(json.dumps(tree))
    argv = (
        *(sys.executable, "-m", "launcher", "train", str(manifest), "--profile", "full"),
        *("--runs-dir", str(runs), "--run-id", "a"),
        *("--set", f"description=by https://me:{PASSWORD}@host and {WANDB_KEY}"),
        *("--set", f"training.config.wandb.notes={WANDB_KEY}", "--set", f'training.config.wandb.tags=["{HUB_TOKEN}"]'),
    )
    launched = fork_server.launch(
        Command(argv=argv, environment={}),
        LAUNCHER_DATA_DIR=str(tmp_path / "data"),
        HF_TOKEN=HUB_TOKEN,
        WANDB_API_KEY=WANDB_KEY,
    )
    assert launched.returncode == 0, launched.console
    assert not [secret for secret in PLANTED if secret in launched.console]
    assert find_leaks(runs) == []
    assert REDACTED in (runs / "a/manifest.json").read_text(), "the secret was there and is redacted"
    assert REDACTED in (runs / "a/request.json").read_text()


@pytest.mark.slow
def test_error_of_failed_run_contains_no_secret(tmp_path: Path) -> None:
    """The base model cannot be loaded, so the error quotes its path, which is also the value of HF_TOKEN."""
    harness = make_harness(tmp_path)
    tree = json.loads(harness.manifest(TrainingCase(strategy="single", ranks_per_node=1)).read_text())
    manifest = tmp_path / "planted.json"
    manifest.write_text(json.dumps(tree))
    for file in harness.base.glob("*.safetensors"):
        file.write_bytes(b"broken")
    result = launcher(
        tmp_path,
        *("train", str(manifest), "--profile", "full", "--runs-dir", str(harness.runs), "--run-id", "a"),
        HF_TOKEN=str(harness.base),  # what the error quotes
    )
    assert result.returncode == 2, result.stderr
    assert "cannot be loaded" in result.stderr
    assert find_leaks(harness.runs) == []
    outcome = json.loads((harness.runs / "a/outcome.json").read_text())
    assert REDACTED in outcome["error"]
    assert str(harness.base) not in outcome["error"]


def test_path_with_password_is_refused(harness: Harness, tmp_path: Path) -> None:
    tree = json.loads(harness.manifest(TrainingCase(strategy="single", ranks_per_node=1)).read_text())
    tree["training"]["dataset"]["path"] = f"https://me:{PASSWORD}@host/rows.jsonl"
    manifest = tmp_path / "planted.json"
    manifest.write_text(json.dumps(tree))
    result = forked_python.run_python(["-m", "launcher", "plan", str(manifest)])
    assert result.returncode == 2
    assert "training.dataset.path: contains a password or a token" in result.stderr
    assert PASSWORD not in result.stdout + result.stderr
