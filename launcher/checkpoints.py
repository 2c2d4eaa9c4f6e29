"""Checkpoints on disk: what one holds, whether it is whole, and which is the newest that is.

A checkpoint is a folder of safetensors and one checkpoint.json, which is written last and has the hash of every other
file. The folder gets its name only then: one that has its name was whole once, and the hashes tell whether it still is.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import JsonValue, ValidationError

from launcher.choices import Strategy
from launcher.paths import RunPaths
from launcher.values import Frozen

MANIFEST_FILE = "checkpoint.json"
_NAME = re.compile(r"step-(\d{6,})")
_BLOCK = 1 << 20


class FileHash(Frozen):
    num_bytes: int
    sha256: str


class BestState(Frozen):
    """The best evaluation so far, and how many in a row were no better."""

    step: int | None
    value: float | None
    worse_in_a_row: int


class CheckpointManifest(Frozen):
    schema_version: Literal[1] = 1
    step: int  # how many are done: the whole data position
    num_steps: int
    chain: str  # hash over the packs of every step up to here
    data_key: str
    base: str  # fingerprint of the frozen weights' files
    learning: dict[str, JsonValue]
    schedule_steps: int  # fewer than steps where loss scaling passed some over
    scaler: dict[str, float]
    best: BestState
    owes_evaluation: bool  # due at this step, and left out because the run was stopped
    strategy: Strategy
    num_ranks: int
    launcher_version: str
    saved_at: str  # ISO 8601, UTC
    files: dict[str, FileHash]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    folder: Path
    manifest: CheckpointManifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Damaged:
    folder: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.folder} is damaged and passed over: {self.reason}"


def list_checkpoints(paths: RunPaths) -> list[Path]:
    """Newest first. Half-made ones have other names."""
    if not paths.checkpoints.is_dir():
        return []
    found = [(match, folder) for folder in paths.checkpoints.iterdir() if (match := _NAME.fullmatch(folder.name))]
    return [folder for _, folder in sorted(found, key=lambda pair: -int(pair[0][1]))]


def read_checkpoint(folder: Path) -> Checkpoint | Damaged:
    """Every file is read and hashed: whoever goes on from a checkpoint goes on from what was saved."""
    try:
        manifest = CheckpointManifest.model_validate_json((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
    except OSError as error:
        return Damaged(folder=folder, reason=f"{MANIFEST_FILE}: {error.strerror}")
    except (ValidationError, UnicodeDecodeError):
        return Damaged(folder=folder, reason=f"{MANIFEST_FILE} is not what this version writes")
    reason = next(_find_damage(folder, manifest), None)
    return Checkpoint(folder=folder, manifest=manifest) if reason is None else Damaged(folder=folder, reason=reason)


def find_newest(paths: RunPaths, at_most: int | None = None) -> tuple[Checkpoint | None, tuple[Damaged, ...]]:
    """The newest whole one, and those that were passed over. `at_most`: of this step or an earlier one."""
    damaged: list[Damaged] = []
    for folder in list_checkpoints(paths):
        if at_most is not None and step_of(folder) > at_most:
            continue
        found = read_checkpoint(folder)
        if isinstance(found, Checkpoint):
            return found, tuple(damaged)
        damaged.append(found)
    return None, tuple(damaged)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def hash_file(file: Path) -> FileHash:
    digest, size = hashlib.sha256(), 0
    with file.open("rb") as source:
        while block := source.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return FileHash(num_bytes=size, sha256=digest.hexdigest())


def _find_damage(folder: Path, manifest: CheckpointManifest) -> Iterator[str]:
    if step_of(folder) != manifest.step:
        yield f"it says that it is of step {manifest.step}"
    for name, expected in manifest.files.items():
        if Path(name).name != name:
            yield f"{name!r} is not a file name"
            continue
        try:
            found = hash_file(folder / name)
        except OSError as error:
            yield f"{name}: {error.strerror}"
            continue
        if found.num_bytes != expected.num_bytes:
            yield f"{name} has {found.num_bytes:,} bytes, not {expected.num_bytes:,}"
        elif found.sha256 != expected.sha256:
            yield f"{name} is not what was written"
