"""Files that only others read: CI, pre-commit, the extras of the package."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT


def load(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_ci_runs_what_ci_runs() -> None:
    tree = load(".github/workflows/ci.yml")
    assert set(tree[True]) == {"push", "pull_request"}  # YAML reads `on` as true
    (job,) = tree["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o100
    assert tree["permissions"] == {"contents": "read"}
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)


def test_ci_runs_on_the_pythons_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line}
    (job,) = load(".github/workflows/ci.yml")["jobs"].values()
    assert set(job["strategy"]["matrix"]["python"]) == named


HOOKS = [hook for repo in load(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]


def test_hooks_are_local_so_that_their_versions_are_ours() -> None:
    assert [repo["repo"] for repo in load(".pre-commit-config.yaml")["repos"]] == ["local"]
    assert len({hook["id"] for hook in HOOKS}) == len(HOOKS)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: str(hook["id"]))
def test_hooks_can_run(hook: dict[str, Any]) -> None:
    """Of what pre-commit asks for: an id, a name, an entry, a language; and a command that exists here."""
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
    """Every check of `make check` that takes seconds is a hook; the generator's takes longer."""
    recipe = (ROOT / "Makefile").read_text().partition("\ncheck:")[2].partition("\n\n")[0]
    checks = {line.strip().removeprefix("@$(BIN)/") for line in recipe.split("\n")[1:]}
    hooks = {hook["entry"].removeprefix(".venv/bin/").replace(" --force-exclude", "") for hook in HOOKS}
    missing = {check for check in checks if check.removesuffix(" .") not in hooks}
    assert missing == {"python -m experts.generator --check"}


def test_extras_name_what_is_pinned() -> None:
    """But for what needs a GPU to be installed, and betas."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").open()}
    named = {re.split(r"[\[<>=]", item)[0].lower() for items in extras.values() for item in items}
    assert named - pinned - {"expert-launcher", "flash-attn-4"} == set()
