"""Run directories: a written plan loads unchanged, and a failed write leaves no partial directory."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from launcher.core.errors import InputError
from launcher.launch.console import Console
from launcher.launch.start import _make_environment
from launcher.launch.write_run import find_train_script, write_run
from launcher.manifest import load_manifest
from launcher.plan import Plan
from launcher.render import Command
from launcher.request.request import PlannedRun, Request, plan_request
from tests.conftest import ROOT, WriteManifest, expert_manifests, published_manifests

ALL = [*published_manifests(), *expert_manifests()]


def planned(manifest: Path) -> PlannedRun:
    return plan_request(Request(expert=str(manifest), gpu="h100"))


def without_folder(plan: Plan) -> Plan:
    """Return the plan without the manifest's folder, which differs for a copied manifest, and notes that name it."""
    notes = tuple(note for note in plan.notes if "does not exist, so its rows were not checked" not in note)
    return plan.model_copy(update={"data": plan.data.model_copy(update={"folder": ""}), "notes": notes})


@pytest.mark.parametrize("manifest", ALL, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_run_directory_can_be_loaded(manifest: Path, tmp_path: Path) -> None:
    first = planned(manifest)
    run = write_run(first, tmp_path, "a")
    assert load_manifest(run.manifest).manifest == first.loaded.manifest
    assert without_folder(planned(run.manifest).plan) == without_folder(first.plan)
    assert Plan.model_validate_json(run.plan.read_text()) == first.plan


def test_train_script_of_another_folder_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert find_train_script() == "launcher/train.py"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher/train.py").write_text("downloaded")
    assert find_train_script() == str(ROOT / "launcher/train.py")


def test_torchrun_variables_of_a_platform_are_dropped() -> None:
    """Kubeflow Trainer sets them for torchrun; the nodes' flags are ours."""
    command = Command(argv=("x",), environment={"PET_RDZV_ID": "ours", "OMP_NUM_THREADS": "1"})
    inherited = {"PET_NNODES": "7", "PET_RDZV_ID": "theirs", "HOME": "/h"}
    console = Console(stdout=io.BytesIO(), stderr=io.BytesIO(), columns=None)
    environment = _make_environment(command, console, inherited)
    assert {name: value for name, value in environment.items() if name.startswith("PET_")} == {"PET_RDZV_ID": "ours"}
    assert environment["HOME"] == "/h"


def test_runs_of_the_same_second_are_numbered(tmp_path: Path, write_manifest: WriteManifest) -> None:
    made = planned(write_manifest())
    names = [write_run(made, tmp_path / "runs", None).run_id for _ in range(6)]
    assert len(set(names)) == 6
    assert any(name.endswith("-2") for name in names)


def test_long_name_is_shortened_in_the_run_id(tmp_path: Path, write_manifest: WriteManifest) -> None:
    run = write_run(planned(write_manifest({"name": "n" * 90})), tmp_path / "runs", None)
    assert run.run_id.startswith("n" * 38 + "-2")
    assert run.plan.is_file()


def test_full_disk_leaves_no_partial_run(
    tmp_path: Path, write_manifest: WriteManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planned(write_manifest())
    real = os.fsync
    calls = []

    def full_after_two(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full_after_two)
    for run_id in ("a", None):
        calls.clear()
        with pytest.raises(InputError, match="cannot be written: No space left on device"):
            write_run(made, tmp_path / "runs", run_id)
        assert len(calls) == 3
        assert list((tmp_path / "runs").iterdir()) == []


def test_existing_run_is_not_removed_by_a_duplicate(tmp_path: Path, write_manifest: WriteManifest) -> None:
    made = planned(write_manifest())
    first = write_run(made, tmp_path / "runs", "a")
    with pytest.raises(InputError, match="already exists"):
        write_run(made, tmp_path / "runs", "a")
    assert first.plan.is_file()
