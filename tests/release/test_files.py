"""Files read by other tools: the CI workflow, pre-commit hooks, the extras of the package."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.manifest import list_experts
from tests.conftest import ROOT, outside_make


def load(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_workflow_runs_the_ci_script() -> None:
    tree = load(".github/workflows/ci.yml")
    assert set(tree[True]) == {"push", "pull_request"}  # YAML reads `on` as true
    (job,) = tree["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o100
    assert tree["permissions"] == {"contents": "read"}
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)


def test_ci_covers_the_supported_pythons() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line}
    (job,) = load(".github/workflows/ci.yml")["jobs"].values()
    assert set(job["strategy"]["matrix"]["python"]) == named


HOOKS = [hook for repo in load(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]


def test_hooks_use_the_versions_of_the_environment() -> None:
    assert [repo["repo"] for repo in load(".pre-commit-config.yaml")["repos"]] == ["local"]
    assert len({hook["id"] for hook in HOOKS}) == len(HOOKS)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: str(hook["id"]))
def test_hooks_can_run(hook: dict[str, Any]) -> None:
    """Each hook has the keys that pre-commit requires, and a command that exists."""
    assert {"id", "name", "entry", "language"} <= set(hook)
    allowed = {"types", "types_or", "files", "pass_filenames"}
    assert set(hook) - {"id", "name", "entry", "language"} <= allowed
    assert hook["language"] == "system"
    program, *words = hook["entry"].split()
    assert program.startswith(".venv/bin/")
    modules = [words[1]] if words[:1] == ["-m"] else [program.removeprefix(".venv/bin/")]
    assert all(importlib.util.find_spec(module) is not None for module in modules)
    assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))
    if "files" in hook:
        re.compile(hook["files"])


def test_hooks_and_make_check_agree() -> None:
    """Every check of `make check` is a hook, except the slow one of the generator."""
    recipe = (ROOT / "Makefile").read_text().partition("\ncheck:")[2].partition("\n\n")[0]
    checks = {line.strip().removeprefix("@$(BIN)/") for line in recipe.split("\n")[1:]}
    hooks = {hook["entry"].removeprefix(".venv/bin/").replace(" --force-exclude", "") for hook in HOOKS}
    missing = {check for check in checks if check.removesuffix(" .") not in hooks}
    assert missing == {"python -m experts.generator --check"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train"], f"no expert given. Write EXPERT=NAME; experts: {' '.join(list_experts())}."),
        (["train", "EXPERT=json", "MAX_STEPS=5"], "unknown: MAX_STEPS. Variables: EXPERT STEPS ARGS"),
        (["train", "EXPERT=json", "STEPS=5", "ARGS=--gpu h100"], "launcher train json --max-steps 5 --gpu h100\n"),
        (["train", "ARGS=--resume a"], "launcher train   --resume a\n"),
        (["doctor"], "launcher doctor  \n"),
    ],
)
def test_make_refuses_missing_experts_and_unknown_variables(words: list[str], message: str) -> None:
    shown = subprocess.run(
        ["make", "--dry-run", *words], cwd=ROOT, env=outside_make(), capture_output=True, text=True, check=False
    )
    assert message in shown.stdout + shown.stderr


def test_packages_of_the_extras_are_pinned() -> None:
    """Except packages that need a GPU to be installed, and betas."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").open()}
    named = {re.split(r"[\[<>=]", item)[0].lower() for items in extras.values() for item in items}
    assert named - pinned - {"expert-launcher", "flash-attn-4"} == set()


@pytest.mark.slow
def test_tests_pass_next_to_an_own_expert(tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    ignored = (".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "datasets_optimized")
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*ignored))
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    made = [sys.executable, "-m", "launcher", "new", "shop", "--data", "experts/sql/sample/train.jsonl"]
    subprocess.run(made, cwd=folder, env=environment, check=True, capture_output=True)
    before = {path.name for path in folder.iterdir()}
    files = [f"tests/unit/{name}" for name in ("cli/test_train.py", "judges/test_registry.py", "launch", "manifest")]
    tests = [sys.executable, "-m", "pytest", "tests/docs", "tests/release/test_files.py", *files]
    environment.pop("LAUNCHER_TEST_ALL")
    done = subprocess.run(tests, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    assert {path.name for path in folder.iterdir() if path.name[0] != "."} <= before
