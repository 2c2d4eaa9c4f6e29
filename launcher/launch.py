"""Plan -> run directory: every file that the run will use, written before anything is started."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from launcher.inputs import PlannedRun
from launcher.paths import (
    RunPaths,
    create_next_run,
    create_run,
    make_run_id,
    name_run,
    removed_on_failure,
    write_files,
)
from launcher.plan.model import Plan
from launcher.render import TRAIN_SCRIPT, render


def write_run(planned: PlannedRun, runs_dir: Path, run_id: str | None) -> RunPaths:
    """runs/<id>/ with the inputs, the plan and what would be started."""
    paths = _create(planned.plan, runs_dir, run_id)
    with removed_on_failure(paths):
        write_files(paths.root, _render_texts(planned, paths))
    return paths


def _create(plan: Plan, runs_dir: Path, run_id: str | None) -> RunPaths:
    if run_id is None:
        return create_next_run(runs_dir, make_run_id(plan.expert, _hardware_name(plan), datetime.now(UTC)))
    paths = name_run(runs_dir, run_id)
    create_run(paths)
    return paths


def _render_texts(planned: PlannedRun, paths: RunPaths) -> dict[str, str]:
    plan = planned.plan
    return {
        paths.manifest.name: _as_json(planned.loaded.manifest.model_dump(mode="json", exclude_unset=True)),
        paths.hardware.name: _as_json(plan.hardware.model_dump(mode="json")),
        paths.plan.name: plan.model_dump_json(indent=2) + "\n",
        **render(plan, paths, script=_train_script()),
    }


def _train_script() -> str:
    """As a user would type it in a checkout; the installed file elsewhere."""
    return TRAIN_SCRIPT if Path(TRAIN_SCRIPT).is_file() else str(Path(__file__).resolve().with_name("train.py"))


def _hardware_name(plan: Plan) -> str:
    hardware = plan.hardware
    if hardware.gpu is None:
        return "cpu"
    nodes = f"{hardware.nodes}x" if hardware.nodes > 1 else ""
    return f"{nodes}{hardware.gpus_per_node}x{hardware.gpu.key}"


def _as_json(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
