"""A new run directory and the inputs that every run keeps: manifest, hardware and plan, resolved.

A bare `accelerate launch launcher/train.py --manifest …` makes its run here too, so nothing of render is used.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from launcher.hardware import Hardware
from launcher.inputs import PlannedRun
from launcher.paths import RunPaths, check_free, create_next_run, create_run, make_run_id, name_run


def check_run_id(runs_dir: Path, run_id: str | None) -> None:
    """Raises what create_run_directory would, before anybody waits for data to be prepared."""
    if run_id is not None:
        check_free(name_run(runs_dir, run_id))


def create_run_directory(planned: PlannedRun, runs_dir: Path, run_id: str | None) -> RunPaths:
    """runs/<id>/, new and empty but for logs/. Without an id: expert, time and hardware."""
    if run_id is None:
        name = make_run_id(planned.plan.expert, _name_hardware(planned.plan.hardware), datetime.now(UTC))
        return create_next_run(runs_dir, name)
    paths = name_run(runs_dir, run_id)
    create_run(paths)
    return paths


def input_texts(planned: PlannedRun, paths: RunPaths) -> dict[str, str]:
    plan = planned.plan
    return {
        paths.manifest.name: _as_json(planned.loaded.manifest.model_dump(mode="json", exclude_unset=True)),
        paths.hardware.name: _as_json(plan.hardware.model_dump(mode="json")),
        paths.plan.name: plan.model_dump_json(indent=2) + "\n",
    }


def _name_hardware(hardware: Hardware) -> str:
    if hardware.gpu is None:
        return "cpu"
    nodes = f"{hardware.nodes}x" if hardware.nodes > 1 else ""
    return f"{nodes}{hardware.gpus_per_node}x{hardware.gpu.key}"


def _as_json(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
