"""What one node is, as far as it must be like the others: collected by its first rank before anything is loaded."""

from __future__ import annotations

import hashlib
import json
import platform
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import launcher
from launcher.corpus.disks import probe_storage
from launcher.corpus.preparation import Preparation
from launcher.corpus.store import make_key, store_folder
from launcher.paths import RunPaths
from launcher.plan.model import Plan
from launcher.probe import probe_driver, probe_hardware, probe_ram_bytes
from launcher.started import Place
from launcher.training.chronicle import find_commit, find_versions
from launcher.values import Frozen, flatten

# Of a plan, what only tells or was measured, where something lies, and what each node may have its own way.
_NOT_COMPARED = ("decisions", "ladder", "loader", "memory", "notes", "speed", "launcher_version", "manifest_sha256")
_COMPARED_HARDWARE = ("hardware.gpus_per_node", "hardware.nodes")
_PLACES = ("data.folder", "data.basis")
_LONGEST_VALUE = 60
_STORED_BYTES_PER_TOKEN = 12  # spooled once and packed once: four bytes of token, one of mask, and some more


class NodeFacts(Frozen):
    schema_version: Literal[1] = 1
    node: int
    host: str
    num_ranks: int
    commit: str | None
    code_sha256: str  # of the package's own files: a commit does not tell what was changed since
    versions: dict[str, str]
    manifest_sha256: str
    plan: dict[str, str]  # what runs of it, dotted
    data_key: str
    data_parts: dict[str, str]  # what the key is made of
    device: str
    driver: str | None
    run_free_bytes: int
    data_free_bytes: int
    data_needed_bytes: int  # 0 where the data is prepared
    ram_bytes: int


def collect_facts(plan: Plan, paths: RunPaths, place: Place, data: Preparation) -> NodeFacts:
    parts = data.key_parts()
    key = make_key(parts)
    is_prepared = store_folder(data.root, key).is_dir()
    return NodeFacts(
        node=place.node,
        host=socket.gethostname(),
        num_ranks=place.ranks_per_node,
        commit=find_commit(),
        code_sha256=hash_code(Path(launcher.__file__).resolve().parent),
        versions=find_versions() | dict(_find_nccl(plan)),
        manifest_sha256=plan.manifest_sha256,
        plan=describe_running(plan),
        data_key=key,
        data_parts=parts,
        device=_find_device(plan),
        driver=None if plan.hardware.gpu is None else probe_driver(),
        run_free_bytes=probe_storage(paths.root).free_bytes,
        data_free_bytes=probe_storage(data.root).free_bytes,
        data_needed_bytes=0 if is_prepared else estimate_data_bytes(plan),
        ram_bytes=probe_ram_bytes(),
    )


def describe_running(plan: Plan) -> dict[str, str]:
    """Dotted keys of all that must be the same on every node, each with its value as text; long ones by their hash."""
    leaves = flatten(plan.model_dump(mode="json", exclude=set(_NOT_COMPARED)))
    return {
        key: _short(value)
        for key, value in sorted(leaves.items())
        if key not in _PLACES and (not key.startswith("hardware.") or key in _COMPARED_HARDWARE)
    }


def hash_code(package: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package).as_posix()}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def estimate_data_bytes(plan: Plan) -> int:
    """That preparing will write; 0 where nobody knows how many rows there are."""
    return int((plan.data.num_rows or 0) * plan.data.mean_tokens * _STORED_BYTES_PER_TOKEN)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= _LONGEST_VALUE else f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _find_device(plan: Plan) -> str:
    """By nvidia-smi: torch would take memory on every GPU."""
    if plan.hardware.gpu is None:
        return f"{platform.machine()} CPU"
    gpu = probe_hardware().gpu
    return "no GPU" if gpu is None else gpu.title


def _find_nccl(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.hardware.gpu is None:
        return
    from torch.cuda import nccl

    with suppress(AttributeError):  # this node's torch was built without
        yield "nccl", ".".join(map(str, nccl.version()))
