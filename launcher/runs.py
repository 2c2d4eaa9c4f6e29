"""A new run directory and the inputs that every run keeps: manifest, hardware and plan, resolved.

A bare `accelerate launch launcher/train.py --manifest …` makes its run here too, so nothing of render is used.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from launcher.errors import InputError
from launcher.hardware import Hardware
from launcher.inputs import PlannedRun, load_request, write_request
from launcher.manifest import find_manifest
from launcher.paths import RunPaths, check_free, create_next_run, create_run, make_run_id, name_run
from launcher.record import load_outcome
from launcher.redaction import redact_tree


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


def find_run_to_resume(runs_dir: Path, named: str, expert: str) -> RunPaths:
    """A run by its id or its path; without a name, the last one of this expert that is not done."""
    if named:
        is_path = Path(named).is_dir() and (Path(named).is_absolute() or not (runs_dir / named).is_dir())
        paths = RunPaths(Path(named)) if is_path else name_run(runs_dir, named)
        if not paths.plan.is_file():
            raise InputError(f"{paths.root} is not a run that can be resumed: it has no {paths.plan.name}")
        return paths
    wanted = find_manifest(expert)
    found = [run for run in map(RunPaths, _list_folders(runs_dir)) if _is_unfinished(run, wanted)]
    if not found:
        raise InputError(
            f"no run of {expert} in {runs_dir} can be resumed: none was begun, or all are done",
            hint="--resume RUN names one; without --resume a new one begins",
        )
    return max(found, key=lambda run: run.request.stat().st_mtime)


def _list_folders(runs_dir: Path) -> list[Path]:
    return [folder for folder in runs_dir.iterdir() if folder.is_dir()] if runs_dir.is_dir() else []


def _is_unfinished(run: RunPaths, manifest: Path) -> bool:
    outcome = load_outcome(run.outcome)
    if outcome is None or outcome.status == "done" or not run.request.is_file():
        return False
    try:
        return find_manifest(load_request(run.request).expert).resolve() == manifest.resolve()
    except InputError:
        return False


def input_texts(planned: PlannedRun, paths: RunPaths) -> dict[str, str]:
    plan = planned.plan
    return {
        paths.manifest.name: _as_json(redact_tree(planned.loaded.manifest.model_dump(mode="json", exclude_unset=True))),
        paths.hardware.name: _as_json(plan.hardware.model_dump(mode="json")),
        paths.request.name: write_request(planned.request),
        paths.plan.name: plan.model_dump_json(indent=2) + "\n",
    }


def _name_hardware(hardware: Hardware) -> str:
    if hardware.gpu is None:
        return "cpu"
    nodes = f"{hardware.nodes}x" if hardware.nodes > 1 else ""
    return f"{nodes}{hardware.gpus_per_node}x{hardware.gpu.key}"


def _as_json(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
