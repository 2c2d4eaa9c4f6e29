"""Processes that this package starts do not import files of the working directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.core.processes import make_child_environment, make_dependent_environment

pytestmark = pytest.mark.process

HOSTILE = "open('executed', 'w')\n"


@pytest.mark.parametrize("arguments", [["-m", "launcher", "--version"], ["script.py"], ["-c", "import json, yaml"]])
@pytest.mark.parametrize("make", [make_child_environment, make_dependent_environment])
def test_files_of_the_working_directory_are_not_imported(tmp_path: Path, make: object, arguments: list[str]) -> None:
    for name in ("json", "yaml", "pydantic", "launcher", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(HOSTILE)
    (tmp_path / "script.py").write_text("import json, yaml\n")
    assert callable(make)
    result = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, env=make(), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "executed").exists()


def test_python_would_import_them_without_this_environment(tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text(HOSTILE)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    subprocess.run([sys.executable, "-c", "import yaml"], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "executed").exists()
