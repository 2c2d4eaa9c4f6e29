"""One short smoke training shared by all tests of finished runs, and modified copies of it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from launcher.core.run_paths import RunPaths
from launcher.plan.model import Plan
from launcher.training.model.base_model import load_base
from tests import forked_python
from tests.conftest import ROOT, find_parent, python_path

# Sizes of a training of seconds; a test of its own generates answers during the training.
_SETTINGS = {
    "evaluation.task_rows": 0,
    "training.config.batch_size": 2,
    "training.config.gradient_accumulation_steps": 1,
    "training.config.learning_rate": 2e-3,
}
_MADE: list[Trained] = []  # the fixture is imported by several modules, each of which would make its own


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    runs_dir: Path
    data_dir: Path
    base: Path  # the tiny base as a folder that transformers can load

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.runs_dir / "a")

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": python_path(),
            "OMP_NUM_THREADS": "1",
            "LAUNCHER_DATA_DIR": str(self.data_dir),
        }


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Three steps of neo4j on the tiny base, trained by the first test process that needs them; the others copy."""
    if not _MADE:
        folder = tmp_path_factory.mktemp("trained")
        if "PYTEST_XDIST_WORKER" not in os.environ:
            _train(folder)
        else:
            shared = tmp_path_factory.getbasetemp().parent / "trained"
            with shared.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not shared.exists():
                    _train(folder)
                    shutil.copytree(folder, partial := shared.with_suffix(".partial"))
                    partial.rename(shared)
            if not (folder / "runs").exists():
                shutil.copytree(shared, folder, dirs_exist_ok=True)
        _MADE.append(_describe(folder))
    return _MADE[0]


def _describe(folder: Path) -> Trained:
    return Trained(runs_dir=folder / "runs", data_dir=folder / "data", base=folder / "base")


def _train(folder: Path) -> None:
    made = _describe(folder)
    manifest = copy_expert("neo4j", folder / "experts", num_train=200, num_validation=8)
    script = [str(ROOT / "launcher/train.py"), "--manifest", str(manifest)]
    options = ["--max-steps", "3", "--runs-dir", str(made.runs_dir), "--run-id", "a"]
    options += [word for key, value in _SETTINGS.items() for word in ("--set", f"{key}={value}")]
    result = run_python([*script, *options], made)
    assert result.returncode == 0, result.stderr
    make_tiny(load_plan(made.paths)).save_pretrained(str(made.base))
    for file in (ROOT / "launcher/base_models/tiny_base").glob("tokenizer*"):
        shutil.copyfile(file, made.base / file.name)


def copy_expert(name: str, folder: Path, *, num_train: int, num_validation: int) -> Path:
    """Copy an expert with the first rows of its samples, of which every evaluation reads all; return the manifest."""
    source, target = ROOT / "experts" / name, folder / name
    shutil.copytree(source, target)
    for split, count in (("train", num_train), ("validation", num_validation)):
        with (source / f"sample/{split}.jsonl").open() as lines:
            (target / f"sample/{split}.jsonl").write_text("".join(islice(lines, count)))
    return target / "manifest.json"


@pytest.fixture
def data_dir(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the data folder for calls inside this process."""
    monkeypatch.setenv("LAUNCHER_DATA_DIR", str(trained.data_dir))
    return trained.data_dir


def run_python(arguments: list[str], trained: Trained, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return forked_python.run_python(arguments, cwd=cwd, env=trained.environment, needs_torch=True)


def launcher(trained: Trained, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(["-m", "launcher", verb, *arguments, "--runs-dir", str(trained.runs_dir)], trained)


def load_plan(paths: RunPaths) -> Plan:
    return Plan.model_validate_json(paths.plan.read_text())


def make_tiny(plan: Plan) -> PreTrainedModel:
    return load_base(plan, (), "sdpa", torch.device("cpu"))


def copy_run(
    trained: Trained,
    folder: Path,
    *,
    plan: Mapping[str, Any] | None = None,
    manifest: Mapping[str, Any] | None = None,
    outcome: Mapping[str, Any] | None = None,
) -> RunPaths:
    """Copy the run without its exports, with changes at dotted keys."""
    paths = RunPaths(folder / "copy")
    shutil.copytree(trained.paths.root, paths.root, ignore=shutil.ignore_patterns("merged*", ".merged*"))
    for file, changes in ((paths.plan, plan), (paths.manifest, manifest), (paths.outcome, outcome)):
        tree = json.loads(file.read_text())
        for place, value in (changes or {}).items():
            parent, key = find_parent(tree, place)
            parent[key] = value
        file.write_text(json.dumps(tree))
    return paths
