"""Run directories without a training: a real plan for a GPU of the catalogue, and synthetic metrics."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path

from launcher.core import metrics
from launcher.core.metrics import StepMetrics
from launcher.core.run_paths import RunPaths
from launcher.core.units import bytes_to_gib
from launcher.judges.results import EvalResult
from launcher.plan import Plan
from launcher.request.request import Request, plan_request
from launcher.runs.record import Attempt, Outcome, Status, write_outcome
from tests.conftest import ROOT
from tests.made_evaluations import make_evaluation

STARTED_AT = "2026-11-15T10:00:00+00:00"
DATA_KEY = "a" * 64
_START_SECONDS, _COMPILE_SECONDS, _CHECKPOINT_SECONDS, _TASK_SECONDS = 21.0, 34.0, 0.8, 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeRun:
    """Properties of a synthetic run, which determine its metrics completely."""

    run_id: str
    expert: str = "neo4j"
    gpu: str | None = "rtx4090"  # None: this machine, without a GPU
    gpus: int = 1
    nodes: int = 1
    overrides: tuple[str, ...] = ()
    price_per_gpu_hour: float | None = None
    random_weights: bool = False
    num_steps: int = 60
    planned_steps: int | None = None  # if it has not done all of them
    status: Status | None = "done"  # None: not started, without outcome.json
    data_key: str | None = DATA_KEY
    seed: int = 0
    first_loss: float = 2.6
    last_loss: float = 1.1
    noise: float = 0.06
    tokens_per_second: float = 9_000.0
    mfu: float = 0.42
    evaluate_every: int = 10
    least_memory: float = 0.9  # as a fraction of the prediction
    oom_fallbacks: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=lambda: {"launcher": "0.1.0", "torch": "2.13.0"})
    has_goodput: bool = True  # False: as in old runs without goodput and wall-clock time
    task_rates: tuple[float, float] | None = None  # correct answers before and after training; None: no task metrics
    task_rows: int = 40
    checker: str = "made 1.0"


def write_run(runs_dir: Path, made: MadeRun, rows: Sequence[StepMetrics] | None = None) -> RunPaths:
    """Write plan.json, outcome.json, metrics.jsonl (`rows`, or synthetic ones) and evaluations/."""
    paths = RunPaths(runs_dir / made.run_id)
    paths.logs.mkdir(parents=True)
    plan = make_plan_of(made)
    paths.plan.write_text(plan.model_dump_json(indent=2) + "\n", encoding="utf-8")
    steps = make_rows(made, plan) if rows is None else list(rows)
    if steps:
        paths.metrics.write_text("".join(_write_line(row) for row in steps), encoding="utf-8")
    for row in steps if made.task_rates is not None else ():
        if row.is_evaluation:
            write_evaluation(paths.evaluation_at(row.step), make_task_evaluation(made, row.step))
    if made.status is not None:
        write_outcome(paths.outcome, _make_outcome(made, steps))
    return paths


def write_evaluation(file: Path, result: EvalResult) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")


def make_task_evaluation(made: MadeRun, step: int) -> EvalResult:
    """Make the evaluation of a step: the base model at step 0, then better and better."""
    assert made.task_rates is not None
    first, last = made.task_rates
    progress = step / max(1, made.planned_steps or made.num_steps)
    right = first + (last - first) * (1 - math.exp(-4 * progress)) / (1 - math.exp(-4))
    rates = {"parses": (1 + right) / 2, "matches": right}
    return make_evaluation(rates, num_rows=made.task_rows, seed=f"{made.run_id}-{made.seed}", checker=made.checker)


def make_plan_of(made: MadeRun) -> Plan:
    steps = made.planned_steps or made.num_steps or None
    return _make_plan(
        made.expert,
        made.gpu,
        made.gpus,
        made.nodes,
        made.overrides,
        steps,
        made.price_per_gpu_hour,
        made.random_weights,
    )


@cache
def _make_plan(
    expert: str,
    gpu: str | None,
    gpus: int,
    nodes: int,
    overrides: tuple[str, ...],
    max_steps: int | None,
    price: float | None,
    random_weights: bool,
) -> Plan:
    manifest = ROOT / "experts" / expert / "manifest.json"
    request = Request(
        expert=str(manifest),
        overrides=overrides,
        max_steps=max_steps,
        gpu=gpu,
        gpus_per_node=gpus if gpu is not None else None,
        nodes=nodes,
        price_per_gpu_hour=price,
        random_weights=random_weights,
    )
    return plan_request(request).plan


def make_rows(made: MadeRun, plan: Plan) -> list[StepMetrics]:
    """Make metrics: a falling, noisy loss; a first step that compiles; evaluations; memory close to the prediction."""
    chance = random.Random(f"{made.run_id}-{made.seed}")
    tokens_a_step = plan.batch.global_batch_size * plan.batch.sequence_length * 0.97
    predicted = bytes_to_gib(plan.memory.allocated_bytes)
    peak = predicted * (made.least_memory + 0.06 * chance.random())
    rows, clock, lost_to_data, lost_to_evaluation = [], _START_SECONDS + _COMPILE_SECONDS, 0.0, 0.0
    if made.task_rates is not None:
        lost_to_evaluation, clock = _TASK_SECONDS, clock + _TASK_SECONDS
        values = _goodput_values(clock, 0.0, _TASK_SECONDS, 0) if made.has_goodput else {}
        rows.append(_make_row(made, 0, {**_task_values(made, 0), **values}))
    for step in range(1, made.num_steps + 1):
        progress = step / max(1, made.planned_steps or made.num_steps)
        loss = made.last_loss + (made.first_loss - made.last_loss) * math.exp(-4 * progress)
        rate = made.tokens_per_second * (1 + 0.03 * chance.gauss(0, 1)) * (0.4 if step == 1 else 1)
        seconds = tokens_a_step / rate
        share = 0.01 + 0.02 * chance.random()
        clock += seconds
        lost_to_data += share * seconds
        values = {
            metrics.TRAIN_LOSS: loss + made.noise * chance.gauss(0, 1),
            metrics.GRAD_NORM: 0.4 + abs(0.2 * chance.gauss(0, 1)),
            metrics.LEARNING_RATE: 2e-4 * min(1.0, step / 5) * (1 - 0.9 * progress),
            metrics.SKIPPED: 0.0,
            metrics.STEP_SECONDS: seconds,
            metrics.DATA_WAIT_SECONDS: share * seconds,
            metrics.TOKENS_PER_SECOND: rate,
            metrics.TOKENS_SEEN: step * tokens_a_step,
        }
        if made.gpu is not None:
            values |= _gpu_values(made, chance, predicted, peak * min(1.0, 0.9 + step / 20), rate)
            values[metrics.DATA_WAIT_SHARE] = share
        if made.has_goodput:
            values |= _goodput_values(clock, lost_to_data, lost_to_evaluation, step)
        rows.append(_make_row(made, step, values))
        if step % made.evaluate_every == 0:
            lost_to_evaluation += 6.0
            clock += 6.0
            held_out = loss + 0.08 + 0.01 * chance.gauss(0, 1)
            evaluation = {metrics.EVAL_LOSS: held_out, metrics.EVAL_SECONDS: 6.0}
            if made.task_rates is not None:
                lost_to_evaluation, clock = lost_to_evaluation + _TASK_SECONDS, clock + _TASK_SECONDS
                evaluation |= _task_values(made, step)
            rows.append(_make_row(made, step, evaluation))
    return rows


def _task_values(made: MadeRun, step: int) -> dict[str, float]:
    checks = make_task_evaluation(made, step).checks
    return {**{f"eval/{check.name}": check.rate for check in checks}, metrics.TASK_SECONDS: _TASK_SECONDS}


def _make_row(made: MadeRun, step: int, values: dict[str, float]) -> StepMetrics:
    rounded = {name: float(f"{value:.6g}") for name, value in values.items()}
    return StepMetrics(step=step, epoch=step / max(1, made.num_steps), values=rounded)


def _gpu_values(made: MadeRun, chance: random.Random, predicted: float, peak: float, rate: float) -> dict[str, float]:
    return {
        metrics.DEVICE_MFU: made.mfu * rate / made.tokens_per_second,
        metrics.PEAK_ALLOCATED_GIB: peak,
        metrics.PEAK_RESERVED_GIB: peak * 1.05,
        metrics.PREDICTED_GIB: predicted,
        metrics.PREDICTION_ERROR: predicted / peak - 1,
        metrics.GPU_UTILIZATION: min(1.0, 0.95 + 0.02 * chance.gauss(0, 1)),
        metrics.GPU_POWER_WATTS: 380 + 10 * chance.gauss(0, 1),
        metrics.JOULES_PER_TOKEN: 380 * made.gpus / rate,
    }


def _goodput_values(clock: float, data: float, evaluation: float, step: int) -> dict[str, float]:
    saved = _CHECKPOINT_SECONDS * (step // 20)
    lost = _START_SECONDS + _COMPILE_SECONDS + data + evaluation + saved
    total = clock + saved
    return {
        metrics.TOTAL_SECONDS: total,
        metrics.GOODPUT: 1 - lost / total,
        metrics.START_SECONDS: _START_SECONDS,
        metrics.COMPILE_SECONDS: _COMPILE_SECONDS,
        metrics.DATA_SECONDS: data,
        metrics.EVALUATION_SECONDS: evaluation,
        metrics.CHECKPOINT_SECONDS: saved,
        metrics.SKIPPED_SECONDS: 0.0,
        metrics.RESTART_SECONDS: 0.0,
    }


def _make_outcome(made: MadeRun, rows: Sequence[StepMetrics]) -> Outcome:
    assert made.status is not None
    seconds = sum(row.get(metrics.STEP_SECONDS) or row.get(metrics.EVAL_SECONDS) or 0.0 for row in rows)
    ended = datetime.fromisoformat(STARTED_AT) + timedelta(seconds=round(seconds + _START_SECONDS + _COMPILE_SECONDS))
    ended_at = None if made.status == "running" else ended.isoformat()
    steps_done = max((row.step for row in rows), default=0)
    goodput = (
        {} if not rows else {name: v for row in rows for name, v in row.values.items() if name.startswith("goodput/")}
    )
    exit_codes = {"done": 0, "failed": 4, "stopped": 75, "crashed": 4}
    return Outcome(
        run_id=made.run_id,
        status=made.status,
        exit_code=exit_codes.get(made.status),
        started_at=STARTED_AT,
        ended_at=ended_at,
        pid=1,
        steps_done=steps_done,
        num_steps=made.planned_steps or made.num_steps,
        data_key=made.data_key,
        versions=made.versions,
        oom_fallbacks=made.oom_fallbacks,
        attempts=(Attempt(started_at=STARTED_AT, ended_at=ended_at, steps_done=steps_done),),
        goodput=goodput,
    )


def _write_line(row: StepMetrics) -> str:
    """Format a row as append_metrics does, but fast enough for thousands."""
    tree = asdict(row)
    tree["values"] = {name: value if math.isfinite(value) else None for name, value in row.values.items()}
    return json.dumps(tree, separators=(",", ":"), allow_nan=False) + "\n"
