"""Check the disks of runs, prepared data and the Hugging Face cache: free space, write speed, responsiveness."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from launcher.analysis.doctor.findings import Finding, Reporter, Status
from launcher.base_models.catalogue import get_hub_cache
from launcher.core.units import GIB, MIB, format_gib
from launcher.core.worker import call_with_timeout
from launcher.corpus.storage_kind import Storage, probe_storage

_SECONDS = 3.0  # a disk that needs longer for a statvfs is considered dead
_PROBE_BYTES = 24 * MIB
_MEASURE_SECONDS = 6.0
_PROBE_SECONDS = 0.4  # of writing, without the sync
_CHUNK = bytes(1 * MIB)
_MIN_FREE = 1 * GIB
_LOW_FREE = 10 * GIB
_SLOW_MB = 20.0  # MB/s of a USB stick; a hard disk writes about 150
_MODEST_MB = 80.0
_NO_HARD_DISK_MB = 300.0  # virtual disks report that they rotate, whatever is below them
_RUNS, _DATA, _CACHE = "runs", "prepared data", "HF cache"
_OTHER_DISK = {
    _RUNS: "choose a folder on another disk with --runs-dir",
    _DATA: "launcher data --move-to DIR, and export LAUNCHER_DATA_DIR=DIR",
    _CACHE: "export HF_HOME=DIR with a folder on another disk",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskFacts:
    """A folder that training uses, and the measured state of its disk."""

    name: str  # a key of _OTHER_DISK
    folder: Path
    storage: Storage | None = None  # None: it could not be probed
    has_inodes: bool = True
    is_writable: bool = True
    write_mb_per_second: float | None = None  # None: not measured
    error: str = ""  # why it could not be probed
    is_dead: bool = False  # timed out


def list_folders(runs_dir: Path) -> dict[str, Path]:
    """Return the folders that training uses, by name."""
    folders = {_RUNS: runs_dir}
    try:
        from launcher.corpus.spec import get_stores_dir

        folders[_DATA] = get_stores_dir()
    except ImportError:  # without the data extra nothing is prepared here
        pass
    return {**folders, _CACHE: get_hub_cache()}


def probe_disks(folders: Mapping[str, Path], *, measures_speed: bool = True) -> list[DiskFacts]:
    """Probe all folders in parallel, and measure the write speed of each disk once."""
    with ThreadPoolExecutor(max_workers=len(folders)) as pool:
        found = list(pool.map(_probe, folders, folders.values()))
        disks = {facts.storage.mount: facts for facts in reversed(found) if facts.storage and measures_speed}
        speeds = dict(zip(disks, pool.map(_measure, disks.values()), strict=True))
    return [
        replace(facts, write_mb_per_second=speeds.get(facts.storage.mount)) if facts.storage else facts
        for facts in found
    ]


def _probe(name: str, folder: Path) -> DiskFacts:
    def probe() -> DiskFacts:
        storage, existing = probe_storage(folder), _get_existing_parent(folder)
        usage = os.statvfs(existing)
        return DiskFacts(
            name=name,
            folder=folder,
            storage=storage,
            has_inodes=not usage.f_files or usage.f_favail > 0,
            is_writable=existing.is_dir() and os.access(existing, os.W_OK) and not usage.f_flag & os.ST_RDONLY,
        )

    try:
        return call_with_timeout(probe, _SECONDS)
    except OSError as error:
        is_dead = isinstance(error, TimeoutError)
        return DiskFacts(name=name, folder=folder, error=error.strerror or str(error), is_dead=is_dead)


def _get_existing_parent(folder: Path) -> Path:
    return next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())


def _measure(facts: DiskFacts) -> float | None:
    """Measure the write speed; None if there is no space, no permission or a timeout."""
    has_space = facts.storage is not None and facts.storage.free_bytes > 2 * _PROBE_BYTES
    if not (has_space and facts.is_writable and facts.has_inodes):
        return None
    try:
        return call_with_timeout(lambda: measure_write_speed(_get_existing_parent(facts.folder)), _MEASURE_SECONDS)
    except OSError:  # or TimeoutError
        return None


def measure_write_speed(folder: Path) -> float:
    """Measure synced writes in MB/s with an unnamed file, which disappears even if we are killed."""
    written = 0
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        began = time.perf_counter()
        while written < _PROBE_BYTES and time.perf_counter() - began < _PROBE_SECONDS:
            written += file.write(_CHUNK)
        os.fsync(file.fileno())
        seconds = time.perf_counter() - began
    return written / 1e6 / max(seconds, 1e-9)


def check_disks(disks: Sequence[DiskFacts]) -> Iterator[Finding]:
    """Check the disk of every folder that training uses; yield one finding per folder."""
    for facts in disks:
        yield _check(facts)


def _check(facts: DiskFacts) -> Finding:
    storage, name, speed = facts.storage, facts.name, facts.write_mb_per_second
    report = partial(Reporter("disks"), name)
    where, elsewhere = f"{facts.folder}: ", _OTHER_DISK[name]
    if facts.is_dead:
        why = "reads and writes there hang: the server of the network disk may be down"
        return report("problem", where + facts.error, why, f"mount it again; {elsewhere}")
    if storage is None:
        return report("note", f"{where}not checked: {facts.error}")
    is_written = name != _CACHE  # by every run, so that space and speed matter
    is_slow = storage.is_slow and (storage.kind == "network" or speed is None or speed <= _NO_HARD_DISK_MB)
    shows_kind = storage.kind != "unknown" and is_slow == storage.is_slow
    kind = f"{storage.kind}, {storage.filesystem}" if shows_kind else storage.filesystem
    writes = "" if speed is None else f", writes {speed:,.0f} MB/s"
    found = f"{format_gib(storage.free_bytes)} free on {storage.mount} ({kind}){writes}"
    if not facts.is_writable:
        status: Status = "problem" if is_written else "note"
        return report(status, f"{where}{found}; it is not writable", "nothing can be saved there", elsewhere)
    if not facts.has_inodes:
        return report("problem", f"{where}{found}; no inodes left", "no new file can be created there", elsewhere)
    if storage.free_bytes < _MIN_FREE and is_written:
        tidy = "launcher data --prune" if name == _DATA else "delete old runs or checkpoints"
        why = "the run fails if a checkpoint cannot be written"
        return report("problem", f"{where}the disk is full: {found}", why, f"{tidy}; {elsewhere}")
    if storage.free_bytes < _LOW_FREE:
        return report("note", where + found, "a few checkpoints or one base model fill it", elsewhere)
    if speed is not None and speed < _SLOW_MB and is_written:
        why = "steps after a save wait until it is written" if name == _RUNS else "data preparation and loading wait"
        return report("problem", f"{where}slow: {found}", why, elsewhere)
    if is_slow and name != _RUNS:
        why = "training reads its data from it: check the data wait of a run"
        why = "every start reads the base model from it" if name == _CACHE else why
        return report("note", f"{where}slow storage: {found}", why, elsewhere)
    if speed is not None and speed < _MODEST_MB and is_written:
        why = "checkpoints of full fine-tuning take minutes at this speed"
        return report("note", where + found, why, elsewhere)
    return report("ok", where + found)
