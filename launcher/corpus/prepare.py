"""Prepare data: find the store of packs, or build it once under a lock."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.core.errors import InputError, hint_for
from launcher.corpus.build import Advance, build_splits
from launcher.corpus.spec import PreparationSpec
from launcher.corpus.store import (
    Store,
    explain_miss,
    find_damage,
    find_store,
    get_store_dir,
    is_locked,
    lock_store,
    make_key,
    make_scratch_dir,
    publish,
)

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A store of prepared data, and whether it existed before or was built now."""

    store: Store
    was_cached: bool
    reason: str = ""  # why it was built
    seconds: float = 0.0  # build time; not stored, so that equal data has equal bytes


def prepare(spec: PreparationSpec, report: Report, advance: Advance) -> Prepared:
    """Return the store of a spec, built if missing. Of two concurrent processes, one builds it and the other waits."""
    parts = spec.key_parts()
    key = make_key(parts)
    store = find_store(spec.root, key)
    if store is not None:
        return Prepared(store, True)
    try:
        spec.root.mkdir(parents=True, exist_ok=True)
        if is_locked(spec.root, key):
            report("another process is preparing this data: waiting for it")
        with lock_store(spec.root, key):
            store = find_store(spec.root, key)
            if store is not None:
                return Prepared(store, True)
            started = time.monotonic()
            reason = _explain(spec.root, key, parts)
            report(f"preparing {spec.expert}: {reason}")
            with make_scratch_dir(spec.root, key) as scratch:
                build_splits(spec, scratch, advance)
                if spec.key_parts() != parts:
                    raise InputError(
                        "the data changed during preparation; nothing was stored",
                        hint="prepare again when the files are complete",
                    )
                store = publish(scratch, spec.root, spec.expert, parts)
                return Prepared(store, False, reason, time.monotonic() - started)
    except OSError as error:
        raise _disk_error(error, spec.root) from None


def _explain(root: Path, key: str, parts: dict[str, str]) -> str:
    folder = get_store_dir(root, key)
    damage = find_damage(folder) if folder.is_dir() else None
    return f"{folder.name} is damaged ({damage}) and is rebuilt" if damage else explain_miss(root, parts)


def _disk_error(error: OSError, root: Path) -> InputError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return InputError(
            f"no space left while preparing data in {root}; incomplete files were removed",
            hint="free some space (`launcher data --prune`), or set LAUNCHER_DATA_DIR to another disk",
        )
    return InputError(
        f"preparing data in {root} failed: {error.strerror or error}", hint=hint_for(error, "LAUNCHER_DATA_DIR=DIR")
    )
