"""Kind of storage of a folder: whether reading from it may be too slow for a GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

StorageKind = Literal["nvme", "ssd", "hard disk", "network", "memory", "unknown"]

_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "glusterfs", "lustre", "beegfs", "fuse.sshfs", "virtiofs"}
)
_MEMORY = frozenset({"tmpfs", "ramfs"})
_VIRTUAL_DISKS = ("vd", "xvd")  # of KVM and Xen: they report that they rotate, whatever the host stores them on


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """Storage device of a folder."""

    mount: str
    filesystem: str
    kind: StorageKind
    free_bytes: int

    @property
    def is_slow(self) -> bool:
        """Whether the storage may be too slow for training."""
        return self.kind in ("hard disk", "network")


def probe_storage(path: Path, root: Path = Path("/")) -> Storage:
    """Return the storage of a folder; `root` contains /proc and /sys, for tests."""
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    mount, filesystem = _find_mount(existing.resolve(), root)
    usage = os.statvfs(existing)
    return Storage(
        mount=mount,
        filesystem=filesystem,
        kind=_find_kind(existing, filesystem, root),
        free_bytes=usage.f_bavail * usage.f_frsize,
    )


def _find_mount(path: Path, root: Path) -> tuple[str, str]:
    """Return the innermost mount point of a path and its file system."""
    best = ("/", "unknown")
    try:
        lines = (root / "proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return best
    for line in lines:
        cells = line.split()
        if len(cells) < 3:
            continue
        point = cells[1].replace("\\040", " ")
        if path.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, cells[2])
    return best


def _find_kind(path: Path, filesystem: str, root: Path) -> StorageKind:
    if filesystem in _NETWORK:
        return "network"
    if filesystem in _MEMORY:
        return "memory"
    device = path.stat().st_dev
    block = (root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    if "nvme" in block.name:
        return "nvme"
    if block.name.startswith(_VIRTUAL_DISKS):
        return "unknown"
    for folder in (block, block.parent):  # a partition has no queue
        try:
            spins = (folder / "queue/rotational").read_text().strip()
        except OSError:
            continue
        return "hard disk" if spins == "1" else "ssd"
    return "unknown"
