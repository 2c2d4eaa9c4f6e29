"""Every file name of a run directory, and the only ways to write one: atomically, and never over another run's."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

from launcher.errors import InputError

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LONGEST_PART = 38  # of an automatic run id, which has two parts, a time and perhaps a counter


@dataclass(frozen=True, slots=True)
class RunPaths:
    """runs/<id>/ and what lies in it.

    Rendered files mention these paths as given: a relative one counts from the directory in which the command is
    started, the project root for `launcher train`, `accelerate launch` by hand and `sbatch` alike.
    """

    root: Path
    node_rank: int = 0  # of the node that writes here: nodes may share the directory, but not a log

    @property
    def run_id(self) -> str:
        return self.root.name

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.json"

    @property
    def request(self) -> Path:
        """What was asked for: a run that is taken up again is asked for the same."""
        return self.root / "request.json"

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
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def report(self) -> Path:
        return self.root / "report.md"

    @property
    def wandb(self) -> Path:
        """Where the run lies in Weights & Biases, and what it was told so far."""
        return self.root / "wandb.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    @property
    def adapter(self) -> Path:
        """What was trained: an adapter in PEFT's format, or the whole model under full fine-tuning."""
        return self.root / "adapter"

    @property
    def evaluation(self) -> Path:
        """What its last evaluation found."""
        return self.root / "eval.json"

    @property
    def evaluations(self) -> Path:
        """What was found of the expert's answers while it trained; step 0 is the base."""
        return self.root / "evaluations"

    def evaluation_at(self, step: int) -> Path:
        return self.evaluations / f"step-{step:06d}.json"

    @property
    def profile(self) -> Path:
        """Of the steps that were traced: a summary, the trace, what memory held."""
        return self.root / "profile"

    @property
    def merged(self) -> Path:
        return self.root / "merged"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def node_facts(self) -> Path:
        """What each node was when the run began, where there were many."""
        return self.logs / "nodes.json"

    @property
    def console_log(self) -> Path:
        """All that the training wrote to its stdout and stderr, on this node."""
        return self.logs / (f"console-node{self.node_rank}.log" if self.node_rank else "console.log")


def make_run_id(expert: str, hardware_name: str, when: datetime) -> str:
    """Sorts by time within an expert: neo4j-20261115-142530-4xrtx4090."""
    return f"{_tame(expert)}-{when:%Y%m%d-%H%M%S}-{_tame(hardware_name)}"


def _tame(text: str) -> str:
    """A foreign name, made fit for a file name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:_LONGEST_PART].rstrip("-._") or "x"


def name_run(runs_dir: Path, run_id: str) -> RunPaths:
    """Where a run will lie. Its id is one tame name: it cannot lead out of the runs' folder."""
    if not _RUN_ID.fullmatch(run_id):
        raise InputError(f"--run-id {run_id!r}: a run id has 1 to 100 letters, digits, dots, dashes and underscores")
    if not str(runs_dir).isprintable():
        raise InputError(f"--runs-dir {str(runs_dir)!r}: it has characters that cannot stand in a script")
    return RunPaths(runs_dir / run_id)


def check_free(paths: RunPaths) -> None:
    if os.path.lexists(paths.root):
        raise _exists_already(paths)


def create_run(paths: RunPaths) -> None:
    """A new run directory, empty but for logs/. A run that exists is never touched."""
    if not _make_root(paths):
        raise _exists_already(paths)


def _exists_already(paths: RunPaths) -> InputError:
    return InputError(
        f"{paths.root} exists already", hint="choose another --run-id, or delete that run if you no longer need it"
    )


def create_next_run(runs_dir: Path, run_id: str) -> RunPaths:
    """A new run directory whose name nobody chose: where it is taken, as by a run of the same second, -2, -3, ..."""
    for number in count(1):
        paths = name_run(runs_dir, run_id if number == 1 else f"{run_id}-{number}")
        if _make_root(paths):
            return paths
    raise AssertionError("unreachable")


def _make_root(paths: RunPaths) -> bool:
    """Whether the directory is new: the file system decides, so two launchers never get the same one."""
    try:
        paths.root.mkdir(parents=True)
    except OSError as error:
        if isinstance(error, FileExistsError) and os.path.lexists(paths.root):  # not a folder above it
            return False
        raise InputError(
            f"{paths.root} cannot be made: {error.strerror}", hint="--runs-dir names another place"
        ) from None
    with removed_on_failure(paths):
        try:
            paths.logs.mkdir()
        except OSError as error:
            raise InputError(f"{paths.logs} cannot be made: {error.strerror}", hint="is the disk full?") from None
    return True


@contextmanager
def removed_on_failure(paths: RunPaths) -> Iterator[None]:
    """A run directory is whole or not there, whatever stops the writing: a full disk, Ctrl-C, our bug."""
    try:
        yield
    except BaseException:
        shutil.rmtree(paths.root, ignore_errors=True)
        raise


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


def sync_folder(folder: Path) -> None:
    """Its files, and the names that it has for them, are on the disk, not only on their way to it."""
    for file in (*folder.iterdir(), folder):
        if file == folder or file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
