"""Runs the uploader on a run directory with a real wandb, and reads its records back with wandb's own reader."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.core import metrics
from launcher.core.metrics import StepMetrics
from launcher.core.run_paths import RunPaths
from tests.conftest import ROOT, python_path
from tests.forked_python import run_python
from tests.made_runs import MadeRun, make_plan_of, make_rows, write_run


@dataclass(frozen=True, kw_only=True)
class OfflineRun:
    """Records of one .wandb file."""

    records: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record[kind] for record in self.records if record["type"] == kind]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [record["item"] for record in self.of("history")]

    @property
    def run(self) -> dict[str, Any]:
        (run,) = self.of("run")
        return run

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = dict(self.run["config"]["update"])
        for record in self.of("config"):
            config |= record["update"]
        return config

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = {}
        for record in self.of("summary"):
            summary |= record.get("update", {})
        return summary


def make_run(runs_dir: Path, made: MadeRun) -> RunPaths:
    """Write a run directory like a training: rows with their time, and a manifest."""
    rows, clock = [], 0.0
    for row in make_rows(made, make_plan_of(made)):
        clock = max(clock + 0.001, row.values.get(metrics.TOTAL_SECONDS, 0.0))
        rows.append(replace(row, values={**row.values, metrics.TOTAL_SECONDS: clock}))
    paths = write_run(runs_dir, made, rows)
    shutil.copyfile(ROOT / "experts" / made.expert / "manifest.json", paths.manifest)
    return paths


def cut_rows(paths: RunPaths, count: int) -> list[str]:
    """Remove the last lines and return them."""
    lines = paths.metrics.read_text().splitlines(keepends=True)
    paths.metrics.write_text("".join(lines[:-count]))
    return lines[-count:]


def environment(home: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "NETRC"))}
    return {**variables, "PYTHONPATH": python_path(), "HOME": str(home), **(more or {})}


def upload(
    paths: RunPaths, env: Mapping[str, str], *arguments: str, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run the uploader until it exits."""
    words = ["-m", "launcher.training.tracking.wandb_uploader", str(paths.root), *arguments]
    return run_python(words, cwd=cwd, env=env)


def folders(paths: RunPaths) -> list[Path]:
    return sorted(path for path in (paths.root / "wandb").glob("*run-*") if path.is_dir() and not path.is_symlink())


def read_back(folder: Path) -> OfflineRun:
    """Read the records as `wandb leet inspect` does, without its start, which takes a second."""
    spec = importlib.util.find_spec("wandb")
    assert spec is not None
    assert spec.origin is not None
    program = str(Path(spec.origin).parent / "bin/wandb-core")
    records = []
    for file in folder.glob("run-*.wandb"):
        command = [program, "leet", "inspect", "--json", "--no-observability", "--run-file", str(file), str(folder)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)  # it may be empty
        records += [json.loads(line) for line in result.stdout.splitlines()]
    return OfflineRun(records=records)


def values_of(row: StepMetrics) -> dict[str, float]:
    return {**row.values, "train/step": row.step, "train/epoch": row.epoch}
