"""Architecture rules: layers of packages, light imports, names that shadow other packages, and size limits."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "launcher"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Lowest first. A package imports packages of lower layers only, never its own layer. A dotted entry is a package inside
# another one with a layer of its own.
LAYERS = (
    ("core",),
    ("manifest", "base_models"),
    ("hardware", "judges"),
    ("plan.estimate",),
    ("plan",),
    ("corpus", "render", "runs"),
    ("request",),
    ("analysis", "new_expert"),
    ("launch", "bench"),
    ("launch.sweep",),
    ("cli", "training"),
    ("bench.workers", "train", "__main__"),
)
# The same inside launcher/training/, whose packages may also use what is listed in TRAINING_USES.
TRAINING_LAYERS = (
    ("kernels", "data"),
    ("model",),
    ("runtime", "verify"),
    ("cluster", "engine", "inference", "diagnostics"),
    ("checkpoint", "evaluation", "tracking"),
    ("export",),
    ("observers",),
    ("monitoring",),
    ("topology_check", "oom"),
    ("build", "loop"),
    ("warmup_step",),
    ("trainer",),
)
# Training imports nothing that starts processes.
NOT_FOR_TRAINING = {"render", "launch", "cli", "bench", "new_expert"}

HEAVY = {
    "torch",
    "transformers",
    "accelerate",
    "deepspeed",
    "peft",
    "datasets",
    "wandb",
    "numpy",
    "pyarrow",
    "tokenizers",
}
# Packages outside training/ that may import something heavy.
HEAVY_EXCEPTIONS = {
    "corpus": {"numpy", "pyarrow", "tokenizers", "datasets"},
    "analysis": {"wandb"},  # inside functions of wandb_dashboard only
}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70


def dotted_name(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def needs_torch(file: Path) -> bool:
    return dotted_name(file).startswith(("training", "bench.workers"))


LIGHT_MODULES = [file for file in MODULES if not needs_torch(file)]


@dataclass(frozen=True)
class Module:
    """What the rules are about in a module."""

    imported: tuple[str, ...]
    functions: tuple[tuple[str, int], ...]  # name and number of lines


@cache
def read_module(file: Path) -> Module:
    imported: list[str] = []
    functions: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.FunctionDef):
            functions.append((node.name, (node.end_lineno or 0) - node.lineno + 1))
    return Module(tuple(imported), tuple(functions))


def find_package(name: str, layers: tuple[tuple[str, ...], ...]) -> tuple[int, str] | None:
    """Return layer and package of a dotted name; the longest matching entry wins."""
    entries = [(len(entry), level, entry) for level, layer in enumerate(layers) for entry in layer]
    matches = [one for one in entries if name == one[2] or name.startswith(one[2] + ".")]
    return None if not matches else max(matches)[1:]


def find_upward_imports(file: Path, name: str, root: str, layers: tuple[tuple[str, ...], ...]) -> list[str]:
    own = find_package(name, layers)
    assert own is not None, f"add {root}.{name} to the layers in {Path(__file__).name}"
    found = []
    for imported in read_module(file).imported:
        if imported.startswith(f"{root}."):
            target = find_package(imported.removeprefix(f"{root}."), layers)
            if target is not None and target[1] != own[1] and target[0] >= own[0]:
                found.append(imported)
    return found


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(ROOT)))
def test_packages_import_lower_layers_only(file: Path) -> None:
    name = dotted_name(file)
    if name not in ("", "__init__"):
        assert find_upward_imports(file, name, "launcher", LAYERS) == []
    inside = name.removeprefix("training.")
    if inside != name:
        assert find_upward_imports(file, inside, "launcher.training", TRAINING_LAYERS) == []
        used = {imported.split(".")[1] for imported in read_module(file).imported if imported.startswith("launcher.")}
        assert used & NOT_FOR_TRAINING == set()


@pytest.mark.parametrize("file", LIGHT_MODULES, ids=lambda file: str(file.relative_to(ROOT)))
def test_nothing_heavy_is_imported_outside_training(file: Path) -> None:
    heavy = HEAVY - HEAVY_EXCEPTIONS.get(dotted_name(file).split(".")[0], set())
    assert {name.split(".")[0] for name in read_module(file).imported} & heavy == set()


def test_no_entry_shadows_another_package() -> None:
    """`accelerate launch launcher/train.py` puts launcher/ first on sys.path, where `json.py` would shadow json."""
    entries = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if not path.name.startswith("_")}
    taken = set(sys.stdlib_module_names) | set(packages_distributions()) - {"launcher"}
    assert entries & taken == set()


@pytest.mark.process
def test_light_modules_load_without_torch() -> None:
    names = [f"launcher.{dotted_name(file)}" for file in LIGHT_MODULES if file.stem not in ("__main__", "__init__")]
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print(sorted(set(sys.modules) & {HEAVY - HEAVY_EXCEPTIONS['corpus'] | {'datasets'}!r}))"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_the_layout_stays_small() -> None:
    def entries(folder: Path) -> list[str]:
        return [path.name for path in folder.iterdir() if path.name != "__pycache__"]

    assert len(entries(PACKAGE)) <= 20
    assert len(entries(PACKAGE / "training")) <= 22


def test_files_and_functions_stay_small() -> None:
    lengths = {file: len(file.read_text().splitlines()) for file in MODULES}
    too_long = [f"{file}: {count}" for file, count in lengths.items() if count > MAX_FILE_LINES]
    for file in MODULES:
        too_long += [f"{file}: {name}" for name, size in read_module(file).functions if size > MAX_FUNCTION_LINES]
    assert too_long == []


@pytest.mark.process
def test_no_machine_specific_path_is_committed() -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    home = "/" + "home/"
    found = []
    for name in filter(None, tracked.stdout.split("\0")):
        file = ROOT / name
        if file.is_file() and file != Path(__file__):
            text = file.read_text(errors="ignore")
            found += [name for path in (home, "/" + "root/", "/" + "work/") if path in text]
    assert found == []


def test_patterns_of_models_compile_quickly() -> None:
    """At import, pydantic compiles a Unicode class once for each of its repetitions: 200 take 0.1 s."""
    sources = [file.read_text(encoding="utf-8") for file in MODULES]
    patterns = [pattern for source in sources for pattern in re.findall(r'pattern=r"([^"]*)"', source)]
    assert patterns
    assert not [pattern for pattern in patterns if re.search(r"\\w[^{]*\{\d*,?\d{2,}\}", pattern)]
