"""A trained expert comes back whatever its family does to attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Gemma2Config

from launcher.corpus.store import Store
from launcher.manifest import load_manifest
from launcher.training.finished import FinishedRun
from launcher.training.reloading import load_expert
from launcher.training.saved import save_trained
from tests.training.builders import SIZES, build, make_plan, write_base


def test_a_base_that_caps_its_scores_can_be_loaded_again(store: Store, tmp_path: Path) -> None:
    """transformers refuses to load Gemma 2 with torch's attention, which cannot cap."""
    base = write_base(tmp_path / "gemma2" / "base", Gemma2Config(**SIZES, attn_logit_softcapping=2.0))
    plan = make_plan(base, {"attention.backend": "eager", "attention.fallbacks": ()})
    run = build(plan, store, tmp_path / "run")
    save_trained(run, run.paths.adapter)
    manifest = load_manifest(base.parent / "manifest.json").manifest
    finished = FinishedRun(paths=run.paths, plan=plan, manifest=manifest, outcome=None)
    model: Any = load_expert(finished, "fp32", torch.device("cpu"))
    assert model.get_base_model().config._attn_implementation == "eager"
