"""Trained experts of every family can be loaded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig

from launcher.base_models.catalogue import TINY_BASE_FOLDER
from launcher.core.errors import InputError
from launcher.corpus.store import Store
from launcher.manifest import load_manifest
from launcher.plan import Plan
from launcher.training.checkpoint.weights import save_weights
from launcher.training.inference.load import load_from_folder, load_trained_model
from launcher.training.inference.trained_run import TrainedRun
from tests.training.builders import SIZES, build, make_plan, write_base


def finish_run(plan: Plan, store: Store, folder: Path) -> TrainedRun:
    run = build(plan, store, folder)
    save_weights(run, run.paths.adapter)
    manifest = load_manifest(Path(plan.base.name).parent / "manifest.json").manifest
    return TrainedRun(paths=run.paths, plan=plan, manifest=manifest, outcome=None)


def test_base_with_attention_softcap_can_be_loaded(store: Store, tmp_path: Path) -> None:
    """transformers refuses Gemma 2 with SDPA, which has no softcap."""
    base = write_base(tmp_path / "gemma2" / "base", Gemma2Config(**SIZES, attn_logit_softcapping=2.0))
    plan = make_plan(base, {"attention.backend": "eager", "attention.fallbacks": ()})
    model: Any = load_trained_model(finish_run(plan, store, tmp_path / "run"), "fp32", torch.device("cpu"))
    assert model.get_base_model().config._attn_implementation == "eager"


@pytest.mark.parametrize(("casts_adapter", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_dtype_of_the_adapter(store: Store, tmp_path: Path, casts_adapter: bool, dtype: torch.dtype) -> None:
    """Merging needs it in FP32; generation computes in BF16 as training does."""
    base = write_base(tmp_path / "llama" / "base", LlamaConfig(**SIZES))
    run = finish_run(make_plan(base), store, tmp_path / "run")
    model = load_trained_model(run, "bf16", torch.device("cpu"), casts_adapter=casts_adapter)
    assert {weight.dtype for name, weight in model.named_parameters() if "lora_" in name} == {dtype}
    assert {weight.dtype for name, weight in model.named_parameters() if "lora_" not in name} == {torch.bfloat16}


def test_pickled_weights_are_not_loaded(tmp_path: Path) -> None:
    shutil.copy(TINY_BASE_FOLDER / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(InputError, match=r"cannot be loaded: .*no file named model\.safetensors"):
        load_from_folder(tmp_path, "fp32", torch.device("cpu"))
