"""Uplinks for tests: real run directories told to a real wandb, and what it wrote read back with its own reader."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher import metrics
from launcher.metrics import StepMetrics
from launcher.paths import RunPaths
from tests.conftest import ROOT, python_path
from tests.made_runs import MadeRun, make_plan_of, make_rows, write_run


@dataclass(frozen=True, kw_only=True)
class Offline:
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
        told: dict[str, Any] = dict(self.run["config"]["update"])
        for record in self.of("config"):
            told |= record["update"]
        return told

    @property
    def summary(self) -> dict[str, Any]:
        told: dict[str, Any] = {}
        for record in self.of("summary"):
            told |= record.get("update", {})
        return told


def make_run(runs_dir: Path, made: MadeRun) -> RunPaths:
    """As a training leaves it: every row has its time, and there is a manifest."""
    rows, clock = [], 0.0
    for row in make_rows(made, make_plan_of(made)):
        clock = max(clock + 0.001, row.values.get(metrics.TOTAL_SECONDS, 0.0))
        rows.append(replace(row, values={**row.values, metrics.TOTAL_SECONDS: clock}))
    paths = write_run(runs_dir, made, rows)
    shutil.copyfile(ROOT / "experts" / made.expert / "manifest.json", paths.manifest)
    return paths


def cut_rows(paths: RunPaths, count: int) -> list[str]:
    """Takes the last lines away, and returns them."""
    lines = paths.metrics.read_text().splitlines(keepends=True)
    paths.metrics.write_text("".join(lines[:-count]))
    return lines[-count:]


def environment(home: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "NETRC"))}
    return {**kept, "PYTHONPATH": python_path(), "HOME": str(home), **(more or {})}


def tell(paths: RunPaths, env: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """All that lies there, to its end."""
    command = [sys.executable, "-m", "launcher.training.uplink", str(paths.root), *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=120)


def folders(paths: RunPaths) -> list[Path]:
    return sorted(path for path in (paths.root / "wandb").glob("*run-*") if path.is_dir() and not path.is_symlink())


def read_back(folder: Path) -> Offline:
    command = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--json", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)  # it may be new and empty
    return Offline(records=[json.loads(line) for line in result.stdout.splitlines()])


def values_of(row: StepMetrics) -> dict[str, float]:
    return {**row.values, "train/step": row.step, "train/epoch": row.epoch}
