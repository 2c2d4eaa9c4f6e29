"""Checkpoints on disk: their manifest, their integrity, and the newest intact one.

A checkpoint is a folder of safetensors files and a checkpoint.json, which is written last and has the hash of every
other file. The folder is renamed only then, so a folder with its final name was complete once; the hashes show whether
it still is. The files of a large model with full fine-tuning are shards of the ranks.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue, model_validator

from launcher.core.choices import Strategy
from launcher.core.errors import InputError
from launcher.core.frozen_model import Frozen
from launcher.core.metrics import EVAL_LOSS
from launcher.core.run_files import MAX_STEPS, check_regular_files, open_regular, parse_model, read_text
from launcher.core.run_paths import RunPaths

MANIFEST_FILE = "checkpoint.json"
OPTIMIZER_FILE = "optimizer.safetensors"
RANDOM_FILE = "random.safetensors"
_NAME = re.compile(r"step-(\d{6,})")
_BLOCK = 1 << 20
_HASHING_THREADS = 8


class FileHash(Frozen):
    """Size and hash of a file."""

    num_bytes: int = Field(ge=0)
    sha256: str


class BestState(Frozen):
    """The best evaluation so far, and the number of consecutive ones since then that were not better."""

    step: int | None = Field(ge=0)
    value: float | None
    worse_in_a_row: int = Field(ge=0)
    metric: str = EVAL_LOSS  # that `value` is of
    loss: float | None = None  # of the validation split; decides between equal rates


class CheckpointManifest(Frozen):
    """Content of checkpoint.json."""

    schema_version: Literal[1] = 1
    step: int = Field(ge=0)  # completed steps, which determine the data position
    num_steps: int = Field(le=MAX_STEPS)
    chain: str  # hash over the packs of all steps so far
    data_key: str
    base: str  # fingerprint of the frozen weights
    learning: dict[str, JsonValue]
    schedule_steps: int = Field(ge=0)  # fewer than steps if loss scaling skipped some
    scaler: dict[str, float]
    best: BestState
    owes_evaluation: bool  # due at this step, but omitted because the run was stopped
    strategy: Strategy
    num_ranks: int = Field(ge=1)
    sharded: bool = False  # weights and optimizer states are in shards, not in one file each
    launcher_version: str
    saved_at: str  # ISO 8601, UTC
    files: dict[str, FileHash]

    @model_validator(mode="after")
    def _check_steps(self) -> CheckpointManifest:
        """Reject a manifest whose step, schedule steps, best step and number of steps contradict each other."""
        if not self.schedule_steps <= self.step <= self.num_steps or (self.best.step or 0) > self.step:
            raise ValueError(f"step {self.step} contradicts the schedule, the best step or the {self.num_steps} steps")
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """An intact checkpoint."""

    folder: Path
    manifest: CheckpointManifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Damaged:
    """A checkpoint that cannot be used, and why."""

    folder: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.folder} is damaged and skipped: {self.reason}"


def list_checkpoints(paths: RunPaths) -> list[Path]:
    """List complete checkpoints, newest first. Partial ones are not listed: their names differ."""
    if not paths.checkpoints.is_dir():
        return []
    named = [(match, folder) for folder in paths.checkpoints.iterdir() if (match := _NAME.fullmatch(folder.name))]
    return [folder for _, folder in sorted(named, key=lambda pair: -int(pair[0][1]))]


def read_checkpoint(folder: Path) -> Checkpoint | Damaged:
    """Read a checkpoint and verify the hash of every file; return Damaged if it cannot be used."""
    file = folder / MANIFEST_FILE
    try:
        text = read_text(file)
    except InputError as error:
        return Damaged(folder=folder, reason=error.title.replace(f"{file}: cannot be read", MANIFEST_FILE))
    try:
        check_regular_files(folder)
    except InputError as error:
        return Damaged(folder=folder, reason=error.title.removeprefix(f"{folder}/"))
    try:
        manifest = parse_model(CheckpointManifest, text, file)
    except InputError as error:
        return Damaged(folder=folder, reason=f"{MANIFEST_FILE} was not written by this version: {error.title}")
    reason = _find_unlisted(manifest) or find_damage(folder, manifest)
    return Checkpoint(folder=folder, manifest=manifest) if reason is None else Damaged(folder=folder, reason=reason)


def _find_unlisted(manifest: CheckpointManifest) -> str | None:
    """Return a message if checkpoint.json does not list a file that resuming needs, else None."""
    needed = (RANDOM_FILE,) if manifest.sharded else (RANDOM_FILE, OPTIMIZER_FILE)
    missing = next((name for name in needed if name not in manifest.files), None)
    return None if missing is None else f"{MANIFEST_FILE} does not list {missing}"


def find_newest(paths: RunPaths, at_most: int | None = None) -> tuple[Checkpoint | None, tuple[Damaged, ...]]:
    """Return the newest intact checkpoint, of step `at_most` or earlier, and the damaged ones that were skipped."""
    damaged: list[Damaged] = []
    for folder in list_checkpoints(paths):
        if at_most is not None and step_of(folder) > at_most:
            continue
        checkpoint = read_checkpoint(folder)
        if isinstance(checkpoint, Checkpoint):
            return checkpoint, tuple(damaged)
        damaged.append(checkpoint)
    return None, tuple(damaged)


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint, by its name."""
    return int(folder.name.removeprefix("step-"))


def hash_file(file: Path) -> FileHash:
    """Compute size and SHA-256 of a file."""
    digest, size = hashlib.sha256(), 0
    with open_regular(file) as source:
        while block := source.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return FileHash(num_bytes=size, sha256=digest.hexdigest())


def find_damage(folder: Path, manifest: CheckpointManifest, names: Collection[str] | None = None) -> str | None:
    """Return what is wrong with a checkpoint's files, or with those of the given names; None if nothing is."""
    if step_of(folder) != manifest.step:
        return f"its manifest belongs to step {manifest.step}"
    files = {name: expected for name, expected in manifest.files.items() if names is None or name in names}
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:  # hashing releases the GIL
        reasons = pool.map(lambda item: _find_file_damage(folder, *item), files.items())
        return next((reason for reason in reasons if reason), None)


def _find_file_damage(folder: Path, name: str, expected: FileHash) -> str:
    if Path(name).name != name:
        return f"{name!r} is not a file name"
    try:
        size = (folder / name).stat().st_size
        actual = hash_file(folder / name) if size == expected.num_bytes else FileHash(num_bytes=size, sha256="")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        return f"{name}: {getattr(error, 'strerror', None) or error}"
    if actual.num_bytes != expected.num_bytes:
        return f"{name} has {actual.num_bytes:,} bytes, not {expected.num_bytes:,}"
    return "" if actual.sha256 == expected.sha256 else f"{name} was changed after writing"
