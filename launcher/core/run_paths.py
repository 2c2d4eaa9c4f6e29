"""File names of a run directory, and atomic writes that never replace another run's files."""

from __future__ import annotations

import glob
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

from launcher.core.errors import InputError, hint_for
from launcher.core.processes import is_alive
from launcher.core.redaction import redact_file

_PLAN = "plan.json"  # its texts are redacted when the plan is made; a training uses its values
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MAX_PART_LENGTH = 38  # of an automatic run id, which has two parts, a time and possibly a counter


# Ends hints about runs that were not found.
FIND_ELSEWHERE = (
    "to find a run that was started in another folder, give its path, such as ../project/runs/RUN, or --runs-dir"
)


def get_home() -> Path:
    """Return the home folder; `/` for a user without one, as in containers that run with an arbitrary user id."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def expand_home(path: str) -> str:
    """Replace a leading `~` or `~user` by the home folder, as a shell does; unchanged for an unknown user.

    A shell leaves it in quotes, after `=` and in files. `./~` is a folder that is called ~.
    """
    return os.path.expanduser(path)  # noqa: PTH111  (unlike Path.expanduser, never raises)


def get_env_path(variable: str) -> Path | None:
    """Return the path in an environment variable; None if it is unset or empty."""
    configured = os.environ.get(variable)
    return Path(expand_home(configured)) if configured else None


def get_cache_folder() -> Path:
    """Return the cache folder for measurements and checks of this machine, which later runs use."""
    if (configured := get_env_path("LAUNCHER_CACHE_DIR")) is not None:
        return configured
    return Path(os.environ.get("XDG_CACHE_HOME") or get_home() / ".cache") / "expert-launcher"


class RunEntry:
    """Descriptor that returns the path of a file or folder in a run directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunPaths, owner: type[RunPaths]) -> Path:
        return run.root / self._name


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Paths of runs/<id>/.

    Rendered files contain these paths as they are: a relative one is relative to the directory where the command is
    started, which is the project root for `launcher train`, `accelerate launch` and `sbatch`.
    """

    root: Path
    node_rank: int = 0  # of the node that writes: nodes may share the directory, but not a log

    lock = RunEntry(".lock")
    manifest = RunEntry("manifest.json")
    request = RunEntry("request.json")  # the user's request, from which a resumed run is planned again
    hardware = RunEntry("hardware.json")
    plan = RunEntry(_PLAN)
    accelerate = RunEntry("accelerate.yaml")
    deepspeed = RunEntry("deepspeed.json")
    command = RunEntry("command.txt")
    slurm = RunEntry("slurm.sbatch")
    skypilot = RunEntry("skypilot.yaml")
    kubernetes = RunEntry("kubernetes.yaml")
    dstack = RunEntry("train.dstack.yml")  # dstack requires the suffix
    outcome = RunEntry("outcome.json")
    metrics = RunEntry("metrics.jsonl")
    report = RunEntry("report.md")
    wandb = RunEntry("wandb.json")  # the W&B run, and how much was logged to it
    checkpoints = RunEntry("checkpoints")
    adapter = RunEntry("adapter")  # the result: an adapter in PEFT format, or the full model after full fine-tuning
    evaluation = RunEntry("eval.json")  # result of the last `launcher eval` that covered as much as those before
    partial_evaluation = RunEntry("eval-partial.json")  # result of a later one that covered less
    evaluations = RunEntry("evaluations")  # task evaluations during training; step 0 is the base model
    profile = RunEntry("profile")  # profiler output: a summary, the trace and a memory snapshot
    merged = RunEntry("merged")
    logs = RunEntry("logs")
    node_facts = RunEntry("logs/nodes.json")  # facts about each node at the start of a multi-node run

    @property
    def run_id(self) -> str:
        """Name of the run directory."""
        return self.root.name

    @property
    def console_log(self) -> Path:
        """Complete stdout and stderr of the training on this node."""
        return self.logs / (f"console-node{self.node_rank}.log" if self.node_rank else "console.log")

    def checkpoint(self, step: int) -> Path:
        """Folder of the checkpoint after a step."""
        return self.checkpoints / f"step-{step:06d}"

    def evaluation_at(self, step: int) -> Path:
        """File of the task evaluation after a step."""
        return self.evaluations / f"step-{step:06d}.json"


def find_run_entry(path: Path) -> str | None:
    """Return the entry of a run directory that a path is or is below, such as `adapter`; None outside of runs."""
    names = {entry._name.split("/")[0] for entry in vars(RunPaths).values() if isinstance(entry, RunEntry)}
    absolute = path.absolute()
    for folder, below in zip(absolute.parents, (absolute, *absolute.parents), strict=False):
        if below.name in names and (folder / _PLAN).is_file() and (folder / "request.json").is_file():
            return below.name
    return None


def open_run(folder: Path) -> RunPaths:
    """Return the paths of an existing run directory; `.` and `..` are resolved, since a run is named by its folder."""
    return RunPaths(folder.resolve() if folder.name in ("", "..") else folder)


def format_resume_command(root: Path) -> str:
    """Return the command that continues the run in this directory, whose request names the expert."""
    folder = () if str(root.parent) == "runs" else ("--runs-dir", str(root.parent))
    return shlex.join(("launcher", "train", "--resume", root.name, *folder))


def make_run_id(expert: str, hardware_name: str, when: datetime) -> str:
    """Make a run id that sorts by time within an expert: neo4j-20261115-142530-4xrtx4090."""
    return f"{_sanitize(expert)}-{when:%Y%m%d-%H%M%S}-{_sanitize(hardware_name)}"


def _sanitize(text: str) -> str:
    """Make a name safe for use as a file name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:_MAX_PART_LENGTH].rstrip("-._") or "x"


def make_run_paths(runs_dir: Path, run_id: str, flag: str = "--run-id") -> RunPaths:
    """Return the paths of a run, refusing an id of `flag` that leads out of the runs folder."""
    if not _RUN_ID.fullmatch(run_id):
        raise InputError(f"{flag} {run_id!r}: a run id has 1 to 100 letters, digits, dots, dashes and underscores")
    if not str(runs_dir).isprintable():
        raise InputError(
            f"--runs-dir {str(runs_dir)!r}: contains unprintable characters, which are not allowed in job scripts"
        )
    return RunPaths(runs_dir / run_id)


def check_free(paths: RunPaths) -> None:
    """Refuse a run directory that already exists."""
    if os.path.lexists(paths.root):
        raise _make_exists_error(paths)


def create_run(paths: RunPaths) -> None:
    """Create a run directory with an empty logs/; an existing run is never touched."""
    if not _make_root(paths):
        raise _make_exists_error(paths)


def _make_exists_error(paths: RunPaths) -> InputError:
    return InputError(
        f"{paths.root} already exists",
        hint=f"--resume {paths.run_id} instead of --run-id continues it if it was interrupted; for a new run, choose "
        "another --run-id",
    )


def create_next_run(runs_dir: Path, run_id: str) -> RunPaths:
    """Create a run directory with an automatic name; if it is taken, append -2, -3, ..."""
    for number in count(1):
        paths = make_run_paths(runs_dir, run_id if number == 1 else f"{run_id}-{number}")
        if _make_root(paths):
            return paths
    raise AssertionError("unreachable")


def _make_root(paths: RunPaths) -> bool:
    """Create the directory and return whether it is new; atomic, so two processes never get the same one."""
    try:
        paths.root.mkdir(parents=True)
    except OSError as error:
        if isinstance(error, FileExistsError) and os.path.lexists(paths.root):  # not a folder above it
            return False
        hint = hint_for(error, "--runs-dir") or "choose another folder with --runs-dir"
        raise InputError(f"{paths.root} cannot be created: {error.strerror}", hint=hint) from None
    with removed_on_failure(paths):
        try:
            paths.logs.mkdir()
        except OSError as error:
            hint = hint_for(error, "--runs-dir")
            raise InputError(f"{paths.logs} cannot be created: {error.strerror}", hint=hint) from None
    return True


@contextmanager
def removed_on_failure(paths: RunPaths) -> Iterator[None]:
    """Remove the run directory if writing it fails, so that it is complete or does not exist."""
    try:
        yield
    except BaseException:
        shutil.rmtree(paths.root, ignore_errors=True)
        raise


def write_files(folder: Path, texts: Mapping[str, str]) -> None:
    """Write several text files atomically, in order."""
    for name, text in texts.items():
        write_text_atomically(folder / name, text, redacts=name != _PLAN)


def write_text_atomically(path: Path, text: str, *, redacts: bool = True) -> None:
    """Write a file via a temporary one that is synced and renamed, so that it is never incomplete.

    All text that we write comes through here, so secrets are redacted here. `redacts=False` is for files of values that
    later processes use, and for content that was redacted when it was made.
    """
    text = redact_file(path, text) if redacts else text
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
            pid = leftover.name.split(".")[-2]
            if pid.isdecimal() and not is_alive(int(pid)):  # it was killed while it wrote
                leftover.unlink(missing_ok=True)
        temporary.unlink(missing_ok=True)  # of a killed process; "x" does not write through a link
        with temporary.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(f"{path} cannot be written: {error.strerror}", hint=hint_for(error)) from None


def sync_folder(folder: Path) -> None:
    """Flush a folder's files and their names to disk (fsync)."""
    for file in (*folder.iterdir(), folder):
        if file == folder or file.is_file():
            sync_path(file)


def sync_path(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
