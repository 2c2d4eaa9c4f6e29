"""The layers, held: who may import whom, what is never imported, and names that would shadow other packages."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "launcher"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Entry of launcher/ -> the entries that it may import. Whatever is not named here is free for all below it.
FOUNDATION = {"__init__", "errors", "redaction", "units", "values", "choices", "versions"}
MAY_USE: dict[str, set[str]] = {
    "__init__": set(),
    "__main__": {"cli"},
    "errors": {"redaction"},
    "redaction": set(),
    "units": set(),
    "values": set(),
    "choices": set(),
    "versions": set(),
    "paths": FOUNDATION,
    "manifest": FOUNDATION,
    "hardware": FOUNDATION,
    "gpus": FOUNDATION | {"hardware"},
    "probe": FOUNDATION | {"hardware", "gpus"},
    "own_hardware": FOUNDATION | {"hardware", "gpus", "manifest"},
    "bases": FOUNDATION,
    "shapes": FOUNDATION | {"bases"},
    "memory": FOUNDATION | {"shapes", "hardware"},
    "rows": FOUNDATION | {"manifest"},
    "speed": FOUNDATION | {"shapes", "hardware"},
    "scaling": FOUNDATION | {"shapes", "hardware", "speed"},
    "plan": FOUNDATION | {"memory", "speed", "scaling", "manifest", "hardware", "gpus", "shapes", "rows", "quality"},
    "started": FOUNDATION,
    "inputs": FOUNDATION
    | {"started", "manifest", "hardware", "gpus", "probe", "bases", "shapes", "rows", "plan"}
    | {"calibration", "experience", "own_hardware"},
    "render": FOUNDATION | {"plan", "paths", "hardware", "shapes"},
    "guides": FOUNDATION | {"cli", "inputs", "manifest", "plan"},
    "record": FOUNDATION | {"paths", "metrics", "plan"},
    "quality": FOUNDATION | {"manifest"},
    "regression": FOUNDATION | {"corpus", "inputs", "metrics", "paths", "plan", "processes", "quality", "record"},
    "tracking": FOUNDATION | {"metrics", "paths", "hardware", "plan", "record"},
    "evaluations": FOUNDATION | {"quality", "record"},
    "compare": FOUNDATION | {"evaluations", "metrics", "paths", "plan", "prose", "quality", "record", "tracking"},
    "checkpoints": FOUNDATION | {"paths"},
    "locking": FOUNDATION | {"paths"},
    "experience": FOUNDATION | {"locking", "paths", "plan"},
    "calibration": FOUNDATION | {"experience", "hardware", "locking", "metrics", "paths", "plan", "record"},
    "runs": FOUNDATION | {"paths", "inputs", "hardware", "manifest", "record"},
    "processes": FOUNDATION,
    "relay": FOUNDATION,
    "supervise": FOUNDATION | {"processes", "relay"},
    "agents": FOUNDATION,
    "nodes": FOUNDATION | {"paths", "plan", "record", "render"},
    "ending": FOUNDATION | {"nodes", "paths", "record", "supervise"},
    "launch": FOUNDATION
    | {"render", "paths", "plan", "inputs", "hardware", "probe", "record", "runs", "relay", "supervise", "ending"}
    | {"agents", "nodes", "processes", "report"},
    "resume": FOUNDATION | {"checkpoints", "inputs", "launch", "paths", "plan", "record", "render", "runs"},
    "attempts": FOUNDATION | {"experience", "inputs", "launch", "nodes", "paths", "plan", "record", "relay"},
    "submit": FOUNDATION | {"paths"},
    "rehearsal": FOUNDATION | {"inputs", "launch", "metrics", "nodes", "paths", "plan", "probe", "render", "runs"},
    "corpus": FOUNDATION | {"manifest", "paths", "bases", "plan", "rows"},
    "preparing": FOUNDATION | {"corpus", "inputs", "manifest"},
    "new_expert": FOUNDATION | {"bases", "corpus", "inputs", "manifest", "paths", "plan", "quality", "rows", "shapes"},
    "examination": FOUNDATION,
    "doctor": FOUNDATION
    | {"bases", "corpus", "examination", "hardware", "inputs", "locking", "metrics", "paths", "plan", "probe"}
    | {"own_hardware", "processes", "record", "rows", "tracking"},
    "bench": FOUNDATION
    | {"bases", "compare", "corpus", "hardware", "inputs", "manifest", "memory", "metrics", "paths", "plan"}
    | {"processes", "prose", "shapes"},
    "metrics": FOUNDATION,
    "prose": FOUNDATION,
    "dashboard": FOUNDATION | {"metrics", "processes", "tracking"},
    "report": FOUNDATION
    | {"checkpoints", "evaluations", "hardware", "inputs", "metrics", "paths", "plan", "prose", "quality", "record"},
    "arguments": FOUNDATION | {"inputs"},
    "training": FOUNDATION
    | {"plan", "metrics", "paths", "corpus", "memory", "speed", "record", "bases", "manifest", "inputs", "preparing"}
    | {"started", "checkpoints", "examination", "experience", "processes", "probe", "prose", "quality", "report"}
    | {"bench", "scaling", "tracking"},
    "train": FOUNDATION
    | {"started", "arguments", "manifest", "plan", "inputs", "paths", "runs", "corpus", "training"}
    | {"calibration", "locking"},
    "cli": FOUNDATION
    | {
        "arguments",
        "attempts",
        "bench",
        "gpus",
        "manifest",
        "inputs",
        "hardware",
        "launch",
        "locking",
        "new_expert",
        "nodes",
        "paths",
        "plan",
        "preparing",
        "probe",
        "compare",
        "corpus",
        "dashboard",
        "doctor",
        "processes",
        "quality",
        "record",
        "regression",
        "report",
        "rehearsal",
        "relay",
        "render",
        "resume",
        "runs",
        "submit",
        "tracking",
    },
}
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
# Preparing data takes these, inside corpus/ alone; datasets only once a hub is asked.
CORPUS_USES = {"numpy", "pyarrow", "tokenizers", "datasets"}
# Whoever saves a dashboard asks W&B, inside functions alone.
DASHBOARD_USES = {"wandb"}


def entry_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


LAUNCHER_STACK = [file for file in MODULES if entry_of(file) != "training"]


def imported_names(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(ROOT)))
def test_modules_import_only_what_their_layer_may(file: Path) -> None:
    entry = entry_of(file)
    assert entry in MAY_USE, f"say in MAY_USE what launcher/{entry} may import"
    entries = {path.name.removesuffix(".py") for path in PACKAGE.iterdir()}
    used = {name.split(".")[1] for name in imported_names(file) if name.startswith("launcher.")} & entries
    assert used - MAY_USE[entry] - {entry} == set()


@pytest.mark.parametrize("file", LAUNCHER_STACK, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_launcher_stack_imports_nothing_heavy(file: Path) -> None:
    allowed = {"corpus": CORPUS_USES, "dashboard": DASHBOARD_USES}
    heavy = HEAVY - allowed.get(entry_of(file), set())
    assert {name.split(".")[0] for name in imported_names(file)} & heavy == set()


def test_no_entry_shadows_another_package() -> None:
    """`accelerate launch launcher/train.py` puts launcher/ first on sys.path, where `json.py` would capture json."""
    entries = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if not path.name.startswith("_")}
    taken = set(sys.stdlib_module_names) | set(packages_distributions()) - {"launcher"}
    assert entries & taken == set()


def test_the_whole_stack_loads_without_torch() -> None:
    light = [file for file in LAUNCHER_STACK if file.name != "__main__.py"]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in light]
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print(sorted(set(sys.modules) & {HEAVY - CORPUS_USES | {'datasets'}!r}))"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_files_and_functions_stay_small() -> None:
    too_long = [f"{file}: {count}" for file in MODULES if (count := len(file.read_text().splitlines())) > 400]
    for file in MODULES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.end_lineno and node.end_lineno - node.lineno >= 70:
                too_long.append(f"{file}: {node.name}")
    assert too_long == []


def test_no_path_of_a_machine_is_committed() -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    home = "/" + "home/"
    found = []
    for name in filter(None, tracked.stdout.split("\0")):
        file = ROOT / name
        if file.is_file() and file != Path(__file__):
            text = file.read_text(errors="ignore")
            found += [name for path in (home, "/" + "root/", "/" + "work/") if path in text]
    assert found == []
