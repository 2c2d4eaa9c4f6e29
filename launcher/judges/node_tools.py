"""Node.js and the packages of `make quality-tools`: where they are, and how to start a script without permissions.

They are optional: a judge without its package uses another checker. The packages are pinned by node/package-lock.json
and installed outside the checkout.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from launcher.core.installation import find_page, is_checkout
from launcher.core.run_paths import get_env_path
from launcher.core.worker import WorkerError, run_command

NODE_DIR_VARIABLE = "LAUNCHER_NODE_DIR"  # overrides the folder with node_modules
INSTALL_HINT = "make quality-tools" if is_checkout() else f"see {find_page('QUALITY.md')}"
_OLDEST_NODE = 20  # the first with a permission model


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """Node.js executable and version found on this machine."""

    executable: Path
    version: tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePackage:
    """An installed npm package."""

    version: str
    folder: Path


def get_node_dir() -> Path:
    """Return the folder with node_modules, by default inside the Python environment."""
    return get_env_path(NODE_DIR_VARIABLE) or Path(sys.prefix) / "quality-node"


def find_node() -> Node | None:
    """Return the `node` in PATH; None if there is none, or if it is too old for the permission model."""
    executable = shutil.which("node")
    return _probe_node(executable) if executable else None


@cache
def _probe_node(executable: str) -> Node | None:
    try:
        output = run_command([executable, "--version"], timeout=20).stdout
    except WorkerError:
        return None
    match = re.match(r"v(\d+)\.(\d+)\.(\d+)", output)
    if match is None or int(match[1]) < _OLDEST_NODE:
        return None
    return Node(executable=Path(executable), version=(int(match[1]), int(match[2]), int(match[3])))


def find_package(name: str) -> NodePackage | None:
    """Return an installed npm package with its actual version; None if it is not installed."""
    folder = get_node_dir() / "node_modules" / name
    try:
        version = json.loads((folder / "package.json").read_text(encoding="utf-8"))["version"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return NodePackage(version=str(version), folder=folder.resolve())


def make_node_command(node: Node, script: Path, *, readable: Sequence[Path], heap_mib: int) -> list[str]:
    """Return the command of a script that may read the given paths, but not write files or start processes."""
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


def make_node_environment() -> dict[str, str]:
    """Return an environment without secrets and without NODE_OPTIONS, which could extend permissions."""
    return {name: value for name, value in os.environ.items() if name in {"PATH", "LANG", "LC_ALL", "TMPDIR"}}
