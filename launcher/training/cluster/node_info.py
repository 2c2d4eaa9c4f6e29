"""Collect what must be equal on all nodes; done by the first rank of each node before anything is loaded."""

from __future__ import annotations

import hashlib
import json
import platform
import socket
from pathlib import Path
from typing import Literal

import launcher
from launcher.core.frozen_model import Frozen, flatten
from launcher.core.run_paths import RunPaths
from launcher.corpus.spec import PreparationSpec
from launcher.corpus.storage_kind import probe_storage
from launcher.corpus.store import get_store_dir, make_key
from launcher.hardware.launch_env import RankInfo
from launcher.hardware.probe import probe_driver, probe_hardware, probe_ram_bytes
from launcher.plan.model import Plan
from launcher.training.runtime.run_record import collect_versions, get_git_commit

# Parts of a plan that only inform, were measured, or may differ per node.
_NOT_COMPARED = (
    "decisions",
    "oom_fallbacks",
    "loader",
    "memory",
    "notes",
    "speed",
    "launcher_version",
    "manifest_sha256",
)
_COMPARED_HARDWARE = ("hardware.gpus_per_node", "hardware.nodes")
_PATHS = ("data.folder", "data.basis", "data.is_length_assumed")
_LONGEST_VALUE = 60
_STORED_BYTES_PER_TOKEN = 12  # written twice: 4 bytes per token, 1 of mask, and overhead


class NodeInfo(Frozen):
    """Facts of a node that rank 0 compares with other nodes: versions, plan, data, GPU, driver, free space."""

    schema_version: Literal[1] = 1
    node: int
    host: str
    num_ranks: int
    commit: str | None
    code_sha256: str  # of the package's files, which may be modified since the commit
    versions: dict[str, str]
    manifest_sha256: str
    plan: dict[str, str]  # the compared part, by dotted key
    data_key: str
    data_parts: dict[str, str]  # inputs of the key
    device: str
    driver: str | None
    run_free_bytes: int
    data_free_bytes: int
    data_needed_bytes: int  # 0 if the data is prepared
    ram_bytes: int


def collect_node_info(plan: Plan, paths: RunPaths, place: RankInfo, data: PreparationSpec) -> NodeInfo:
    """Collect the versions, plan, data key, GPU, driver and free space of this node."""
    parts = data.key_parts()
    key = make_key(parts)
    is_prepared = get_store_dir(data.root, key).is_dir()
    return NodeInfo(
        node=place.node,
        host=socket.gethostname(),
        num_ranks=place.ranks_per_node,
        commit=get_git_commit(),
        code_sha256=hash_code(Path(launcher.__file__).resolve().parent),
        versions=collect_versions() | _get_nccl_version(plan),
        manifest_sha256=plan.manifest_sha256,
        plan=flatten_plan(plan),
        data_key=key,
        data_parts=parts,
        device=_get_device_name(plan),
        driver=None if plan.hardware.gpu is None else probe_driver(),
        run_free_bytes=probe_storage(paths.root).free_bytes,
        data_free_bytes=probe_storage(data.root).free_bytes,
        data_needed_bytes=0 if is_prepared else estimate_data_bytes(plan),
        ram_bytes=probe_ram_bytes(),
    )


def flatten_plan(plan: Plan) -> dict[str, str]:
    """Return the plan's values that must be equal on all nodes, by dotted key; a long value is replaced by its hash."""
    leaves = flatten(plan.model_dump(mode="json", exclude=set(_NOT_COMPARED)))
    return {
        key: _shorten(value)
        for key, value in sorted(leaves.items())
        if key not in _PATHS and (not key.startswith("hardware.") or key in _COMPARED_HARDWARE)
    }


def hash_code(package: Path) -> str:
    """Return a hash over all Python files of a package."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package).as_posix()}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def estimate_data_bytes(plan: Plan) -> int:
    """Estimate the size of the prepared data; 0 if the number of rows is unknown."""
    return int((plan.data.num_rows or 0) * plan.data.mean_tokens * _STORED_BYTES_PER_TOKEN)


def _shorten(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= _LONGEST_VALUE else f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _get_device_name(plan: Plan) -> str:
    """Return the GPU's name by NVML, because torch would allocate memory on every GPU."""
    if plan.hardware.gpu is None:
        return f"{platform.machine()} CPU"
    gpu = probe_hardware().gpu
    return "no GPU" if gpu is None else gpu.title


def _get_nccl_version(plan: Plan) -> dict[str, str]:
    if plan.hardware.gpu is None:
        return {}
    from torch.cuda import nccl

    try:
        return {"nccl": ".".join(map(str, nccl.version()))}
    except AttributeError:  # torch was built without NCCL
        return {}
