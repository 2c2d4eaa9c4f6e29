"""Fixtures shared by several test folders. Tests marked `slow` run only with LAUNCHER_TEST_ALL (`make test-all`)."""

from __future__ import annotations

import atexit
import copy
import gc
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.core.log import configure

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
SHARED_MANIFESTS = SHARED / "manifests"
# The shipped experts: a checkout may also have experts of its user.
EXPERTS = ("json", "neo4j", "sql", "typescript")

# Under nohup these signals are ignored, and the processes that the tests start and stop would inherit that.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)
# The tests plan for machines without a GPU or for GPUs of the catalogue, independently of this machine: of its GPUs,
if not os.environ.get("LAUNCHER_TEST_GPU"):  # set by `make test-gpu`
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# its W&B login (tests of the logging enable W&B themselves),
os.environ["WANDB_MODE"] = "disabled"
# its cached history of earlier runs,
os.environ["LAUNCHER_CACHE_DIR"] = tempfile.mkdtemp(prefix="launcher-tests-")
atexit.register(shutil.rmtree, os.environ["LAUNCHER_CACHE_DIR"], ignore_errors=True)
# its prepared data (commands that tests run in the checkout would leave stores there),
os.environ["LAUNCHER_DATA_DIR"] = os.environ["LAUNCHER_CACHE_DIR"] + "/data"
# its calibration (not even by the tests' own runs; tests of the calibration set a file),
os.environ["LAUNCHER_CALIBRATION"] = "off"
# and its hardware.json.
os.environ["LAUNCHER_HARDWARE"] = "off"

# Compiled modules are kept, also where the environment forbids it: each process would compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Test processes run in parallel: more threads in each would compete for the same cores. Read when torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

configure()  # tests read log lines from stderr, as users do

ALL_VARIABLE, TORTURE_VARIABLE, FAST_VARIABLE = "LAUNCHER_TEST_ALL", "LAUNCHER_TORTURE", "LAUNCHER_TEST_FAST"
_IMPORTS_TORCH = re.compile(
    r"""^(?:(?:from|import) |.*importorskip\(["'])(?:torch|transformers|accelerate|deepspeed|benchmarks\.peers)\b""",
    re.MULTILINE,
)

# Each group runs in one test process: its tests share what takes long to make, such as a server process with torch.
_TRAINED = tuple(f"tests/training/{name}/" for name in ("evaluation", "export", "inference"))
_TOGETHER = (
    ("tests/distributed/", "tests/faults/"),
    (*_TRAINED, "tests/unit/test_train_script.py"),
    ("tests/unit/judges/cypher/",),
    ("tests/unit/judges/typescript/",),
)

Tree = dict[str, Any]
WriteManifest = Callable[..., Path]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out files that import torch if only quick tests are requested: the import takes seconds per process."""
    if not os.environ.get(FAST_VARIABLE) or collection_path.suffix != ".py":
        return None
    return True if _IMPORTS_TORCH.search(collection_path.read_text(encoding="utf-8")) else None


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """Exempt imported modules and collected tests from garbage collection, which takes an eighth of the time."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(ALL_VARIABLE) or os.environ.get(TORTURE_VARIABLE):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason=f"slow; `make test-all`, or {ALL_VARIABLE}=1"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each test process whole files, and the files of `_TOGETHER` to one."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class GroupedFiles(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return next((group[0] for group in _TOGETHER if nodeid.startswith(group)), super()._split_scope(nodeid))

    return GroupedFiles(config, log)


def python_path() -> str:
    """Return the PYTHONPATH of child processes: the checkout, then the inherited one."""
    inherited = os.environ.get("PYTHONPATH")
    return f"{ROOT}{os.pathsep}{inherited}" if inherited else str(ROOT)


def outside_make() -> dict[str, str]:
    """Return the environment without what `make test ARGS=…` passes on to a `make` that a test runs."""
    names = ("MAKEFLAGS", "MAKEOVERRIDES", "EXPERT", "STEPS", "ARGS", "VARY", "JOBS")
    return {name: value for name, value in os.environ.items() if name not in names}


def published_manifests() -> list[Path]:
    return sorted(file for file in SHARED_MANIFESTS.glob("expert*.json") if not file.name.endswith(".schema.json"))


def expert_manifests() -> list[Path]:
    return [ROOT / "experts" / name / "manifest.json" for name in EXPERTS]


@pytest.fixture(scope="session")
def published_schema() -> Tree:
    file = SHARED_MANIFESTS / "expert-manifest.schema.json"
    if not file.is_file():
        pytest.skip("the published manifests are not next to this checkout")
    tree: Tree = json.loads(file.read_text())
    return tree


@pytest.fixture(scope="session")
def neo4j_tree() -> Tree:
    tree: Tree = json.loads((ROOT / "experts/neo4j/manifest.json").read_text())
    return tree


@pytest.fixture
def write_manifest(tmp_path: Path, neo4j_tree: Tree) -> WriteManifest:
    """A function that writes the neo4j manifest with changes and without dropped keys."""

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
def _restore_environment() -> Iterator[None]:
    """Restore variables that commands set in their own process."""
    names = ("HF_HUB_OFFLINE", "LAUNCHER_TRUST")
    before = {name: os.environ.get(name) for name in names}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
