"""Job files of SkyPilot, Kubernetes and dstack. After an intended change: UPDATE_GOLDEN=1 pytest tests/unit/render.

tests/targets checks the same files with the projects' own parsers, and runs their scripts.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.core.run_paths import RunPaths
from launcher.hardware.gpu_catalogue import GPUS, list_product_names, lookup_gpu
from launcher.hardware.model import make_hardware
from launcher.plan.model import Plan, SpeedPlan
from launcher.render import JobOptions
from launcher.render.targets import render_job
from launcher.render.targets.node import make_name

MakePlan = Callable[..., Plan]
FILES = {"plan.json": '{"a": 1}\n', "request.json": "{}\n"}
OPTIONS = JobOptions(
    image="registry.example.com/expert-launcher:1.0",
    volume="experts",
    secrets=("HF_TOKEN", "WANDB_API_KEY"),
    expert="my shop",
    expert_folder="my shop",
    flags=("--trust",),
)
CASES: dict[str, dict[str, Any]] = {
    "skypilot": {"target": "skypilot", "volume": "s3://experts"},
    "skypilot_volume": {"target": "skypilot", "spot": False},
    "dstack": {"target": "dstack"},
    "trainjob": {"target": "kubernetes"},
    "jobset": {"target": "kubernetes", "workload": "jobset"},
    "job": {"target": "kubernetes", "workload": "job"},
}


def build(make_plan: MakePlan, *, gpu: str = "h100", nodes: int = 2, **speed: Any) -> Plan:
    plan = make_plan(strategy="ddp", gpus=8, nodes=nodes)
    values: dict[str, Any] = {
        "total_seconds": 5400.0,
        "price_per_gpu_hour": 2.5,
        "price_per_node_hour": None,
        "currency": "",
    }
    values |= {"cost": 60.0} | speed
    hardware = make_hardware(lookup_gpu(gpu), gpus_per_node=8, nodes=nodes, cpu_cores_per_node=96)
    return plan.model_copy(update={"hardware": hardware, "speed": SpeedPlan.model_construct(**values)})


def render_one(plan: Plan, paths: RunPaths, **changes: Any) -> str:
    (text,) = render_job(plan, paths, replace(OPTIONS, **changes), FILES).values()
    return text


@pytest.mark.parametrize("form", CASES)
def test_job_file_equals_the_golden_file(form: str, make_plan: MakePlan, paths: RunPaths, project_root: Path) -> None:
    file = project_root / "tests/golden/targets" / f"{form}.yaml"
    text = render_one(build(make_plan), paths, **CASES[form])
    if os.environ.get("UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("form", CASES)
def test_command_in_the_header_can_be_pasted(form: str, make_plan: MakePlan, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "my runs;x" / "a")
    command = render_one(build(make_plan), paths, **CASES[form]).splitlines()[1].removeprefix("# ")
    assert Path(shlex.split(command)[-1]).parent == paths.root


@pytest.mark.parametrize("form", CASES)
def test_script_of_a_single_node_needs_no_rendezvous(form: str, make_plan: MakePlan, paths: RunPaths) -> None:
    text = render_one(build(make_plan, nodes=1), paths, **CASES[form])
    assert "--node-rank" not in text
    assert "--rendezvous" not in text
    assert '--resume "$run"' in text


@pytest.mark.parametrize("form", CASES)
def test_scripts_are_valid_bash(form: str, make_plan: MakePlan, paths: RunPaths) -> None:
    text = render_one(build(make_plan), paths, **CASES[form])
    scripts = [line for line in _find_texts(list(yaml.safe_load_all(text))) if "set -euo pipefail" in line]
    assert len(scripts) == 1
    subprocess.run(["bash", "-n", "-c", scripts[0]], check=True)
    assert re.search(r"\$\(", scripts[0]) is None, "Kubernetes would expand it"


def _find_texts(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in _find_texts(item)]
    if isinstance(value, list):
        return [text for item in value for text in _find_texts(item)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("form", CASES)
def test_no_secret_value_is_written(
    form: str, make_plan: MakePlan, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    text = render_one(build(make_plan), paths, **CASES[form])
    assert "hf_abcdefghijklmnop" not in text
    assert "HF_TOKEN" in text


def test_time_limit_has_a_margin_and_can_be_set(make_plan: MakePlan, paths: RunPaths) -> None:
    plan = build(make_plan)
    assert "max_duration: 170m\n" in render_one(plan, paths, target="dstack")  # 90 minutes x 1.5 + 30, in tens
    assert "activeDeadlineSeconds: 10200\n" in render_one(plan, paths, target="kubernetes")
    assert "timeout --foreground --kill-after=300 10200 launcher" in render_one(plan, paths, target="skypilot")
    assert "max_duration: 2m\n" in render_one(plan, paths, target="dstack", time_limit_seconds=61)
    unknown = build(make_plan, total_seconds=None)
    for target in ("dstack", "kubernetes", "skypilot"):
        text = render_one(unknown, paths, target=target)
        assert not re.search("max_duration|activeDeadlineSeconds|timeout", text)


def test_price_is_the_most_that_a_node_may_cost(make_plan: MakePlan, paths: RunPaths) -> None:
    assert "max_hourly_cost: 20.0\n" in render_one(build(make_plan), paths, target="skypilot")
    assert "max_price: 20.0\n" in render_one(build(make_plan), paths, target="dstack")
    node = build(make_plan, price_per_gpu_hour=None, price_per_node_hour=17.0, currency="USD")
    assert "max_price: 17.0\n" in render_one(node, paths, target="dstack")
    for plan in (build(make_plan, currency="EUR"), build(make_plan, price_per_gpu_hour=None, cost=None)):
        assert "max_price" not in render_one(plan, paths, target="dstack")
        assert "max_hourly_cost" not in render_one(plan, paths, target="skypilot")


def test_node_without_a_gpu_requests_none(make_plan: MakePlan, paths: RunPaths) -> None:
    plan = build(make_plan)
    hardware = plan.hardware.model_copy(update={"gpu": None, "gpus_per_node": 1})
    plan = plan.model_copy(update={"hardware": hardware})
    assert "accelerators" not in render_one(plan, paths, target="skypilot")
    assert "  gpu: 0\n" in render_one(plan, paths, target="dstack")
    assert "nvidia.com" not in render_one(plan, paths, target="kubernetes")


@pytest.mark.parametrize(
    ("gpu", "skypilot", "dstack", "label"),
    [
        ("rtx4090", "RTX4090", ("RTX4090", "22GB..26GB"), "NVIDIA-GeForce-RTX-4090"),
        ("a100", "A100-80GB", ("A100", "74GB..87GB"), "NVIDIA-A100-SXM4-80GB"),
        ("a100-40gb", "A100", ("A100", "37GB..44GB"), "NVIDIA-A100-SXM4-40GB"),
        ("h100", "H100", ("H100", "74GB..87GB"), "NVIDIA-H100-80GB-HBM3"),
        ("h200", "H200", ("H200", "130GB..152GB"), "NVIDIA-H200"),
        ("l40s", "L40S", ("L40S", "41GB..49GB"), "NVIDIA-L40S"),
        ("a6000", "RTXA6000", ("A6000", "44GB..52GB"), "NVIDIA-RTX-A6000"),
        ("t4", "T4", ("T4", "13GB..17GB"), "Tesla-T4"),
    ],
)
def test_gpu_has_the_name_that_each_platform_uses(
    make_plan: MakePlan, paths: RunPaths, gpu: str, skypilot: str, dstack: tuple[str, str], label: str
) -> None:
    plan = build(make_plan, gpu=gpu)
    assert f"accelerators: {skypilot}:8\n" in render_one(plan, paths, target="skypilot")
    task = yaml.safe_load(render_one(plan, paths, target="dstack"))
    assert task["resources"]["gpu"] == {"name": dstack[0], "memory": dstack[1], "count": 8}
    assert label in list_product_names(GPUS[gpu])
    assert f"- {label}\n" in render_one(plan, paths, target="kubernetes")


@pytest.mark.parametrize("run_id", ["a", "9", "neo4j-20261117-081500-2x8xh100", "A_B.c" * 20, "x" * 100])
def test_names_are_dns_labels(run_id: str) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9-]{0,38}[a-z0-9]", make_name(run_id)), make_name(run_id)


def test_long_names_stay_different() -> None:
    assert make_name("x" * 99 + "1") != make_name("x" * 99 + "2")


def test_only_preemption_restarts_without_a_limit(make_plan: MakePlan, paths: RunPaths) -> None:
    """Wrong input must not be repeated, and exit code 75 must not be counted."""
    job = list(yaml.safe_load_all(render_one(build(make_plan), paths, **CASES["job"])))[-1]["spec"]
    ignored, disrupted, final = job["podFailurePolicy"]["rules"]
    assert (ignored["action"], ignored["onExitCodes"]["values"]) == ("Ignore", [75])
    assert (disrupted["action"], disrupted["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert (final["action"], final["onExitCodes"]["values"]) == ("FailJob", [1, 3, 5])
    spec = list(yaml.safe_load_all(render_one(build(make_plan), paths, **CASES["jobset"])))[-1]["spec"]
    preempted = spec["failurePolicy"]["rules"][0]
    message = "Container node for pod default/a-node-0-1-x failed with exit code {} matching FailJob rule at index 0"
    patterns = preempted["onJobFailureMessagePatterns"]
    assert any(re.search(pattern, message.format(75)) for pattern in patterns)
    assert not any(re.search(pattern, message.format(code)) for pattern in patterns for code in (1, 2, 5, 175))
