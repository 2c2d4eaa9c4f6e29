"""Every file name of a run directory, and the only ways to write one: atomically, and never over another run's."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from launcher.errors import InputError

_RUN_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")


@dataclass(frozen=True, slots=True)
class RunPaths:
    """runs/<id>/ and what lies in it.

    Rendered files mention these paths as given: a relative one counts from the directory in which the command is
    started, the project root for `launcher train`, `accelerate launch` by hand and `sbatch` alike.
    """

    root: Path

    @property
    def run_id(self) -> str:
        return self.root.name

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.json"

    @property
    def hardware(self) -> Path:
        return self.root / "hardware.json"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def accelerate(self) -> Path:
        return self.root / "accelerate.yaml"

    @property
    def deepspeed(self) -> Path:
        return self.root / "deepspeed.json"

    @property
    def command(self) -> Path:
        return self.root / "command.txt"

    @property
    def slurm(self) -> Path:
        return self.root / "slurm.sbatch"

    @property
    def outcome(self) -> Path:
        return self.root / "outcome.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"


def make_run_id(expert: str, hardware_name: str, when: datetime) -> str:
    """Sorts by time within an expert: neo4j-20261115-142530-4xrtx4090."""
    return f"{_tame(expert)}-{when:%Y%m%d-%H%M%S}-{_tame(hardware_name)}"


def _tame(text: str) -> str:
    """A foreign name, made fit for a file name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "x"


def name_run(runs_dir: Path, run_id: str) -> RunPaths:
    """Where a run will lie. Its id is one tame name: it cannot lead out of the runs' folder."""
    if not _RUN_ID.match(run_id):
        raise InputError(f"--run-id {run_id!r}: a run id has 1 to 100 letters, digits, dots, dashes and underscores")
    if not str(runs_dir).isprintable():
        raise InputError(f"--runs-dir {str(runs_dir)!r}: it has characters that cannot stand in a script")
    return RunPaths(runs_dir / run_id)


def create_run(paths: RunPaths) -> None:
    """A new run directory, empty but for logs/. A run that exists is never touched."""
    try:
        paths.root.mkdir(parents=True)
        paths.logs.mkdir()
    except FileExistsError:
        raise InputError(
            f"{paths.root} exists already", hint="choose another --run-id, or delete that run if you no longer need it"
        ) from None
    except OSError as error:
        raise InputError(
            f"{paths.root} cannot be made: {error.strerror}", hint="--runs-dir names another place"
        ) from None


def write_files(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        write_text_atomically(folder / name, text)


def write_text_atomically(path: Path, text: str) -> None:
    """The file is whole or not there: written beside, synced, renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(
            f"{path} cannot be written: {error.strerror}", hint="is the disk full, or read-only?"
        ) from None
