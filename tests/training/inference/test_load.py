"""Trained experts of every family can be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Gemma2Config

from launcher.corpus.store import Store
from launcher.manifest import load_manifest
from launcher.training.checkpoint.weights import save_weights
from launcher.training.inference.load import load_trained_model
from launcher.training.inference.trained_run import TrainedRun
from tests.training.builders import SIZES, build, make_plan, write_base


def test_base_with_attention_softcap_can_be_loaded(store: Store, tmp_path: Path) -> None:
    """transformers refuses Gemma 2 with SDPA, which has no softcap."""
    base = write_base(tmp_path / "gemma2" / "base", Gemma2Config(**SIZES, attn_logit_softcapping=2.0))
    plan = make_plan(base, {"attention.backend": "eager", "attention.fallbacks": ()})
    run = build(plan, store, tmp_path / "run")
    save_weights(run, run.paths.adapter)
    manifest = load_manifest(base.parent / "manifest.json").manifest
    finished = TrainedRun(paths=run.paths, plan=plan, manifest=manifest, outcome=None)
    model: Any = load_trained_model(finished, "fp32", torch.device("cpu"))
    assert model.get_base_model().config._attn_implementation == "eager"
