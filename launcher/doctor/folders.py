"""The disks on which runs, prepared data and the Hugging Face cache lie: room, speed, whether they answer at all."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.bases import hub_cache
from launcher.corpus.disks import Storage, probe_storage
from launcher.doctor.asking import NoAnswerError, in_time
from launcher.doctor.findings import Finding, Status
from launcher.units import GIB, MIB, format_gib

_SECONDS = 3.0  # a disk that takes longer to say how full it is does not answer
_PROBE_BYTES = 24 * MIB
_MEASURE_SECONDS = 6.0
_PROBE_SECONDS = 0.4  # of writing; syncing comes on top
_CHUNK = bytes(1 * MIB)
_NO_ROOM = 1 * GIB
_LITTLE_ROOM = 10 * GIB
_SLOW_MB = 20.0  # a second: a USB stick; a hard disk writes about 150
_MODEST_MB = 80.0
_NO_HARD_DISK_MB = 300.0  # virtual disks say that they spin, and are as fast as what lies below them


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A folder that a training uses, and what for."""

    name: str  # runs, data, HF cache
    folder: Path
    is_written: bool  # by every training: then it must have room, and its speed counts


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceFacts:
    place: Place
    storage: Storage | None = None
    has_inodes: bool = True
    is_writable: bool = True
    write_mb_per_second: float | None = None  # None: not measured
    trouble: str = ""  # why there is no answer
    is_dead: bool = False  # no answer in time

    @property
    def is_slow(self) -> bool:
        """A network, or a disk that spins."""
        if self.storage is None or not self.storage.is_slow:
            return False
        is_fast = self.write_mb_per_second is not None and self.write_mb_per_second > _NO_HARD_DISK_MB
        return self.storage.kind == "network" or not is_fast


def list_places(runs_dir: Path) -> tuple[Place, ...]:
    """In the order in which they matter."""
    places = [Place(name="runs", folder=runs_dir, is_written=True)]
    try:
        from launcher.corpus.preparation import data_folder

        places.append(Place(name="prepared data", folder=data_folder(), is_written=True))
    except ImportError:  # only planning is installed: nothing is prepared here
        pass
    return (*places, Place(name="HF cache", folder=hub_cache(), is_written=False))


def probe_places(places: Sequence[Place]) -> tuple[PlaceFacts, ...]:
    """Side by side: one that does not answer must not hold up the others. A disk is measured once, for all on it."""
    with ThreadPoolExecutor(max_workers=len(places) or 1) as pool:
        found = tuple(pool.map(_probe, places))
        first = {facts.storage.mount: facts for facts in reversed(found) if facts.storage is not None}
        speeds = dict(zip(first, pool.map(_measure, first.values()), strict=True))
    return tuple(
        replace(facts, write_mb_per_second=speeds[facts.storage.mount]) if facts.storage is not None else facts
        for facts in found
    )


def _probe(place: Place) -> PlaceFacts:
    try:
        return in_time(lambda: _look(place), _SECONDS)
    except NoAnswerError as error:
        return PlaceFacts(place=place, trouble=str(error), is_dead=True)
    except OSError as error:
        return PlaceFacts(place=place, trouble=error.strerror or str(error))


def _look(place: Place) -> PlaceFacts:
    storage, existing = probe_storage(place.folder), _find_existing(place.folder)
    usage = os.statvfs(existing)
    return PlaceFacts(
        place=place,
        storage=storage,
        has_inodes=not usage.f_files or usage.f_favail > 0,
        is_writable=os.access(existing, os.W_OK) and not usage.f_flag & os.ST_RDONLY,
    )


def _find_existing(folder: Path) -> Path:
    return next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())


def _measure(facts: PlaceFacts) -> float | None:
    """None where it cannot be: no room, no permission, no answer."""
    has_room = facts.storage is not None and facts.storage.free_bytes > 2 * _PROBE_BYTES
    if not (has_room and facts.is_writable and facts.has_inodes):
        return None
    try:
        return in_time(lambda: measure_writing(_find_existing(facts.place.folder)), _MEASURE_SECONDS)
    except (OSError, NoAnswerError):
        return None


def measure_writing(folder: Path) -> float:
    """MB a second, synced. The file has no name, so that nothing is left behind however this ends."""
    written = 0
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        began = time.perf_counter()
        while written < _PROBE_BYTES and time.perf_counter() - began < _PROBE_SECONDS:
            written += file.write(_CHUNK)
        os.fsync(file.fileno())
        seconds = time.perf_counter() - began
    return written / 1e6 / max(seconds, 1e-9)


def judge_places(found: Sequence[PlaceFacts]) -> Iterator[Finding]:
    for facts in found:
        yield _judge(facts)


def _tell(facts: PlaceFacts, status: Status, found: str, matters: str = "", next_step: str = "") -> Finding:
    return Finding(
        family="disks",
        subject=facts.place.name,
        status=status,
        found=f"{facts.place.folder}: {found}",
        matters=matters,
        next_step=next_step,
    )


_ELSEWHERE = {
    "runs": "--runs-dir names a folder on another disk",
    "prepared data": "launcher data --move-to DIR, and export LAUNCHER_DATA_DIR=DIR",
    "HF cache": "export HF_HOME=DIR with a folder on another disk",
}


def _judge(facts: PlaceFacts) -> Finding:
    elsewhere = _ELSEWHERE[facts.place.name]
    if facts.is_dead:
        why = "whoever reads or writes there hangs: a network disk whose server is gone"
        return _tell(facts, "problem", facts.trouble, why, f"mount it again; {elsewhere}")
    if facts.storage is None:
        return _tell(facts, "note", f"could not look: {facts.trouble}")
    speed = "" if facts.write_mb_per_second is None else f", writes {facts.write_mb_per_second:,.0f} MB/s"
    storage = facts.storage
    is_told = storage.kind != "unknown" and (facts.is_slow or not storage.is_slow)
    kind = f"{storage.kind}, {storage.filesystem}" if is_told else storage.filesystem
    found = f"{format_gib(storage.free_bytes)} free on {storage.mount} ({kind}){speed}"
    return _judge_room(facts, found, elsewhere) or _judge_speed(facts, found, elsewhere) or _tell(facts, "ok", found)


def _judge_room(facts: PlaceFacts, found: str, elsewhere: str) -> Finding | None:
    assert facts.storage is not None
    free, name = facts.storage.free_bytes, facts.place.name
    if not facts.is_writable:
        status: Status = "problem" if facts.place.is_written else "note"
        return _tell(facts, status, f"{found}; it cannot be written", "nothing can be saved there", elsewhere)
    if not facts.has_inodes:
        return _tell(facts, "problem", f"{found}; no inodes left", "no new file can be made there", elsewhere)
    if free < _NO_ROOM and facts.place.is_written:
        tidy = "launcher data --prune" if name == "prepared data" else "delete runs or checkpoints that nobody needs"
        why = "a checkpoint that cannot be written ends the run"
        return _tell(facts, "problem", f"the disk is full: {found}", why, f"{tidy}; {elsewhere}")
    if free < _LITTLE_ROOM:
        why = "a few checkpoints, or one base model, fill it"
        return _tell(facts, "note", found, why, elsewhere)
    return None


def _judge_speed(facts: PlaceFacts, found: str, elsewhere: str) -> Finding | None:
    speed = facts.write_mb_per_second
    if speed is not None and speed < _SLOW_MB and facts.place.is_written:
        why = (
            "steps behind a save wait for it"
            if facts.place.name == "runs"
            else "preparing and reading rows wait for it"
        )
        return _tell(facts, "problem", f"slow: {found}", why, elsewhere)
    if facts.is_slow and facts.place.name == "HF cache":
        return _tell(facts, "note", f"slow storage: {found}", "every start reads the base's weights from it", elsewhere)
    if facts.is_slow and facts.place.name == "prepared data":
        why = "rows are read from it while training: watch `waits for data` in a run"
        return _tell(facts, "note", f"slow storage: {found}", why, elsewhere)
    if speed is not None and speed < _MODEST_MB and facts.place.is_written:
        return _tell(facts, "note", found, "checkpoints of full fine-tuning take minutes at this speed", elsewhere)
    return None
