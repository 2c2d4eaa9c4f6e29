"""From a manifest's rows to a store of packs: found, or made once under a lock."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.corpus.build import Advance, build_splits
from launcher.corpus.preparation import Preparation
from launcher.corpus.store import (
    Store,
    damage_of,
    explain_miss,
    find_store,
    is_locked,
    locked,
    make_key,
    publish,
    scratch_folder,
    store_folder,
)
from launcher.errors import InputError

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    store: Store
    was_there: bool
    reason: str = ""  # why it had to be made
    seconds: float = 0.0  # making it took; never stored, so that the same data makes the same bytes


def prepare(wanted: Preparation, report: Report, advance: Advance) -> Prepared:
    """The store of what is wanted. Two processes that ask at once: one makes it, the other waits and finds it."""
    parts = wanted.key_parts()
    key = make_key(parts)
    found = find_store(wanted.root, key)
    if found is not None:
        return Prepared(found, True)
    try:
        wanted.root.mkdir(parents=True, exist_ok=True)
        if is_locked(wanted.root, key):
            report("another process is preparing this data: waiting for it")
        with locked(wanted.root, key):
            found = find_store(wanted.root, key)
            if found is not None:
                return Prepared(found, True)
            started = time.monotonic()
            reason = _explain(wanted.root, key, parts)
            report(f"preparing {wanted.expert}: {reason}")
            with scratch_folder(wanted.root, key) as scratch:
                build_splits(wanted, scratch, advance)
                if wanted.key_parts() != parts:
                    raise InputError(
                        "the data changed while it was prepared; nothing was kept",
                        hint="prepare again once it is whole",
                    )
                store = publish(scratch, wanted.root, wanted.expert, parts)
                return Prepared(store, False, reason, time.monotonic() - started)
    except OSError as error:
        raise _disk_error(error, wanted.root) from None


def _explain(root: Path, key: str, parts: dict[str, str]) -> str:
    folder = store_folder(root, key)
    damage = damage_of(folder) if folder.is_dir() else None
    return f"{folder.name} is damaged ({damage}); it is made again" if damage else explain_miss(root, parts)


def _disk_error(error: OSError, root: Path) -> InputError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return InputError(
            f"the disk is full while preparing data in {root}; nothing half-made is left",
            hint="free some space (`launcher data --prune`), or set LAUNCHER_DATA_DIR to another disk",
        )
    return InputError(f"preparing data in {root} failed: {error.strerror or error}")
