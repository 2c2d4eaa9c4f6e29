"""Check the disks of runs, prepared data and the Hugging Face cache: free space, write speed, responsiveness."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskUse:
    """A folder that training uses."""

    name: str  # runs, data, HF cache
    folder: Path
    is_written: bool  # by every run, so that space and speed matter


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskFacts:
    """Measured state of a folder's disk."""

    place: DiskUse
    storage: Storage | None = None
    has_inodes: bool = True
    is_writable: bool = True
    write_mb_per_second: float | None = None  # None: not measured
    error: str = ""  # why it could not be probed
    is_dead: bool = False  # timed out

    @property
    def is_slow(self) -> bool:
        """Whether it is network storage or a hard disk."""
        if self.storage is None or not self.storage.is_slow:
            return False
        is_fast = self.write_mb_per_second is not None and self.write_mb_per_second > _NO_HARD_DISK_MB
        return self.storage.kind == "network" or not is_fast


def list_disk_uses(runs_dir: Path) -> tuple[DiskUse, ...]:
    """List the folders that training uses."""
    uses = [DiskUse(name="runs", folder=runs_dir, is_written=True)]
    try:
        from launcher.corpus.spec import get_stores_dir

        uses.append(DiskUse(name="prepared data", folder=get_stores_dir(), is_written=True))
    except ImportError:  # without the data extra nothing is prepared here
        pass
    return (*uses, DiskUse(name="HF cache", folder=get_hub_cache(), is_written=False))


def probe_disks(places: Sequence[DiskUse], *, measures_speed: bool = True) -> tuple[DiskFacts, ...]:
    """Probe all folders in parallel, and measure the write speed of each disk once."""
    with ThreadPoolExecutor(max_workers=len(places) or 1) as pool:
        found = tuple(pool.map(_probe, places))
        if not measures_speed:
            return found
        first = {facts.storage.mount: facts for facts in reversed(found) if facts.storage is not None}
        speeds = dict(zip(first, pool.map(_measure, first.values()), strict=True))
    return tuple(
        replace(facts, write_mb_per_second=speeds[facts.storage.mount]) if facts.storage is not None else facts
        for facts in found
    )


def _probe(place: DiskUse) -> DiskFacts:
    try:
        return call_with_timeout(lambda: _probe_use(place), _SECONDS)
    except TimeoutError as error:
        return DiskFacts(place=place, error=str(error), is_dead=True)
    except OSError as error:
        return DiskFacts(place=place, error=error.strerror or str(error))


def _probe_use(place: DiskUse) -> DiskFacts:
    storage, existing = probe_storage(place.folder), _get_existing_parent(place.folder)
    usage = os.statvfs(existing)
    return DiskFacts(
        place=place,
        storage=storage,
        has_inodes=not usage.f_files or usage.f_favail > 0,
        is_writable=os.access(existing, os.W_OK) and not usage.f_flag & os.ST_RDONLY,
    )


def _get_existing_parent(folder: Path) -> Path:
    return next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())


def _measure(facts: DiskFacts) -> float | None:
    """Measure the write speed; None if there is no space, no permission or a timeout."""
    has_space = facts.storage is not None and facts.storage.free_bytes > 2 * _PROBE_BYTES
    if not (has_space and facts.is_writable and facts.has_inodes):
        return None
    try:
        return call_with_timeout(
            lambda: measure_write_speed(_get_existing_parent(facts.place.folder)), _MEASURE_SECONDS
        )
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
    """Check every folder."""
    for facts in disks:
        yield _check(facts)


def _make(facts: DiskFacts, status: Status, found: str, matters: str = "", next_step: str = "") -> Finding:
    return Reporter("disks")(facts.place.name, status, f"{facts.place.folder}: {found}", matters, next_step)


_OTHER_DISK = {
    "runs": "choose a folder on another disk with --runs-dir",
    "prepared data": "launcher data --move-to DIR, and export LAUNCHER_DATA_DIR=DIR",
    "HF cache": "export HF_HOME=DIR with a folder on another disk",
}


def _check(facts: DiskFacts) -> Finding:
    elsewhere = _OTHER_DISK[facts.place.name]
    if facts.is_dead:
        why = "reads and writes there hang: the server of the network disk may be down"
        return _make(facts, "problem", facts.error, why, f"mount it again; {elsewhere}")
    if facts.storage is None:
        return _make(facts, "note", f"not checked: {facts.error}")
    speed = "" if facts.write_mb_per_second is None else f", writes {facts.write_mb_per_second:,.0f} MB/s"
    storage = facts.storage
    shows_kind = storage.kind != "unknown" and (facts.is_slow or not storage.is_slow)
    kind = f"{storage.kind}, {storage.filesystem}" if shows_kind else storage.filesystem
    found = f"{format_gib(storage.free_bytes)} free on {storage.mount} ({kind}){speed}"
    return _check_space(facts, found, elsewhere) or _check_speed(facts, found, elsewhere) or _make(facts, "ok", found)


def _check_space(facts: DiskFacts, found: str, elsewhere: str) -> Finding | None:
    assert facts.storage is not None
    free, name = facts.storage.free_bytes, facts.place.name
    if not facts.is_writable:
        status: Status = "problem" if facts.place.is_written else "note"
        return _make(facts, status, f"{found}; it is not writable", "nothing can be saved there", elsewhere)
    if not facts.has_inodes:
        return _make(facts, "problem", f"{found}; no inodes left", "no new file can be created there", elsewhere)
    if free < _MIN_FREE and facts.place.is_written:
        tidy = "launcher data --prune" if name == "prepared data" else "delete old runs or checkpoints"
        why = "the run fails if a checkpoint cannot be written"
        return _make(facts, "problem", f"the disk is full: {found}", why, f"{tidy}; {elsewhere}")
    if free < _LOW_FREE:
        why = "a few checkpoints or one base model fill it"
        return _make(facts, "note", found, why, elsewhere)
    return None


def _check_speed(facts: DiskFacts, found: str, elsewhere: str) -> Finding | None:
    speed = facts.write_mb_per_second
    if speed is not None and speed < _SLOW_MB and facts.place.is_written:
        why = (
            "the steps after a save wait for it"
            if facts.place.name == "runs"
            else "preparing and reading data wait for it"
        )
        return _make(facts, "problem", f"slow: {found}", why, elsewhere)
    if facts.is_slow and facts.place.name == "HF cache":
        return _make(facts, "note", f"slow storage: {found}", "every start reads the base model from it", elsewhere)
    if facts.is_slow and facts.place.name == "prepared data":
        why = "training reads its data from it: check the data wait of a run"
        return _make(facts, "note", f"slow storage: {found}", why, elsewhere)
    if speed is not None and speed < _MODEST_MB and facts.place.is_written:
        return _make(facts, "note", found, "checkpoints of full fine-tuning take minutes at this speed", elsewhere)
    return None
