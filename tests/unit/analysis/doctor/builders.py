"""Builders of healthy runs and machines for tests of the doctor; a test changes what it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from launcher.analysis.doctor.findings import Finding
from launcher.analysis.doctor.gpu_checks import GpuFacts, probe_gpus
from launcher.analysis.doctor.run_status import RunState
from launcher.core import metrics
from launcher.core.metrics import StepMetrics
from launcher.core.run_paths import RunPaths
from launcher.core.units import bytes_to_gib
from launcher.plan import Plan
from launcher.request.request import Request, plan_request
from launcher.runs.record import Attempt, Outcome, RunRecord
from tests.conftest import ROOT
from tests.fake_nvml import install_nvml

NUM_STEPS = 120
Values = Mapping[str, float]
Change = Callable[[int], Values]


@cache
def plan_for(gpu: str | None = "h200", gpus: int = 1, nodes: int = 1, overrides: tuple[str, ...] = ()) -> Plan:
    expert = str(ROOT / "experts/neo4j/manifest.json")
    if gpu is None:
        return plan_request(Request(expert=expert, profile="smoke", overrides=overrides)).plan
    return plan_request(Request(expert=expert, gpu=gpu, gpus_per_node=gpus, nodes=nodes, overrides=overrides)).plan


def make_steps(
    plan: Plan, num_steps: int = NUM_STEPS, change: Change | None = None, speed: float = 1.0
) -> list[StepMetrics]:
    """Return the metrics of a run at `speed` times the planned speed; `change` overrides values of a step."""
    tokens = plan.batch.global_batch_size * plan.batch.sequence_length
    rate = speed * (plan.speed.tokens_per_second or 1000.0)
    gibs = bytes_to_gib(plan.memory.allocated_bytes)
    rows = []
    for step in range(1, num_steps + 1):
        wobble = 1 + 0.01 * ((7 * step) % 5 - 2)
        first = 4.0 if step == 1 else 1.0
        values: dict[str, float] = {
            metrics.TRAIN_LOSS: (1.0 + 1.5 * 0.97**step) * wobble,
            metrics.GRAD_NORM: 0.5 * wobble,
            metrics.SKIPPED: 0.0,
            metrics.STEP_SECONDS: first * wobble * tokens / rate,
            metrics.TOKENS_PER_SECOND: rate / wobble / first,
            metrics.DATA_WAIT_SECONDS: 0.002,
            metrics.DATA_WAIT_SHARE: 0.004,
        }
        if plan.hardware.gpu is not None:
            values |= {
                metrics.GPU_UTILIZATION: 0.97,
                metrics.GPU_TEMPERATURE: 62.0,
                metrics.DEVICE_MFU: speed * (plan.speed.mfu or 0.3),
                metrics.PEAK_ALLOCATED_GIB: gibs,
                metrics.PEAK_RESERVED_GIB: gibs,
                metrics.PREDICTED_GIB: gibs,
                metrics.PREDICTION_ERROR: 0.0,
                metrics.ALLOC_RETRIES: 0.0,
            }
        rows.append(StepMetrics(step=step, epoch=step / 60, values={**values, **(change(step) if change else {})}))
    return rows


def make_record(plan: Plan, rows: Sequence[StepMetrics], root: Path = Path("runs/made"), **outcome: Any) -> RunRecord:
    facts: dict[str, object] = {
        "run_id": root.name,
        "status": "done",
        "exit_code": 0,
        "started_at": "2026-11-15T10:00:00+00:00",
        "pid": 1,
        "steps_done": len(rows),
        "num_steps": len(rows),
        "attempts": (Attempt(started_at="2026-11-15T10:00:00+00:00"),),
    }
    held_out = StepMetrics(step=len(rows), epoch=2.0, values={metrics.EVAL_LOSS: 1.2, metrics.EVAL_SECONDS: 5.0})
    return RunRecord(
        paths=RunPaths(root),
        plan=plan,
        outcome=Outcome.model_validate({**facts, **outcome}),
        rows=(*rows, held_out),
    )


def make_facts(record: RunRecord) -> RunState:
    return RunState(record=record, is_trained=False, idle_seconds=5.0, age_seconds=3600.0)


def without_outcome(record: RunRecord) -> RunRecord:
    return replace(record, outcome=None)


def list_issues(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that are not ok."""
    return [finding for finding in findings if finding.status != "ok"]


def only(findings: Iterable[Finding]) -> Finding:
    """Return the single finding that is not ok."""
    (finding,) = list_issues(findings)
    return finding


def probe_h200() -> GpuFacts:
    """Return the facts of a machine with one H200."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        install_nvml(monkeypatch)
        return probe_gpus(Path("/nowhere"))
