"""Rendered text, by exact equality. After a change that was meant: UPDATE_GOLDEN=1 pytest tests/unit/render."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.core.run_paths import RunPaths
from launcher.plan.model import Plan
from launcher.render import render

MakePlan = Callable[..., Plan]


def read_tree(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*"))}


def test_rendered_text_equals_the_golden_files(case: str, plan: Plan, paths: RunPaths, project_root: Path) -> None:
    folder = project_root / "tests" / "golden" / "render" / case
    texts = render(plan, paths)
    if os.environ.get("UPDATE_GOLDEN"):
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.glob("*"):
            file.unlink()
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    assert texts == read_tree(folder)


def test_every_golden_folder_has_a_case(all_cases: frozenset[str], project_root: Path) -> None:
    assert {folder.name for folder in (project_root / "tests" / "golden" / "render").iterdir()} == all_cases


def test_a_deepspeed_file_comes_with_deepspeed_and_an_sbatch_script_with_nodes(
    make_plan: MakePlan, paths: RunPaths
) -> None:
    assert set(render(make_plan(), paths)) == {"accelerate.yaml", "command.txt"}
    assert set(render(make_plan(strategy="zero1"), paths)) == {
        "accelerate.yaml",
        "command.txt",
        "deepspeed.json",
    }
    two_nodes = render(make_plan(strategy="ddp", nodes=2), paths)
    assert set(two_nodes) == {"accelerate.yaml", "command.txt", "slurm.sbatch"}


@st.composite
def plan_arguments(draw: st.DrawFn) -> dict[str, Any]:
    strategy = draw(st.sampled_from(["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]))
    offloads = ["none"]
    offloads += ["optimizer"] if strategy.startswith("zero") else []
    offloads += ["optimizer_and_parameters"] if strategy == "zero3" else []
    single = strategy == "single"
    return {
        "strategy": strategy,
        "offload": draw(st.sampled_from(offloads)),
        "dtype": draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        "interconnect": draw(st.sampled_from(["nvlink", "pcie-p2p", "pcie-host", None])),
        "gpus": 1 if single else draw(st.integers(1, 8)),
        "nodes": 1 if single else draw(st.integers(1, 16)),
        "cores": draw(st.integers(1, 256)),
        "workers": draw(st.integers(0, 16)),
        "micro_batch_size": draw(st.integers(1, 64)),
        "accumulation": draw(st.integers(1, 64)),
        "max_grad_norm": draw(st.none() | st.floats(0.01, 10)),
        "total_seconds": draw(st.none() | st.floats(1, 1e7)),
    }


@given(arguments=plan_arguments())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rendering_is_deterministic_sorted_and_states_the_plan(
    arguments: dict[str, Any], make_plan: MakePlan, paths: RunPaths
) -> None:
    texts = render(make_plan(**arguments), paths)
    assert texts == render(make_plan(**arguments), paths)
    assert all(text.endswith("\n") and not text.endswith("\n\n") for text in texts.values())
    config = yaml.safe_load(texts["accelerate.yaml"])
    assert_sorted(config)
    ranks = arguments["gpus"] * arguments["nodes"]
    assert (config["num_processes"], config["num_machines"]) == (ranks, arguments["nodes"])
    if "deepspeed.json" in texts:
        deepspeed = json.loads(texts["deepspeed.json"])
        assert_sorted(deepspeed)
        assert deepspeed["train_batch_size"] == arguments["micro_batch_size"] * arguments["accumulation"] * ranks
        assert "mixed_precision" not in config
    else:
        assert "mixed_precision" in config


def assert_sorted(value: object) -> None:
    if isinstance(value, dict):
        assert list(value) == sorted(value)
        for inner in value.values():
            assert_sorted(inner)
