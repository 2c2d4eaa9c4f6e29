"""What is compared of one run, whoever wrote it: a run directory of ours, or W&B's log."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from launcher.compare.judged import JudgedRun, strip_texts
from launcher.compare.model import Section
from launcher.compare.settings import plan_settings
from launcher.errors import InputError
from launcher.evaluations import RunEvaluations, load_evaluations
from launcher.metrics import METRICS_BY_NAME, PREDICTED_GIB, StepMetrics, is_task_metric
from launcher.paths import RunPaths
from launcher.plan.model import Plan
from launcher.record import Outcome, RunRecord, Status, load_record
from launcher.tracking import format_machine
from launcher.units import bytes_to_gib


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """What decides which figures of two runs compare. None: not known."""

    expert: str | None = None
    base: str | None = None
    hardware: str | None = None
    data_key: str | None = None
    global_batch_size: int | None = None
    sequence_length: int | None = None
    loss_on: str | None = None
    held_out: str | None = None
    precision: str | None = None
    random_weights: bool = False
    card: str | None = None
    card_gib: float | None = None
    predicted_gib: float | None = None
    price_per_hour: float | None = None  # of all its GPUs


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One metric of a run, at the steps that told it: fifty long runs fit into memory as arrays, not as lines."""

    steps: Sequence[int]
    values: Sequence[float]

    @property
    def finite(self) -> list[float]:
        return [value for value in self.values if math.isfinite(value)]

    @property
    def tells(self) -> bool:
        return any(map(math.isfinite, self.values))


_NOTHING = Column(steps=(), values=())


def make_columns(rows: Iterable[StepMetrics]) -> dict[str, Column]:
    """Of the metrics that we have a name for, and of all task metrics."""
    steps: dict[str, array[int]] = {}
    values: dict[str, array[float]] = {}
    for row in rows:
        for name, value in row.values.items():
            if name not in values:
                if name not in METRICS_BY_NAME and not is_task_metric(name):
                    continue
                steps[name], values[name] = array("q"), array("d")
            steps[name].append(row.step)
            values[name].append(value)
    return {name: Column(steps=steps[name], values=values[name]) for name in values}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    name: str  # foreign text, where W&B wrote it
    place: str
    kind: Literal["launcher", "wandb"]
    status: Status | Literal["not started"]
    traits: Traits
    columns: Mapping[str, Column]  # by the metrics' names
    settings: Mapping[tuple[Section, str], str] = field(default_factory=dict)
    started_at: str | None = None
    steps_done: int = 0
    num_steps: int | None = None
    attempt_seconds: float | None = None  # of all attempts that have an end
    rungs: tuple[str, ...] = ()
    goodput: Mapping[str, float] = field(default_factory=dict)  # at the end
    judged: JudgedRun = field(default_factory=JudgedRun)

    def column(self, metric: str) -> Column:
        return self.columns.get(metric, _NOTHING)

    def last(self, metric: str) -> float | None:
        """At the end of the run, by its record or else by its last line that tells."""
        if metric in self.goodput:
            return self.goodput[metric]
        return next(reversed(self.column(metric).values), None)


def read_run(paths: RunPaths) -> RunFacts:
    """A plan.json is all that a run directory must have; a run that was not started has no curve."""
    try:
        record = load_record(paths)
        return make_facts(record, load_evaluations(record))
    except OSError as error:
        raise InputError(f"{paths.root}: cannot be read: {error.strerror}") from None


def make_facts(record: RunRecord, evaluations: RunEvaluations) -> RunFacts:
    plan, outcome = record.plan, record.outcome
    columns = make_columns(record.rows)
    last_step = max((row.step for row in record.rows), default=0)
    return RunFacts(
        name=record.paths.root.resolve().name,
        place=str(record.paths.root),
        kind="launcher",
        status="not started" if outcome is None else outcome.status,
        traits=_find_traits(plan, outcome, columns),
        columns=columns,
        settings=plan_settings(plan, outcome),
        started_at=None if outcome is None else outcome.started_at,
        steps_done=last_step if outcome is None else max(last_step, outcome.steps_done),
        num_steps=plan.schedule.num_steps if outcome is None or outcome.num_steps is None else outcome.num_steps,
        attempt_seconds=None if outcome is None else _add_up_attempts(outcome),
        rungs=() if outcome is None else outcome.rungs,
        goodput={} if outcome is None else outcome.goodput,
        judged=strip_texts(evaluations),
    )


def _find_traits(plan: Plan, outcome: Outcome | None, columns: Mapping[str, Column]) -> Traits:
    gpu, schedule = plan.hardware.gpu, plan.schedule
    evaluates = schedule.evaluate_every_steps is not None or schedule.evaluate_every_epochs is not None
    told = columns.get(PREDICTED_GIB, _NOTHING).finite
    price = plan.speed.price_per_gpu_hour
    kind = plan.quantization_kind
    return Traits(
        expert=plan.expert,
        base=plan.base.name,
        hardware=format_machine(plan.hardware),
        data_key=None if outcome is None else outcome.data_key,
        global_batch_size=plan.batch.global_batch_size,
        sequence_length=plan.batch.sequence_length,
        loss_on=plan.loss_on,
        held_out=(plan.data.validation_path or "cut from the training rows") if evaluates else "none",
        precision=plan.precision.compute_dtype + ("" if kind == "none" else f", base in {kind}"),
        random_weights=plan.random_weights,
        card=None if gpu is None else gpu.title,
        card_gib=None if gpu is None else bytes_to_gib(gpu.memory_bytes),
        predicted_gib=told[-1] if told else None if gpu is None else bytes_to_gib(plan.memory.allocated_bytes),
        price_per_hour=None if price is None or gpu is None else price * plan.hardware.num_ranks,
    )


def _add_up_attempts(outcome: Outcome) -> float | None:
    """Without the pauses between them. A record of one attempt may tell only when the run began and ended."""
    spans = [(one.started_at, one.ended_at) for one in outcome.attempts] or [(outcome.started_at, outcome.ended_at)]
    seconds = [span for begin, end in spans if end is not None and (span := _seconds_between(begin, end)) is not None]
    return sum(seconds) if seconds else None


def _seconds_between(begin: str, end: str) -> float | None:
    try:
        return max(0.0, (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds())
    except (ValueError, TypeError):
        return None
