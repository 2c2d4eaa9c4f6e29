"""Secrets are planted wherever a user might put them; nothing that a run leaves or shows has any of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.redaction import BLOT, find_known_secrets, is_secret_name, redact_text, redact_tree
from tests.conftest import ROOT, python_path
from tests.distributed.bench import Cell, write_bench

PASSWORD = "correct-horse-battery-9"
HUB_TOKEN = "hf_QwErTyUiOpAsDfGhJkLzXcVbNm"
WANDB_KEY = "0123456789abcdef0123456789abcdef01234567"
PLANTED = (PASSWORD, HUB_TOKEN, WANDB_KEY)


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "WANDB_API_KEY", "api_key", "password", "AWS_SECRET_ACCESS_KEY", "client-secret", "auth.token"]
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["max_new_tokens", "tokens_per_row", "mean_tokens", "eos_token", "tokenizer", "author", "keyword", "keys"]
)
def test_names_that_only_sound_like_it(name: str) -> None:
    assert not is_secret_name(name)


def test_texts() -> None:
    assert redact_text(f"clone https://me:{PASSWORD}@host/x?y=1") == f"clone https://{BLOT}@host/x?y=1"
    assert redact_text(f"use {HUB_TOKEN}.") == f"use {BLOT}."
    assert redact_text(f"key {WANDB_KEY} was refused", (WANDB_KEY,)) == f"key {BLOT} was refused"
    assert redact_text("mail me@host, see https://host/a@b") == "mail me@host, see https://host/a@b"
    tree = {"a": {"api_key": "x", "b": [f"https://{PASSWORD}@h"]}, "token": "", "max_new_tokens": 5}
    assert redact_tree(tree) == {"a": {"api_key": BLOT, "b": [f"https://{BLOT}@h"]}, "token": "", "max_new_tokens": 5}
    assert find_known_secrets({"PWD": "/a/long/place", "OLDPWD": "/another/place"}) == (), "where a shell stands"
    assert find_known_secrets({"DB_PWD": PASSWORD}) == (PASSWORD,)
    assert find_known_secrets({"HF_TOKEN": HUB_TOKEN, "OTHER": "aaaaaaaaaaaa", "X_TOKEN": "short"}) == (HUB_TOKEN,)


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


def test_nothing_that_a_run_leaves_has_a_secret(tmp_path: Path) -> None:
    bench = write_bench(tmp_path)
    tree = json.loads(bench.manifest(Cell(strategy="single", ranks_per_node=1)).read_text())
    tree["author"] = f"https://me:{PASSWORD}@host/me"
    tree.setdefault("training", {}).setdefault("config", {})["max_steps"] = 2
    manifest = tmp_path / "planted.json"
    manifest.write_text(json.dumps(tree))
    result = launcher(
        tmp_path,
        *("train", str(manifest), "--profile", "full", "--runs-dir", str(bench.runs), "--run-id", "a"),
        *("--set", f"description=by https://me:{PASSWORD}@host"),
        HF_TOKEN=HUB_TOKEN,
        WANDB_API_KEY=WANDB_KEY,
    )
    assert result.returncode == 0, result.stderr
    assert not [secret for secret in PLANTED if secret in result.stdout + result.stderr]
    assert find_leaks(bench.runs) == []
    assert BLOT in (bench.runs / "a/manifest.json").read_text(), "it was there to be blotted out"
    assert BLOT in (bench.runs / "a/request.json").read_text()


def test_a_run_that_fails_quotes_no_secret(tmp_path: Path) -> None:
    """The base's name is wrong, and so is quoted in the error that the training ends with."""
    bench = write_bench(tmp_path)
    tree = json.loads(bench.manifest(Cell(strategy="single", ranks_per_node=1)).read_text())
    manifest = tmp_path / "planted.json"
    manifest.write_text(json.dumps(tree))
    for file in bench.base.glob("*.safetensors"):
        file.write_bytes(b"broken")
    result = launcher(
        tmp_path,
        *("train", str(manifest), "--profile", "full", "--runs-dir", str(bench.runs), "--run-id", "a"),
        HF_TOKEN=str(bench.base),  # what the error quotes
    )
    assert result.returncode == 2, result.stderr
    assert "cannot be loaded" in result.stderr
    assert find_leaks(bench.runs) == []
    outcome = json.loads((bench.runs / "a/outcome.json").read_text())
    assert BLOT in outcome["error"]
    assert str(bench.base) not in outcome["error"]


def test_a_path_with_a_password_is_refused(tmp_path: Path) -> None:
    bench = write_bench(tmp_path)
    tree = json.loads(bench.manifest(Cell(strategy="single", ranks_per_node=1)).read_text())
    tree["training"]["dataset"]["path"] = f"https://me:{PASSWORD}@host/rows.jsonl"
    manifest = tmp_path / "planted.json"
    manifest.write_text(json.dumps(tree))
    result = launcher(tmp_path, "plan", str(manifest))
    assert result.returncode == 2
    assert "training.dataset.path: it holds a password or a token" in result.stderr
    assert PASSWORD not in result.stdout + result.stderr
