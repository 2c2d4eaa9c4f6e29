"""Where Node and the packages of `make quality-tools` lie, and how a script is started in it without rights.

Nothing here is needed to judge: a judge without its package names what judges instead. The packages are pinned by
node/package-lock.json and installed outside the checkout.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

NODE_DIR_VARIABLE = "LAUNCHER_NODE_DIR"  # the folder that holds node_modules, if not the default one
INSTALL_HINT = "make quality-tools"
_OLDEST_NODE = 20  # the first with a permission model


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """The `node` of this machine."""

    executable: Path
    version: tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePackage:
    """An installed npm package."""

    name: str
    version: str
    folder: Path


def node_dir() -> Path:
    """The folder with node_modules: beside the running environment, so that it goes when the environment goes."""
    return Path(os.environ.get(NODE_DIR_VARIABLE) or Path(sys.prefix) / "quality-node")


def find_node() -> Node | None:
    """None where there is no `node` in PATH, or one that is too old to be started without rights."""
    found = shutil.which("node")
    return _probe_node(found) if found else None


@cache
def _probe_node(executable: str) -> Node | None:
    try:
        told = subprocess.run([executable, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.match(r"v(\d+)\.(\d+)\.(\d+)", told)
    if match is None or int(match[1]) < _OLDEST_NODE:
        return None
    return Node(executable=Path(executable), version=(int(match[1]), int(match[2]), int(match[3])))


def find_package(name: str) -> NodePackage | None:
    """None where it is not installed; its version is read from what lies there, not from what was asked for."""
    folder = node_dir() / "node_modules" / name
    try:
        version = json.loads((folder / "package.json").read_text(encoding="utf-8"))["version"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return NodePackage(name=name, version=str(version), folder=folder.resolve())


def make_command(node: Node, script: Path, *, readable: Sequence[Path], heap_mib: int) -> list[str]:
    """Starts a script that may read the named paths, and neither write files nor start processes or threads."""
    permission = "--permission" if node.version >= (23, 5, 0) else "--experimental-permission"
    allowed = [f"--allow-fs-read={path.resolve()}{'/*' if path.is_dir() else ''}" for path in (script, *readable)]
    return [
        str(node.executable),
        permission,
        *allowed,
        "--no-warnings",
        f"--max-old-space-size={heap_mib}",
        str(script.resolve()),
    ]


def make_environment() -> dict[str, str]:
    """What a script of ours sees: no NODE_OPTIONS that widens its rights, and no secret."""
    return {name: value for name, value in os.environ.items() if name in {"PATH", "LANG", "LC_ALL", "TMPDIR"}}
