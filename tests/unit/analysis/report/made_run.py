"""A small, complete, synthetic run that is the same on every machine."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.analysis.report import ReportFacts
from launcher.core import metrics
from launcher.core.metrics import StepMetrics
from launcher.core.run_paths import RunPaths
from launcher.core.units import GIB
from launcher.plan.estimate.memory import MemoryTerm
from launcher.plan.model import BatchPlan, Decision, MemoryPlan, Plan, SpeedPlan
from launcher.request.request import Request, plan_request
from launcher.runs.evaluations import Evaluation, RunEvaluations
from launcher.runs.record import Attempt, Outcome, RunRecord, WandbTrace
from tests.made_evaluations import make_evaluation

REQUEST = Request(expert="neo4j", gpu="rtx4090", gpus_per_node=2, max_steps=4, price_per_gpu_hour=0.4)
PATHS = RunPaths(Path("runs/made"))
RATES = {
    0: {"parses": 0.4, "matches": 0.1},
    2: {"parses": 0.6, "matches": 0.2},
    4: {"parses": 0.9, "matches": 0.5},
}


def make_plan(**changes: Any) -> Plan:
    plan = plan_request(replace(REQUEST, profile="full")).plan
    terms = (
        MemoryTerm(name="weights", num_bytes=4 * GIB, note=""),
        MemoryTerm(name="context", num_bytes=GIB, note=""),
    )
    fixed: dict[str, Any] = {
        "manifest_sha256": "ab" * 32,
        "decisions": (
            Decision(name="precision", value="BF16", reason="the GPU has it", decided_by="hardware"),
            Decision(name="global batch", value="8 | 8", reason="`batch_size` in the manifest", decided_by="manifest"),
        ),
        "notes": ("1. a note",),
        "memory": MemoryPlan(
            terms=terms, device_bytes=24 * GIB, free_bytes=24 * GIB, headroom_bytes=2 * GIB, host_bytes=0
        ),
        "speed": SpeedPlan(
            tokens_per_second=10_000.0,
            seconds_per_step=1.0,
            total_seconds=4.0,
            mfu=0.4,
            communication_fraction=0.0,
            price_per_gpu_hour=0.4,
            cost=1.0,
            confidence="within a third",
        ),
        "batch": BatchPlan(
            global_batch_size=8,
            sequence_length=2048,
            num_ranks=2,
            micro_batch_size=2,
            gradient_accumulation_steps=2,
            empty_slots=0,
            nearest_even_batches=(),
            packed=True,
            group_by_length=False,
            eval_batch_size=2,
        ),
        "data": plan.data.model_copy(update={"path": "train.jsonl", "basis": "read from train.jsonl: 1,000 rows"}),
        "optimizer": plan.optimizer.model_copy(update={"name": "adamw_torch_fused", "learning_rate": 2e-4}),
        "schedule": plan.schedule.model_copy(update={"num_steps": 4, "seed": 42, "lr_scheduler": "cosine"}),
        "adapter": plan.adapter.model_copy(
            update={"kind": "lora", "rank": 16, "alpha": 32, "trainable_parameters": 10_092_544}
        ),
        "loss_on": "completion",
        "strategy": "ddp",
        "quantization": None,
        "oom_fallbacks": (),
    }
    return plan.model_copy(update={**fixed, **changes})


def make_rows() -> tuple[StepMetrics, ...]:
    losses = (2.0, 1.5, math.nan, 1.0)
    steps = [
        StepMetrics(
            step=step,
            epoch=step / 4,
            values={
                metrics.TRAIN_LOSS: loss,
                metrics.GRAD_NORM: 1.0 / step,
                metrics.SKIPPED: 1.0 if math.isnan(loss) else 0.0,
                metrics.STEP_SECONDS: 1.25,
                metrics.TOKENS_PER_SECOND: 12_000.0,
                metrics.TRAINED_TOKENS_PER_SECOND: 6_000.0,
                metrics.DEVICE_TOKENS_PER_SECOND: 6_000.0,
                metrics.DEVICE_MFU: 0.5,
                metrics.DATA_WAIT_SECONDS: 0.1,
                metrics.DATA_WAIT_SHARE: 0.01,
                metrics.PACKING_EFFICIENCY: 0.97,
                metrics.GPU_UTILIZATION: 0.96,
                metrics.GPU_POWER_WATTS: 400.0,
                metrics.GPU_TEMPERATURE: 60.0 + step,
                metrics.JOULES_PER_TOKEN: 0.06,
                metrics.PEAK_ALLOCATED_GIB: 3.5 + 0.1 * step,
                metrics.PEAK_RESERVED_GIB: 4.5,
                metrics.ALLOC_RETRIES: 0.0,
                metrics.PREDICTED_GIB: 4.0,
                metrics.TOKENS_SEEN: 15_000.0 * step,
                metrics.TOTAL_SECONDS: 10.0 + 2 * step,
            },
        )
        for step, loss in enumerate(losses, start=1)
    ]
    evaluations = [
        StepMetrics(step=step, epoch=step / 4, values={metrics.EVAL_LOSS: loss, **_task_values(step)})
        for step, loss in ((2, 1.6), (4, 1.25))
    ]
    base = StepMetrics(step=0, epoch=0.0, values={**_task_values(0), metrics.TOTAL_SECONDS: 9.0})
    return (base, *steps[:2], evaluations[0], *steps[2:], evaluations[1])


def _task_values(step: int) -> dict[str, float]:
    return {f"eval/{name}": rate for name, rate in RATES[step].items()}


def make_evaluations(**changes: Any) -> RunEvaluations:
    """Evaluations of the base model, during training, and by `launcher eval`."""
    evaluations = RunEvaluations(
        base=Evaluation(result=make_evaluation(RATES[0]), step=0),
        trained=Evaluation(result=make_evaluation(RATES[4]), step=4),
        full_eval=Evaluation(result=make_evaluation(RATES[4], num_rows=100, split="test", first_row=500), step=None),
        kept_step=4,
    )
    return replace(evaluations, **changes)


def make_outcome(**changes: Any) -> Outcome:
    outcome = Outcome(
        run_id="made",
        status="done",
        exit_code=0,
        started_at="2026-11-15T10:00:00+00:00",
        ended_at="2026-11-15T10:05:00+00:00",
        pid=1,
        steps_done=4,
        num_steps=4,
        final_loss=1.0,
        best_step=4,
        best_metric=1.25,
        data_key="cd" * 32,
        versions={"launcher": "0.1.0", "torch": "2.13.0"},
        git_commit="1234567890abcdef1234567890abcdef12345678",
        attempts=(
            Attempt(started_at="2026-11-15T10:00:00+00:00", ended_at="2026-11-15T10:00:10+00:00", steps_done=2),
            Attempt(
                started_at="2026-11-15T10:04:50+00:00",
                ended_at="2026-11-15T10:05:00+00:00",
                from_step=2,
                steps_done=4,
            ),
        ),
        oom_fallbacks=("gradient checkpointing: selective",),
        observed={"device": "2 x NVIDIA GeForce RTX 4090"},
        wandb=WandbTrace(id="made-1", project="expert-launcher", mode="offline", folders=("wandb/offline-run-1",)),
        goodput={
            metrics.TOTAL_SECONDS: 20.0,
            metrics.GOODPUT: 0.75,
            metrics.START_SECONDS: 4.0,
            metrics.RESTART_SECONDS: 1.0,
            metrics.COMPILE_SECONDS: 0.0,
        },
    )
    return outcome.model_copy(update=changes)


def make_facts(
    *,
    plan: Plan | None = None,
    outcome: Outcome | None = None,
    rows: tuple[StepMetrics, ...] | None = None,
    paths: RunPaths = PATHS,
    **changes: Any,
) -> ReportFacts:
    record = RunRecord(
        paths=paths, plan=plan or make_plan(), outcome=outcome, rows=make_rows() if rows is None else rows
    )
    facts = ReportFacts(
        record=record,
        evaluations=make_evaluations(),
        request=REQUEST,
        command="# In the project root:\naccelerate launch launcher/train.py --plan runs/made/plan.json\n",
        files=(("plan.json", "all decisions of the plan"),),
        saved_step=2,
    )
    return replace(facts, **changes)
