"""Wheel and sdist outside of a checkout: files, installation and extras; the wheel plans and trains."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.conftest import EXPERTS, ROOT

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# Required files that are not Python modules.
DATA = (
    "launcher/py.typed",
    "launcher/base_models/tiny_base/config.json",
    "launcher/base_models/tiny_base/model.safetensors",
    "launcher/base_models/tiny_base/tokenizer.json",
    "launcher/analysis/compare/page/page.html",
    "launcher/analysis/compare/page/page.js",
    "launcher/analysis/compare/page/style.css",
    "launcher/judges/node/package-lock.json",
    "launcher/judges/typescript/js/runner.cjs",
    "launcher/experts/manifest.schema.json",
    "launcher/accelerate_configs/fsdp2_8gpu.yaml",
    "launcher/ds_configs/zero3.json",
    "launcher/docs/CLI.md",
    *(f"launcher/experts/{name}/manifest.json" for name in EXPERTS),
    *(f"launcher/experts/{name}/sample/{part}.jsonl" for name in EXPERTS for part in ("train", "validation", "test")),
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], folder)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a virtual environment with the wheel; other packages come from the environment of the tests."""
    folder = tmp_path_factory.mktemp("environment")
    run([sys.executable, "-m", "venv", str(folder)], folder)
    python = folder / "bin/python"
    run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    borrowed = [path for path in (*site.getsitepackages(), *sys.path) if path.endswith("site-packages")]
    (packages / "borrowed.pth").write_text("".join(f"{path}\n" for path in dict.fromkeys(borrowed)))
    return python


@pytest.fixture(scope="module")
def empty_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a virtual environment without packages of the tests' environment; needs a package index."""
    folder = tmp_path_factory.mktemp("empty")
    run([sys.executable, "-m", "venv", str(folder)], folder)
    python = folder / "bin/python"
    probe = [str(python), "-m", "pip", "install", "--quiet", "hatchling>=1.27"]
    if subprocess.run(probe, cwd=folder, capture_output=True, check=False).returncode:
        pytest.skip("no package index")
    return python


@pytest.fixture(scope="module")
def sdist(empty_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist from the files of the commit: other files of a checkout are not part of it."""
    folder = tmp_path_factory.mktemp("sdist")
    command = "from hatchling import build; import sys; build.build_sdist(sys.argv[1])"
    run([str(empty_python), "-c", command, str(folder)], ROOT)
    (file,) = folder.glob("*.tar.gz")
    return file


def run(command: list[str], folder: Path) -> str:
    """Run a command so that the checkout is neither on the path nor the working directory."""
    done = subprocess.run(command, cwd=folder, env=hide_checkout(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def hide_checkout() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.mark.slow
def test_wheel_has_data_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert [name for name in DATA if name not in names] == []
    assert [name for name in names if name.startswith(("tests/", "experts/", "benchmarks/", "docs/"))] == []
    modules = {str(file.relative_to(ROOT)) for file in (ROOT / "launcher").rglob("*.py")}
    assert modules - names == set()


@pytest.mark.slow
@pytest.mark.parametrize("expert", EXPERTS)
def test_wheel_plans_and_dry_runs_in_an_empty_folder(python: Path, expert: str, tmp_path: Path) -> None:
    launcher = str(python.parent / "launcher")
    where = run([str(python), "-c", "import launcher; print(launcher.__file__)"], tmp_path)
    assert str(python.parent.parent) in where
    plan = json.loads(run([launcher, "plan", expert, "--gpu", "rtx4090", "--json"], tmp_path))
    assert plan["expert"] == expert
    summary = json.loads(run([launcher, "train", expert, "--dry-run", "--json"], tmp_path))
    files = {file.name for file in (tmp_path / "runs" / summary["run_id"]).iterdir()}
    assert {"plan.json", "accelerate.yaml", "command.txt", "manifest.json"} <= files


@pytest.mark.slow
def test_wheel_trains_in_an_empty_folder(python: Path, tmp_path: Path) -> None:
    launcher = str(python.parent / "launcher")
    run([launcher, "train", "json", "--max-steps", "2", "--run-id", "a", "--wandb", "disabled"], tmp_path)
    assert (tmp_path / "runs/a/adapter/adapter_model.safetensors").is_file()
    run([launcher, "compare", "a"], tmp_path)
    assert "<html" in (tmp_path / "compare.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_sdist_builds_the_same_wheel(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "constraints.txt", "Makefile"} <= names
    run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(sdist)],
        tmp_path,
    )
    (rebuilt,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(rebuilt) as theirs:
        assert sorted(ours.namelist()) == sorted(theirs.namelist())


@pytest.mark.slow
def test_wheel_installs_into_an_empty_environment(wheel: Path, empty_python: Path, tmp_path: Path) -> None:
    """Its own dependencies are enough for a plan; torch is not among them, and the message says what to install."""
    pip = [str(empty_python), "-m", "pip"]
    run([*pip, "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(wheel)], tmp_path)
    run([*pip, "check"], tmp_path)
    launcher = str(empty_python.parent / "launcher")
    assert json.loads(run([launcher, "plan", "neo4j", "--gpu", "rtx4090", "--json"], tmp_path))["expert"] == "neo4j"
    done = subprocess.run(
        [launcher, "train", "json"], cwd=tmp_path, env=hide_checkout(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "expert-launcher[train]" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.usefixtures("empty_python")
def test_extras_resolve(wheel: Path, extra: str, tmp_path: Path) -> None:
    pins = [] if extra == "flash4" else ["-c", str(ROOT / "constraints.txt")]  # a beta, not pinned
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", *pins]
    run([*pip, f"{wheel}[{extra}]"], tmp_path)
