"""Run directories: creating a new one, finding one to resume, and the inputs that every run stores.

`accelerate launch launcher/train.py --manifest …` creates its run here too, so render is not imported.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from launcher.core.errors import InputError
from launcher.core.output_path import check_output_folder
from launcher.core.redaction import get_known_secrets, redact_tree
from launcher.core.run_paths import (
    FIND_ELSEWHERE,
    RunPaths,
    check_free,
    create_next_run,
    create_run,
    make_run_id,
    make_run_paths,
    open_run,
)
from launcher.hardware.model import Hardware
from launcher.manifest import Manifest, find_manifest, load_manifest
from launcher.manifest.trust import check_trust
from launcher.plan import load_plan
from launcher.request.request import PlannedRun, format_request, load_request
from launcher.runs.record import load_outcome


def check_new_run(runs_dir: Path, run_id: str | None = None) -> None:
    """Raise InputError if a run with this id exists or cannot be created, before data is prepared."""
    check_output_folder(str(runs_dir), "--runs-dir")
    if run_id is not None:
        check_free(make_run_paths(runs_dir, run_id))


def create_run_directory(planned: PlannedRun, runs_dir: Path, run_id: str | None) -> RunPaths:
    """Create runs/<id>/ with an empty logs/; the default id is expert, time and hardware."""
    if run_id is None:
        name = make_run_id(planned.plan.expert, _format_hardware(planned.plan.hardware), datetime.now(UTC))
        return create_next_run(runs_dir, name)
    paths = make_run_paths(runs_dir, run_id)
    create_run(paths)
    return paths


def find_run_to_resume(runs_dir: Path, name: str, expert: str) -> RunPaths:
    """Return a run by id or path; without a name, the expert's last unfinished run."""
    if name:
        is_path = Path(name).is_dir() and (Path(name).is_absolute() or not (runs_dir / name).is_dir())
        paths = open_run(Path(name)) if is_path else make_run_paths(runs_dir, name)
        if not paths.plan.is_file():
            names = [run.run_id for run in map(RunPaths, _list_folders(runs_dir)) if run.plan.is_file()]
            what = f"it has no {paths.plan.name}" if paths.root.is_dir() else "there is no such run"
            newest = f"has the runs {', '.join(sorted(names)[-5:])}" if names else "has no runs"
            hint = f"{runs_dir.absolute()} {newest}; {FIND_ELSEWHERE}"
            raise InputError(f"{paths.root} cannot be resumed: {what}", hint=hint)
        _check_expert(paths, expert)
        return check_links(paths)
    manifest = find_manifest(expert)
    runs = [run for run in map(RunPaths, _list_folders(runs_dir)) if _is_unfinished(run, manifest)]
    if not runs:
        raise InputError(
            f"no unfinished run of {expert} in {runs_dir.absolute()}",
            hint="--resume RUN chooses a run; without --resume a new run starts",
        )
    return check_links(max(runs, key=lambda run: run.request.stat().st_mtime))


def _check_expert(paths: RunPaths, expert: str) -> None:
    """Raise InputError if a run trains another expert than the one named; an unreadable plan is reported later."""
    trained = None
    with suppress(InputError):
        trained = load_plan(paths.plan).expert
    if expert and trained not in (None, load_manifest(find_manifest(expert)).manifest.expert):
        raise InputError(
            f"{paths.root} is a run of {trained}, not of {expert}",
            hint=f"name {trained} to resume it; without --resume, a new run of {expert} starts",
        )


def check_links(paths: RunPaths) -> RunPaths:
    """Raise InputError if an untrusted run directory has symlinks that lead outside, where a training would write."""
    check_trust(list_outside_links(paths.root), paths.root, what="has links that lead outside and need --trust")
    return paths


# W&B links every attempt's folder to a log in its cache. It never writes through the link: a new attempt has a new
# folder.
_WANDB_LINK = "wandb/*/logs/debug-core.log"


def list_outside_links(root: Path) -> tuple[str, ...]:
    """Return at most 20 symbolic links of a run directory that point out of it, without those that W&B makes."""
    links = []
    for folder, folders, files in os.walk(root):
        for path in (Path(folder) / name for name in (*folders, *files)):
            with suppress(OSError, RuntimeError):
                if path.is_symlink() and not path.resolve().is_relative_to(root.resolve()):
                    name = path.relative_to(root)
                    if not (name.match(_WANDB_LINK) and len(name.parts) == 4):
                        links.append(f"{name} -> {path.readlink()}")
    return tuple(sorted(links)[:20])


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
    """Return the texts of a run's input files by file name: manifest, hardware, request, plan and chat template."""
    plan = planned.plan
    source, file = plan.data.chat_template, plan.data.chat_template_file
    template = {} if source is None or file is None else {file: source}
    return {
        **template,
        paths.manifest.name: _as_json(_redact_manifest(planned.loaded.manifest)),
        paths.hardware.name: _as_json(plan.hardware.model_dump(mode="json")),
        paths.request.name: format_request(planned.request),
        paths.plan.name: plan.model_dump_json(indent=2) + "\n",
    }


def _redact_manifest(manifest: Manifest) -> object:
    """Return the manifest with secrets redacted, except where a redacted value would make it invalid."""
    tree = redact_tree(manifest.model_dump(mode="json", exclude_unset=True), known=())
    for secret in get_known_secrets():
        redacted = redact_tree(tree, known=(secret,))
        with suppress(ValidationError):
            Manifest.model_validate_json(json.dumps(redacted))
            tree = redacted
    return tree


def _format_hardware(hardware: Hardware) -> str:
    if hardware.gpu is None:
        return "cpu"
    nodes = f"{hardware.nodes}x" if hardware.nodes > 1 else ""
    return f"{nodes}{hardware.gpus_per_node}x{hardware.gpu.key}"


def _as_json(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
