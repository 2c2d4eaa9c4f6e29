"""A leading ~ in paths of manifests, --set and environment variables is the home folder, as in a shell."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.core.errors import InputError
from launcher.core.run_paths import expand_home, get_cache_folder
from launcher.hardware.user_overrides import find_hardware_file
from launcher.judges.node_tools import get_node_dir
from launcher.manifest import load_manifest
from launcher.manifest.cache_dir import get_data_dir
from launcher.manifest.model import Manifest
from launcher.request.request import Request, base_folders, plan_request
from launcher.runs.calibration_store import get_calibration_file
from tests.conftest import ROOT

TASK = {"train": "~/train.jsonl", "valid": "~/valid.jsonl", "test": "~/test.jsonl", "weight": 1, "format": "jsonl"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def load(folder: Path, *overrides: str, **dataset: object) -> Manifest:
    tree = json.loads((ROOT / "experts/json/manifest.json").read_text())
    tree["training"]["dataset"] |= dataset
    file = folder / "manifest.json"
    file.write_text(json.dumps(tree))
    return load_manifest(file, overrides).manifest


def test_paths_of_a_manifest(home: Path) -> None:
    files = {"path": "~/train.jsonl", "validation_path": "~/valid.jsonl", "test_path": "~/test.jsonl"}
    dataset = load(home, **files).training.dataset
    assert [dataset.path, dataset.validation_path, dataset.test_path] == [
        f"{home}/{name}.jsonl" for name in ("train", "valid", "test")
    ]
    tasks = load(home, type="multi_task", tasks={"a": TASK}).training.dataset.tasks or {}
    assert [tasks["a"].train, tasks["a"].valid, tasks["a"].test] == [
        f"{home}/{name}.jsonl" for name in ("train", "valid", "test")
    ]


def test_paths_of_overrides(home: Path) -> None:
    manifest = load(
        home, "training.dataset.path=~/a.jsonl", "base_models[0].name=~/base", "base_models[0].revision=null"
    )
    assert (manifest.training.dataset.path, manifest.base.name) == (f"{home}/a.jsonl", f"{home}/base")


@pytest.mark.parametrize("name", ["a~b.jsonl", "./~/a.jsonl", "a/~", "~unknown-user/a.jsonl"])
def test_other_tildes_stay(home: Path, name: str) -> None:
    assert load(home, path=name).training.dataset.path == name


def test_prepared_data_cannot_be_put_into_the_home_folder(home: Path) -> None:
    with pytest.raises(InputError, match="is outside the data folder"):
        load(home, "training.config.pretokenized_cache=~/cache")
    assert not Path("~").exists()


def test_rows_and_base_in_the_home_folder_are_planned(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "project").mkdir()
    monkeypatch.chdir(home / "project")
    shutil.copy(ROOT / "experts/json/sample/train.jsonl", home / "rows.jsonl")
    load(home / "project", path="~/rows.jsonl", validation_path=None, test_path=None)
    plan = plan_request(Request(expert="manifest.json", gpu="rtx4090")).plan
    assert plan.data.path == f"{home}/rows.jsonl"
    assert plan.data.num_rows == len((home / "rows.jsonl").read_text().splitlines())


VARIABLES: dict[str, Callable[[], Path | None]] = {
    "LAUNCHER_DATA_DIR": get_data_dir,
    "LAUNCHER_MODELS_DIR": lambda: base_folders(Path())[0],
    "LAUNCHER_CACHE_DIR": get_cache_folder,
    "LAUNCHER_HARDWARE": find_hardware_file,
    "LAUNCHER_CALIBRATION": get_calibration_file,
    "LAUNCHER_NODE_DIR": get_node_dir,
}


@pytest.mark.parametrize("variable", VARIABLES)
def test_paths_of_environment_variables(home: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "~/folder")
    assert VARIABLES[variable]() == home / "folder"


def test_user_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 12345678)
    assert expand_home("~/a") == "~/a"
