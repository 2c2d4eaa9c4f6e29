"""Rehearsals: the cluster's strategy on CPU ranks, allowed differences, and a real rehearsal of two nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.core.errors import InputError, LauncherError
from launcher.hardware.model import Hardware
from launcher.hardware.probe import probe_hardware
from launcher.launch.multi_agent import make_argv, run_together
from launcher.launch.rehearse import Rehearsal, check_differences, find_differences, plan_rehearsal
from launcher.plan import Plan
from launcher.request.request import Request, plan_request
from tests.conftest import ROOT, WriteManifest, python_path
from tests.unit.standins import SHORT_SETTINGS

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    have_cores(monkeypatch, 2)


def have_cores(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    here = probe_hardware().model_copy(update={"cpu_cores_per_node": cores, "packages": ("deepspeed",)})

    def probe() -> Hardware:
        return here

    monkeypatch.setattr("launcher.launch.rehearse.probe_hardware", probe)
    monkeypatch.setattr("launcher.request.request.probe_hardware", probe)


def rehearse(*, ranks: int | None = None, **asked: Any) -> Rehearsal:
    request = Request(**{"expert": "neo4j", "gpu": "h100", "gpus_per_node": 8, "nodes": 2, **asked})
    return plan_rehearsal(request, num_ranks=ranks)


def way(plan: Plan) -> tuple[str, ...]:
    return plan.strategy, plan.offload, plan.checkpointing, plan.adapter.kind


def test_rehearsal_syncs_gradients_as_the_cluster() -> None:
    """After the backward pass if the cluster replays a CUDA graph (though none is captured here), else overlapped."""
    replayed, launched = (
        rehearse(overrides=(f"training.config.torch_compile_mode={mode}",)) for mode in ("reduce-overhead", "default")
    )
    assert replayed.cluster.plan.strategy == launched.cluster.plan.strategy == "ddp"
    assert replayed.planned.plan.defer_gradient_sync
    assert not launched.planned.plan.defer_gradient_sync
    assert "CUDA graph (off instead of on)" in replayed.notes[-1]
    assert "CUDA graph" not in launched.notes[-1]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize(("checkpointing", "level"), [("false", "none"), ("selective", "selective"), ("true", "full")])
def test_rehearsal_uses_the_clusters_strategy(strategy: Any, checkpointing: str, level: str) -> None:
    made = rehearse(strategy=strategy, overrides=(f"training.config.gradient_checkpointing={checkpointing}",))
    assert way(made.planned.plan) == way(made.cluster.plan) == (strategy, "none", level, "lora")
    assert (made.cluster.plan.profile, made.planned.plan.profile) == ("full", "smoke")
    assert (made.cluster.plan.hardware.num_ranks, made.planned.plan.hardware.num_ranks) == (16, 2)
    assert {str(d) for d in made.differences} >= {"num_processes 16→2", "use_cpu false→true"}
    precision = "bf16.enabled true→absent" if strategy.startswith("zero") else "mixed_precision bf16→no"
    assert precision in {str(d) for d in made.differences}


@pytest.mark.parametrize(
    ("strategy", "offload"),
    [("zero2", "optimizer"), ("zero3", "optimizer"), ("zero3", "optimizer_and_parameters")],
)
def test_offload_is_rehearsed(strategy: Any, offload: str) -> None:
    made = rehearse(strategy=strategy, overrides=(f"training.config.offload={offload}",))
    assert way(made.planned.plan)[:2] == (strategy, offload)


def test_rehearsal_keeps_decisions_of_the_cluster_plan() -> None:
    """A plan for the tiny base on CPU ranks would use none of them."""
    made = rehearse(gpu="rtx4090", gpus_per_node=2, nodes=1, base="Qwen/Qwen3-32B", ram_gib_per_node=256.0)
    assert way(made.planned.plan)[:3] == ("zero3", "optimizer_and_parameters", "full")


def test_hsdp_is_rehearsed_by_two_ranks_on_each_of_two_nodes() -> None:
    made = rehearse(nodes=4, strategy="hsdp")
    hardware = made.planned.plan.hardware
    assert (made.planned.plan.strategy, hardware.nodes, hardware.gpus_per_node) == ("hsdp", 2, 2)
    with pytest.raises(InputError, match="at least 4: fewer cannot exercise all communication"):
        rehearse(nodes=4, strategy="hsdp", ranks=2)


def test_engine_on_one_gpu_is_rehearsed_by_two_ranks() -> None:
    made = rehearse(gpus_per_node=1, nodes=1, strategy="zero2", overrides=("training.config.offload=optimizer",))
    assert way(made.planned.plan)[:2] == ("zero2", "optimizer")
    assert made.notes[0] == "1 rank is rehearsed as 2: a single CPU rank would run without this strategy"


@pytest.mark.parametrize("saving", ["steps", "epoch"])
@pytest.mark.parametrize("evaluating", ["steps", "epoch", "no"])
def test_a_checkpoint_and_an_evaluation_are_rehearsed_if_the_cluster_has_them(saving: str, evaluating: str) -> None:
    config = {"save_strategy": saving, "evaluation_strategy": evaluating, "load_best_model_at_end": "false"}
    made = rehearse(overrides=tuple(f"training.config.{key}={value}" for key, value in config.items()))
    schedule = made.planned.plan.schedule
    every = (schedule.num_steps or 0) - 1
    assert schedule.save_every_steps == every
    assert schedule.evaluate_every_steps == (None if evaluating == "no" else every)


def test_single_gpu_is_rehearsed_by_one_process() -> None:
    made = rehearse(gpus_per_node=1, nodes=1)
    assert (made.planned.plan.strategy, made.planned.plan.hardware.num_ranks) == ("single", 1)
    assert not any("rehearsed as" in note for note in made.notes)


@pytest.mark.parametrize(
    ("cores", "nodes", "ranks", "said"),
    [
        (2, 2, 2, "16 ranks are rehearsed as 2: this machine has 2 cores"),
        (1, 2, 2, "16 ranks are rehearsed as 2: this machine has 1 core"),
        (3, 2, 2, "16 ranks are rehearsed as 2: this machine has 3 cores"),
        (64, 2, 4, "16 ranks are rehearsed as 4: enough to exercise everything"),
        (3, 1, 3, "8 ranks are rehearsed as 3: this machine has 3 cores"),
        (64, 4, 4, "32 ranks are rehearsed as 4: enough to exercise everything"),
    ],
)
def test_ranks_are_limited_by_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, nodes: int, ranks: int, said: str
) -> None:
    have_cores(monkeypatch, cores)
    made = rehearse(nodes=nodes)
    hardware = made.planned.plan.hardware
    assert (hardware.num_ranks, hardware.nodes) == (ranks, min(nodes, 2))
    assert made.notes[0] == said
    assert ("4 nodes are rehearsed as 2" in " ".join(made.notes)) == (nodes == 4)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (1, "--ranks 1: at least 2"),
        (3, "--ranks 3: not divisible by 2 nodes"),
        (6, "--ranks 6: at most 2 ranks per core; cores of this machine: 2"),
        (32, "--ranks 32: more ranks than the cluster has (16)"),
    ],
)
def test_invalid_ranks_are_refused(ranks: int, said: str) -> None:
    with pytest.raises(InputError) as caught:
        rehearse(ranks=ranks)
    assert said in str(caught.value)


def test_requested_ranks_are_used() -> None:
    made = rehearse(ranks=4)
    assert made.planned.plan.hardware.num_ranks == 4
    assert made.notes[0] == "16 ranks are rehearsed as 4: requested by --ranks"


def test_features_without_cpu_support_are_noted(write_manifest: WriteManifest) -> None:
    """NF4 weights and the 8-bit optimizer need CUDA; the strategy stays the same."""
    changes = {"base_models.0.quantization": "int4", "training.config.optim": "adamw_bnb_8bit"}
    file = write_manifest(changes)
    sample = ROOT / "experts/neo4j/sample"
    (file.parent / "sample").symlink_to(sample)
    made = rehearse(expert=str(file), strategy="ddp")
    assert made.planned.plan.quantization is None
    assert "int4 weights are rehearsed unquantized: bitsandbytes needs a CUDA GPU" in made.notes
    last = made.notes[-1]
    assert last.startswith("different from the cluster: ")
    for part in (
        "precision (fp32 instead of bf16)",
        "optimizer (adamw_torch instead of adamw_bnb_8bit)",
        "base (launcher/tiny",
    ):
        assert part in last


def test_layer_class_may_differ_for_another_model_family_only() -> None:
    made = rehearse(strategy="fsdp2", base="Qwen/Qwen2.5-0.5B-Instruct")
    (layer,) = [d for d in made.differences if d.key.startswith("fsdp_config")]
    assert str(layer).endswith("Qwen2DecoderLayer→Qwen3DecoderLayer")
    with pytest.raises(LauncherError, match="in more than the number of ranks"):
        check_differences((layer,), same_base=True)


def test_any_other_difference_is_refused() -> None:
    made = rehearse(strategy="zero2")
    plan = made.planned.plan
    unclipped = plan.model_copy(update={"optimizer": plan.optimizer.model_copy(update={"max_grad_norm": None})})
    differences = tuple(find_differences(made.cluster.plan, unclipped))
    with pytest.raises(LauncherError) as caught:
        check_differences(differences, same_base=True)
    assert [str(problem) for problem in caught.value.problems] == ["deepspeed.json: gradient_clipping 1.0→0.0"]


def test_machine_without_a_gpu_is_refused() -> None:
    with pytest.raises(InputError, match="no cluster to rehearse: this machine has no GPU"):
        plan_rehearsal(Request(expert="neo4j"))


def test_cluster_cores_are_not_used_for_this_machine() -> None:
    made = rehearse(cpu_cores_per_node=64)
    assert (made.cluster.plan.hardware.cpu_cores_per_node, made.planned.plan.hardware.cpu_cores_per_node) == (64, 1)
    replaced = replace(Request(expert="neo4j", cpu_ranks_per_node=2), cpu_cores_per_node=5)
    assert plan_request(replaced).plan.hardware.cpu_cores_per_node == 5


def script(text: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", text]


def test_agents_end_together() -> None:
    began = time.monotonic()
    sleeper = script("import time; time.sleep(60)")
    assert run_together([sleeper, script("import sys; sys.exit(3)")], grace_seconds=0.5) == 3
    assert time.monotonic() - began < 55
    assert run_together([script(""), script("import time; time.sleep(0.5)")]) == 0


def test_late_agents_get_time_to_fail(tmp_path: Path) -> None:
    """The other agent may still end by itself within the grace period."""
    first, said = tmp_path / "first", tmp_path / "said"
    early = script(f"import sys; open({str(first)!r}, 'w'); sys.exit(4)")
    wait = f"import os, sys, time\nwhile not os.path.exists({str(first)!r}): time.sleep(0.05)\ntime.sleep(1)"
    late = script(f"{wait}; open({str(said)!r}, 'w'); sys.exit(1)")
    assert run_together([late, early], grace_seconds=30) == 4
    assert said.exists()


@pytest.mark.process
def test_single_agent_is_started_directly() -> None:
    assert make_argv([("a", "b")]) == ("a", "b")
    both = make_argv([script("import os; os.write(1, b'one ')"), script("import os; os.write(1, b'two ')")])
    done = subprocess.run(both, cwd=ROOT, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == ["one", "two"]


def start(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run `launcher rehearse` as a user types it."""
    overrides = [word for setting in SHORT_SETTINGS for word in ("--set", setting)]
    arguments = ("neo4j", "--gpu", "h100", "--gpus", "8", "--runs-dir", str(folder / "runs"), *overrides, *flags)
    mine = {"PYTHONPATH": python_path(), "LAUNCHER_DATA_DIR": str(folder / "data"), "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "launcher", "rehearse", *arguments],
        cwd=ROOT,
        env={**os.environ, **mine},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.process
@pytest.mark.slow
def test_two_nodes_are_rehearsed(tmp_path: Path) -> None:
    offload = ("--set", "training.config.offload=optimizer")
    result = start(tmp_path, "--nodes", "2", "--strategy", "zero2", "--steps", "2", "--json", *offload)
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["run_id"].startswith("rehearsal-neo4j-")
    assert (summary["passed"], summary["exit_code"], summary["outcome"]["steps_done"]) == (True, 0, 2)
    assert (summary["cluster"]["ranks"], summary["rehearsal"]["nodes"]) == (16, 2)
    assert (summary["rehearsal"]["strategy"], summary["rehearsal"]["offload"]) == ("zero2", "optimizer")
    assert {"file": "accelerate.yaml", "key": "use_cpu", "cluster": False, "rehearsal": True} in summary["differences"]
    run = Path(summary["path"])
    assert len((run / "metrics.jsonl").read_text().splitlines()) >= 2
    assert json.loads((run / "cluster/deepspeed.json").read_text())["bf16"] == {"enabled": True}
    assert "bf16" not in json.loads((run / "deepspeed.json").read_text())
    agents = [folder for folder in (run / "logs").iterdir() if folder.is_dir()]
    assert len(agents) == 2, "or the two nodes were not two agents"
