"""A training process imports no installed package that its run does not use."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path

import pytest

from launcher.launch.prepare_data import prepare_planned
from launcher.request.request import Request, plan_request
from launcher.training.cluster.node_diff import list_used_packages
from launcher.training.runtime.unused_packages import hide_unused_packages
from tests.conftest import ROOT, python_path
from tests.training.trained_run import copy_expert
from tests.unit.plan.conftest import plan_for

# torch, transformers, PEFT, accelerate, pyarrow or the launcher could import them.
UNUSED = (
    "bitsandbytes",
    "datasets",
    "deepspeed",
    "gptqmodel",
    "matplotlib",
    "mlflow",
    "pandas",
    "scipy",
    "sklearn",
    "tensorboard",
    "torchao",
    "torchaudio",
    "torchvision",
    "wandb",
)


def install(folder: Path, notes: Path) -> None:
    """Install a package of each name, ahead of a real one, that notes who imports it."""
    for name in UNUSED:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(
            f"""__version__ = "99.0"
import traceback
with open({str(notes)!r}, "a") as file:
    file.write("{name}\\n" + "".join(traceback.format_stack()))
"""
        )
        info = folder / f"{name}-99.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 99.0\n")


@pytest.mark.process
def test_lora_run_imports_no_unused_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LAUNCHER_DATA_DIR", str(tmp_path / "data"))
    manifest = str(copy_expert("json", tmp_path / "experts", num_train=40, num_validation=8))
    prepare_planned(plan_request(Request(expert=manifest)), lambda _: None, lambda _: None)
    site, notes = tmp_path / "site", tmp_path / "notes.txt"
    install(site, notes)
    config = {"evaluation_strategy": "no", "load_best_model_at_end": "false", "wandb.mode": "disabled"}
    overrides = ["evaluation.task_rows=0", *(f"training.config.{key}={value}" for key, value in config.items())]
    flags = [word for override in overrides for word in ("--set", override)]
    run = ("--max-steps", "1", "--runs-dir", str(tmp_path / "runs"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((python_path(), str(site)))}
    command = [sys.executable, "-m", "launcher", "train", manifest, *flags, *run]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert not notes.exists(), notes.read_text()


def test_packages_of_the_plan_stay_visible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("bitsandbytes", "torchao"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    quantized = plan_for(overrides=("base_models.0.quantization=int4",))
    for plan, visible in (
        (plan_for(), (False, False)),
        (quantized, (True, False)),
        (plan_for(config={"optim": "adamw_bnb_8bit"}), (True, False)),
    ):
        hide_unused_packages(list_used_packages(plan))
        assert tuple(find_spec(name) is not None for name in ("bitsandbytes", "torchao")) == visible


def test_transformers_reads_each_folder_of_models_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    original = import_module("transformers.utils.import_utils")
    assert original.__file__ is not None
    folder = Path(original.__file__).parent.parent / "models"
    hide_unused_packages(())
    spec = sys.meta_path[0].find_spec(original.__name__, [str(Path(original.__file__).parent)])
    assert spec is not None
    assert spec.loader is not None
    quick = module_from_spec(spec)  # a second copy: the first one may have read everything
    spec.loader.exec_module(quick)
    names = quick.define_import_structure(str(folder / "__init__.py"))
    misses = quick.create_import_structure_from_path.cache_info().misses
    assert quick.define_import_structure(folder, prefix="models").keys() == names.keys()
    assert quick.create_import_structure_from_path.cache_info().misses <= misses + 1  # of all folders but the first
    some = [folder / name for name in ("auto", "bert", "qwen3", "llama")]
    assert [quick.define_import_structure(one) for one in some] == [
        original.define_import_structure(one) for one in some
    ]
    contents = (
        "",
        "__all__ = ['a']",
        "x = 1\n__all__ = [\n    'b',\n]\nif x:\n    pass\n",
        "# __all__\n",
        "__all__ = ['c']\n\n__all__ = ['d', 'e']",
    )
    assert [quick.fetch__all__(text) for text in contents] == [original.fetch__all__(text) for text in contents]
