"""Fixtures that several test folders share. Tests marked `slow` run where LAUNCHER_TEST_ALL is set: `make test-all`."""

from __future__ import annotations

import copy
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
SHARED_MANIFESTS = SHARED / "manifests"

# Started in the background by nohup, tests would hand down that these are ignored, to whom they shall stop.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)
# The tests plan for machines without a GPU, or for those of the catalogue: what this machine has must not matter.
if not os.environ.get("LAUNCHER_TEST_GPU"):  # `make test-gpu`: tests of what only a GPU can show
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Nor whether it has a key; tests of what W&B is told ask for it.
os.environ["WANDB_MODE"] = "disabled"
# Nor what runs on it have taught.
os.environ["LAUNCHER_CACHE_DIR"] = tempfile.mkdtemp(prefix="launcher-tests-")
# Not even runs of the tests: a plan must not depend on which of them came first. Tests of it name a file of their own.
os.environ["LAUNCHER_CALIBRATION"] = "off"
# Nor what its user knows of it.
os.environ["LAUNCHER_HARDWARE"] = "off"

ALL_VARIABLE, TORTURE_VARIABLE = "LAUNCHER_TEST_ALL", "LAUNCHER_TORTURE"

Tree = dict[str, Any]
WriteManifest = Callable[..., Path]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(ALL_VARIABLE) or os.environ.get(TORTURE_VARIABLE):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason=f"slow; `make test-all`, or {ALL_VARIABLE}=1"))


def python_path() -> str:
    """For child processes: the checkout first, then wherever this process finds its packages."""
    inherited = os.environ.get("PYTHONPATH")
    return f"{ROOT}{os.pathsep}{inherited}" if inherited else str(ROOT)


def published_manifests() -> list[Path]:
    return sorted(file for file in SHARED_MANIFESTS.glob("expert*.json") if not file.name.endswith(".schema.json"))


def expert_manifests() -> list[Path]:
    return sorted(ROOT.glob("experts/*/manifest.json"))


@pytest.fixture(scope="session")
def published_schema() -> Tree:
    file = SHARED_MANIFESTS / "expert-manifest.schema.json"
    if not file.is_file():
        pytest.skip("the published manifests do not lie beside this checkout")
    tree: Tree = json.loads(file.read_text())
    return tree


@pytest.fixture(scope="session")
def neo4j_tree() -> Tree:
    tree: Tree = json.loads((ROOT / "experts/neo4j/manifest.json").read_text())
    return tree


@pytest.fixture
def write_manifest(tmp_path: Path, neo4j_tree: Tree) -> WriteManifest:
    """The neo4j manifest with changes, as a file: write_manifest({"training.config.rank": 0}, drop=("name",))."""

    def write(changes: dict[str, Any] | None = None, drop: tuple[str, ...] = ()) -> Path:
        tree = copy.deepcopy(neo4j_tree)
        for path, value in (changes or {}).items():
            parent, key = find_parent(tree, path)
            parent[key] = value
        for path in drop:
            parent, key = find_parent(tree, path)
            del parent[key]
        file = tmp_path / "manifest.json"
        file.write_text(json.dumps(tree))
        return file

    return write


def find_parent(tree: Any, path: str) -> tuple[Any, Any]:
    *above, key = path.split(".")
    for part in above:
        tree = tree[int(part)] if part.isdigit() else tree[part]
    return tree, int(key) if key.isdigit() else key


@pytest.fixture(autouse=True)
def _hub_as_it_was() -> Iterator[None]:
    """`launcher data` forbids its own process to fetch anything; a test that calls it must not forbid the next one."""
    before = os.environ.get("HF_HUB_OFFLINE")
    yield
    if before is None:
        os.environ.pop("HF_HUB_OFFLINE", None)
    else:
        os.environ["HF_HUB_OFFLINE"] = before
