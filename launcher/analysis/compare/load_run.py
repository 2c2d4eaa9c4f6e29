"""Load the metrics, settings, status and evaluations of a run from its run directory."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.analysis.compare.config_diff import clean_text, collect_plan_settings
from launcher.analysis.compare.model import RunStatus, Section
from launcher.core.errors import InputError
from launcher.core.file_lock import is_locked
from launcher.core.metrics import METRICS_BY_NAME, PREDICTED_GIB, StepMetrics, is_task_metric
from launcher.core.run_paths import RunPaths
from launcher.core.units import bytes_to_gib
from launcher.judges.results import CheckResult, EvalResult
from launcher.plan.model import Plan
from launcher.runs.evaluations import Evaluation, RunEvaluations, load_evaluations
from launcher.runs.record import Outcome, RunRecord, get_global_batch, list_run_code, load_record, seconds_between
from launcher.runs.wandb_settings import format_machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """Properties that decide which metrics of two runs are comparable. None: unknown."""

    expert: str | None = None
    base: str | None = None
    hardware: str | None = None
    data_key: str | None = None
    global_batch_size: int | None = None
    sequence_length: int | None = None
    loss_on: str | None = None
    held_out: str | None = None
    precision: str | None = None
    seed: int | None = None
    random_weights: bool = False
    card: str | None = None
    card_gib: float | None = None
    predicted_gib: float | None = None
    price_per_hour: float | None = None  # all GPUs together
    currency: str | None = None  # of the price; None: no price


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """Values of one metric by step, as arrays, so that fifty long runs fit into memory."""

    steps: Sequence[int]
    values: Sequence[float]

    @property
    def finite(self) -> list[float]:
        """Finite values."""
        return [value for value in self.values if math.isfinite(value)]

    @property
    def by_step(self) -> dict[int, float]:
        """Finite values by step."""
        return {step: value for step, value in zip(self.steps, self.values, strict=True) if math.isfinite(value)}

    @property
    def has_values(self) -> bool:
        """Whether any value is finite."""
        return any(map(math.isfinite, self.values))


_NOTHING = Column(steps=(), values=())
_KEY_DIGITS = 6


def make_columns(rows: Iterable[StepMetrics]) -> dict[str, Column]:
    """Return the values by step of every metric that the launcher defines, and of every task metric."""
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
class Judged:
    """One evaluation of a run: the result of each check for each row, and the rate of each check."""

    main: str
    checks: Mapping[str, CheckResult]
    verdicts: Mapping[str, Mapping[str, bool | None]]  # by row key: result of each check
    rows: str  # description that is equal for the same rows only
    is_greedy: bool
    max_new_tokens: int
    num_cut: int  # answers that were cut off at max_new_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedRun:
    """Evaluations of a run's answers: before the first step, during training, and by `launcher eval`."""

    base: Judged | None = None
    trained: Judged | None = None  # during training, on the rows of `base`
    full_eval: Judged | None = None  # by `launcher eval`


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Data of one run that `launcher compare` uses: metrics, settings, status and evaluations."""

    name: str
    place: str
    status: RunStatus
    traits: Traits
    columns: Mapping[str, Column]  # by metric name
    settings: Mapping[tuple[Section, str], str] = field(default_factory=dict)
    started_at: str | None = None
    steps_done: int = 0
    num_steps: int | None = None
    attempt_seconds: float | None = None  # all attempts that ended
    oom_fallbacks: tuple[str, ...] = ()
    goodput: Mapping[str, float] = field(default_factory=dict)  # at the end
    judged: JudgedRun = field(default_factory=JudgedRun)
    left_out: str | None = None  # evaluations that cannot be used, and why
    code: str | None = None  # that the run directory names

    def column(self, metric: str) -> Column:
        """Return the column of a metric, empty if it was not logged."""
        return self.columns.get(metric, _NOTHING)

    def last(self, metric: str) -> float | None:
        """Return the final value of a metric: from the outcome, else the last one logged; None if there is neither."""
        if metric in self.goodput:
            return self.goodput[metric]
        return next(reversed(self.column(metric).values), None)


def load_run_facts(paths: RunPaths) -> RunFacts:
    """Load a run directory; only plan.json is required."""
    try:
        record = load_record(paths)
        return make_facts(record, load_evaluations(record))
    except OSError as error:
        raise InputError(f"{paths.root}: cannot read it: {error.strerror}") from None


def _get_status(record: RunRecord) -> RunStatus:
    """Return the status of a run; one marked as running without a process here was killed, or runs on another node."""
    if record.outcome is None:
        return "not started"
    is_killed = record.outcome.status == "running" and is_locked(record.paths.lock) is False
    return "killed or elsewhere" if is_killed else record.outcome.status


def make_facts(record: RunRecord, evaluations: RunEvaluations) -> RunFacts:
    """Collect what `launcher compare` needs from the record of a run and its evaluations."""
    plan, outcome = record.plan, record.outcome
    columns = make_columns(record.rows)
    last_step = max((row.step for row in record.rows), default=0)
    return RunFacts(
        name=record.paths.root.resolve().name,
        place=str(record.paths.root),
        status=_get_status(record),
        traits=_collect_traits(plan, outcome, columns),
        columns=columns,
        settings=collect_plan_settings(plan, outcome),
        started_at=None if outcome is None else outcome.started_at,
        steps_done=last_step if outcome is None else max(last_step, outcome.steps_done),
        num_steps=plan.schedule.num_steps if outcome is None or outcome.num_steps is None else outcome.num_steps,
        attempt_seconds=None if outcome is None else _sum_attempts(outcome),
        oom_fallbacks=() if outcome is None else tuple(map(clean_text, outcome.oom_fallbacks)),
        goodput={} if outcome is None else outcome.goodput,
        judged=drop_answer_texts(evaluations),
        left_out=_describe_left_out(record, evaluations),
        code=clean_text("; ".join(list_run_code(record))) or None,
    )


def _collect_traits(plan: Plan, outcome: Outcome | None, columns: Mapping[str, Column]) -> Traits:
    gpu, schedule = plan.hardware.gpu, plan.schedule
    evaluates = schedule.evaluate_every_steps is not None or schedule.evaluate_every_epochs is not None
    predictions = columns.get(PREDICTED_GIB, _NOTHING).finite
    predicted = predictions[-1] if predictions else None
    if predicted is None and gpu is not None:
        predicted = bytes_to_gib(plan.memory.allocated_bytes)
    price = plan.speed.price_per_gpu_hour
    kind = plan.quantization_kind
    return Traits(
        expert=plan.expert,
        base=plan.base.name,
        hardware=format_machine(plan.hardware),
        data_key=None if outcome is None else outcome.data_key,
        global_batch_size=get_global_batch(plan, outcome),
        sequence_length=plan.batch.sequence_length,
        loss_on=plan.loss_on,
        held_out=(plan.data.validation_path or "cut from the training rows") if evaluates else "none",
        precision=plan.precision.name + ("" if kind == "none" else f", base in {kind}"),
        seed=schedule.seed,
        random_weights=plan.random_weights,
        card=None if gpu is None else gpu.title,
        card_gib=None if gpu is None else bytes_to_gib(gpu.memory_bytes),
        predicted_gib=predicted,
        price_per_hour=None if price is None or gpu is None else price * plan.hardware.num_ranks,
        currency=None if price is None or gpu is None else plan.speed.currency,
    )


def _sum_attempts(outcome: Outcome) -> float | None:
    """Return the seconds of all attempts, without pauses between them; for an old record, its end minus its start."""
    spans = [(item.started_at, item.ended_at) for item in outcome.attempts] or [(outcome.started_at, outcome.ended_at)]
    seconds = [seconds_between(begin, end) for begin, end in spans if end is not None]
    known = [max(0.0, span) for span in seconds if span is not None]
    return sum(known) if known else None


def drop_answer_texts(evaluations: RunEvaluations) -> JudgedRun:
    """Return all evaluations of a run with the results of their checks, but without the texts of the answers."""
    return JudgedRun(
        base=_strip(evaluations.base), trained=_strip(evaluations.trained), full_eval=_strip(evaluations.full_eval)
    )


def _describe_left_out(record: RunRecord, evaluations: RunEvaluations) -> str | None:
    outdated = f"{record.paths.evaluation.name} is older than the last resume" if evaluations.is_outdated else ""
    reasons = [f"{name} cannot be read" for name in evaluations.unreadable]
    return clean_text(", ".join(filter(None, (*reasons, outdated)))) or None


def _strip(evaluation: Evaluation | None) -> Judged | None:
    if evaluation is None:
        return None
    result = evaluation.result
    return Judged(
        main=result.main_check,
        checks={check.name: check for check in result.checks},
        verdicts={answer.key: answer.checks for answer in result.answers},
        rows=_describe_rows(result),
        is_greedy=result.greedy,
        max_new_tokens=result.max_new_tokens,
        num_cut=result.num_cut,
    )


def _describe_rows(result: EvalResult) -> str:
    key = hashlib.sha256("\0".join(sorted(answer.key for answer in result.answers)).encode()).hexdigest()
    return f"{len(result.answers):,} of {result.num_rows:,} {result.split} rows (key {key[:_KEY_DIGITS]})"
