"""Task metrics during training: the live model answers validation rows, and the expert's judge grades the answers.

A failure here is logged and costs the run only its task metrics, unless they decide which checkpoint is best.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from accelerate.utils import gather_object

from launcher.core import metrics
from launcher.core.choices import SHARDED_STRATEGIES
from launcher.core.errors import InputError, LauncherError, first_line
from launcher.core.run_paths import write_text_atomically
from launcher.core.units import format_duration
from launcher.corpus.heldout import HeldOutRows, load_held_out_rows
from launcher.corpus.spec import PreparationSpec
from launcher.judges.base import NOT_JUDGED
from launcher.judges.registry import open_judge
from launcher.manifest import Manifest, load_manifest
from launcher.manifest.model import MAX_TASK_ROWS, Decoding
from launcher.training.engine.collectives import broadcast_object
from launcher.training.evaluation.eval_budget import (
    GenerationSpeed,
    TaskSlice,
    TimeBudget,
    choose_slice,
    limit_new_tokens,
    load_slice,
    save_slice,
)
from launcher.training.evaluation.live_generation import EvalInterruptedError, LiveGenerator, TaskEvalError
from launcher.training.inference.generate import Answer
from launcher.training.inference.grade import GeneratedAnswers, grade, make_reference_rows

if TYPE_CHECKING:
    from launcher.training.engine.run import TrainingRun

_TIMED_TOKENS, _TIMED_ROWS = 8, 8
_DEFAULT_SECONDS = 30.0  # for one evaluation, if the training time is unknown

T = TypeVar("T")


@contextmanager
def _as_task_eval_error() -> Iterator[None]:
    """Turn any exception into a TaskEvalError: the Hub may be unreachable, the disk full, a user's judge may fail."""
    try:
        yield
    except TaskEvalError:
        raise
    except Exception as error:
        hint = f"; {error.hint}" if isinstance(error, LauncherError) and error.hint else ""
        raise TaskEvalError(first_line(error) + hint) from error


def _broadcast(run: TrainingRun, compute: Callable[[], T]) -> T:
    """Run `compute` and return rank 0's result on all ranks, or raise rank 0's TaskEvalError on all ranks."""
    result: T | TaskEvalError
    try:
        result = compute()
    except TaskEvalError as error:
        result = type(error)(str(error))
    result = broadcast_object(run.engine.accelerator, result)
    if isinstance(result, TaskEvalError):
        raise result
    return result


def build_task_evaluator(
    run: TrainingRun, spec: PreparationSpec, is_stopping: Callable[[], bool]
) -> TaskEvaluator | None:
    """Build the evaluator, or log why there is none and return None. Every rank must call this.

    `is_stopping` returns whether this rank was requested to stop.
    """
    task_eval = run.plan.task_eval
    if task_eval is None:
        return None
    run.heartbeat.beat("evaluating")
    try:
        inputs = _broadcast(run, lambda: _load_inputs(run, spec, task_eval.num_rows) if run.engine.is_main else None)
        assert inputs is not None
        evaluator = TaskEvaluator(run, spec, *inputs, is_stopping)
        evaluator.choose_rows()
    except TaskEvalError as error:
        if task_eval.min_rows:
            raise _make_undecided_error(run, str(error)) from None
        run.log(f"note: no task metrics during training: {error}")
        return None
    return evaluator


def _make_undecided_error(run: TrainingRun, reason: str) -> InputError:
    return InputError(
        f"{run.plan.schedule.metric_for_best_model} cannot decide which checkpoint is best: {reason}",
        hint="train a new run with more validation rows, or --set training.config.metric_for_best_model=eval_loss",
    )


def _load_inputs(
    run: TrainingRun, spec: PreparationSpec, num_rows: int
) -> tuple[HeldOutRows, Manifest, TaskSlice | None]:
    """Load the validation rows, the manifest and an earlier attempt's choice of rows; check that the judge starts."""
    if run.plan.strategy in SHARDED_STRATEGIES or run.plan.offload != "none":
        raise TaskEvalError("no rank holds all weights; run `launcher eval` after training")
    with _as_task_eval_error():
        task_slice = load_slice(run.paths.evaluations / "slice.json")
        manifest = load_manifest(run.paths.manifest).manifest
        limit = num_rows if task_slice is None else task_slice.num_rows
        with closing(open_judge(manifest)) as judge:
            checkers = {check.name: check.checker for check in judge.checks}
            metric = run.plan.schedule.metric_for_best_model
            if metric != metrics.EVAL_LOSS:
                checker = checkers.get(metric.removeprefix(metrics.EVAL_PREFIX))
                if checker is None:
                    raise TaskEvalError(f"the judge has no check of this name, only {', '.join(checkers)}")
                if checker.startswith(NOT_JUDGED):
                    raise TaskEvalError(checker)
            return load_held_out_rows(spec, limit, "validation", among=MAX_TASK_ROWS), manifest, task_slice


class TaskEvaluator:
    """Evaluator of the model being trained, on a fixed slice of the validation rows."""

    def __init__(
        self,
        run: TrainingRun,
        spec: PreparationSpec,
        held_out: HeldOutRows,
        manifest: Manifest,
        task_slice: TaskSlice | None,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._run, self._manifest, self._held_out, self._is_stopping = run, manifest, held_out, is_stopping
        self._generator = LiveGenerator(run, spec, manifest.training.decoding or Decoding(), is_stopping)
        self._slice = task_slice
        self._last_step: int | None = None
        task_eval = run.plan.task_eval
        self._min_rows = 0 if task_eval is None else task_eval.min_rows
        self.must_repeat = False  # after a resume: the last evaluation was interrupted, and decides what is best

    def choose_rows(self) -> None:
        """Choose the rows for all evaluations of this run, or raise TaskEvalError if none fit the time budget."""
        run, rows = self._run, self._held_out.rows
        self._check_enough(len(rows))
        max_new_tokens = limit_new_tokens(max(self._generator.count_tokens(row.answer) for row in rows))
        self._generator.limit_batch_size([row.prompt for row in rows], max_new_tokens)
        if self._slice is None:
            self._slice = _broadcast(run, lambda: self._choose_slice(max_new_tokens))
            _broadcast(run, self._save_slice)
        self._held_out = replace(self._held_out, rows=rows[: self._slice.num_rows])
        when = "before the first step and after the last" if self._slice.only_ends else "at each evaluation"
        run.log(f"answers to {len(self._held_out.rows)} validation rows are judged {when}: {self._slice.why}")

    def _check_enough(self, num_rows: int) -> None:
        if num_rows < self._min_rows:
            raise TaskEvalError(f"{num_rows} judged rows are too few; at least {self._min_rows} are needed")

    def is_due(self, step: int, *, is_last: bool = False) -> bool:
        """Return whether answers are judged after this step."""
        assert self._slice is not None
        if step == self._last_step:
            return False
        if is_last and self._min_rows:  # stopped early: by this step's evaluation, perhaps before a resume
            return False
        return is_last or not self._slice.only_ends or step in (0, self._run.num_steps)

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the rate at which answers pass each check; empty after a failure. Every rank must call this."""
        self._last_step = step
        self._run.heartbeat.beat("evaluating")
        began = time.perf_counter()
        try:
            answers = self._generate()
            seconds = time.perf_counter() - began
            with self._run.heartbeat.beating("evaluating"):
                is_main = self._run.engine.is_main
                values, num_judged = _broadcast(
                    self._run, lambda: self._judge(step, answers, seconds) if is_main else ({}, 0)
                )
        except TaskEvalError as error:
            self.must_repeat = isinstance(error, EvalInterruptedError) and step > 0 and self._min_rows > 0
            self._run.log(f"note: no task metrics for step {step:,}: {error}")
            return {}
        self.must_repeat = False
        if step == 0:
            try:
                self._check_enough(num_judged)
            except TaskEvalError as error:
                raise _make_undecided_error(self._run, str(error)) from None
        seconds = time.perf_counter() - began
        if step == 0 and self._min_rows:
            times, metric = self._count_evaluations(), self._run.plan.schedule.metric_for_best_model
            cost = f"{times} evaluations of {format_duration(seconds)} take about {format_duration(times * seconds)}"
            self._run.log(f"{metric} decides which checkpoint is best: {cost}")
        return {**values, metrics.TASK_SECONDS: seconds}

    def _judge(self, step: int, answers: list[Answer], seconds: float) -> tuple[dict[str, float], int]:
        """Return the share of answers that pass each check, and how many answers decide which checkpoint is best."""
        assert self._slice is not None
        run, plan = self._run, self._run.plan
        generated = GeneratedAnswers(answers=answers, max_new_tokens=self._slice.max_new_tokens, seconds=seconds)
        quantized = "" if plan.quantization is None else f", {plan.quantization.kind}"
        title = f"run {run.paths.run_id}, step {step}" if step else f"base {plan.base.name}{quantized}"
        with _as_task_eval_error():
            if self._is_stopping():
                raise EvalInterruptedError("the run is stopping")
            with closing(open_judge(self._manifest)) as judge:
                result = grade(judge, self._held_out, generated, title=title, plan=plan, manifest=self._manifest)
            run.paths.evaluations.mkdir(exist_ok=True)
            write_text_atomically(run.paths.evaluation_at(step), result.model_dump_json(indent=1) + "\n")
        judged = {f"{metrics.EVAL_PREFIX}{check.name}": check for check in result.checks if check.num_judged}
        deciding = judged.get(plan.schedule.metric_for_best_model)
        rates = {name: check.rate for name, check in judged.items()}
        return rates, 0 if deciding is None else deciding.num_judged

    def _generate(self) -> list[Answer]:
        """Return the answers to all rows on every rank; each rank generates its share. All ranks raise a failure."""
        assert self._slice is not None
        engine, rows = self._run.engine, self._held_out.rows
        share: list[Answer] | TaskEvalError
        try:
            prompts = [row.prompt for row in rows[engine.rank :: engine.num_ranks]]
            share = self._generator.generate(prompts, self._slice.max_new_tokens)
        except TaskEvalError as error:
            share = type(error)(str(error))
        with self._run.heartbeat.beating("evaluating"):  # other ranks may need longer
            gathered = gather_object([share]) if engine.num_ranks > 1 else [share]
        shares: list[list[Answer]] = []
        for share in gathered:
            if isinstance(share, TaskEvalError):
                raise share
            shares.append(share)
        return [shares[index % engine.num_ranks][index // engine.num_ranks] for index in range(len(rows))]

    def _save_slice(self) -> None:
        if self._run.engine.is_main and self._slice is not None:
            with _as_task_eval_error():
                save_slice(self._run.paths.evaluations / "slice.json", self._slice)

    def _choose_slice(self, max_new_tokens: int) -> TaskSlice:
        """Choose the rows of all evaluations. Every rank calls this to time generation; rank 0's choice counts."""
        task_eval = self._run.plan.task_eval
        assert task_eval is not None
        rows = len(self._held_out.rows)
        if task_eval.is_fixed:
            return TaskSlice(num_rows=rows, max_new_tokens=max_new_tokens, only_ends=False, why="as planned")
        speed = self._measure_speed()
        budget = self._compute_budget(task_eval.time_share)
        task_slice = choose_slice(rows, max_new_tokens, speed, budget)
        if task_slice is None:
            needed = format_duration(2 * speed.predict(min(rows, _TIMED_ROWS), max_new_tokens))
            allowed = format_duration(budget.seconds)
            raise TaskEvalError(f"they would take {needed}, and evaluation.task_share allows {allowed}")
        return task_slice

    def _compute_budget(self, share: float) -> TimeBudget:
        run, times = self._run, self._count_evaluations()
        seconds = run.plan.speed.seconds_per_step
        training = times * _DEFAULT_SECONDS / share if seconds is None else run.num_steps * seconds
        return TimeBudget(training_seconds=training, share=share, num_evaluations=times)

    def _count_evaluations(self) -> int:
        run, schedule = self._run, self._run.plan.schedule
        every = schedule.evaluate_every_steps, schedule.evaluate_every_epochs
        return 1 + sum(run.is_due(step, *every) for step in range(1, run.num_steps + 1))

    def _measure_speed(self) -> GenerationSpeed:
        """Measure the time to generate a few tokens for one batch, after a warm-up, and to judge some references."""
        prompts = [row.prompt for row in self._held_out.rows]
        seconds = []
        for num_tokens in (1, 1, 1 + _TIMED_TOKENS):
            began = time.perf_counter()
            self._generator.generate(prompts[: self._generator.batch_size], num_tokens, ignore_eos=True)
            seconds.append(time.perf_counter() - began)
        _, first, more = seconds
        with self._run.heartbeat.beating("evaluating"):
            judge_seconds, row_seconds = self._time_judge() if self._run.engine.is_main else (0.0, 0.0)
        return GenerationSpeed(
            first_token_seconds=first,
            token_seconds=max(0.0, more - first) / _TIMED_TOKENS,
            rows_at_once=self._generator.batch_size * self._run.engine.num_ranks,
            judge_seconds=judge_seconds,
            row_seconds=row_seconds,
        )

    def _time_judge(self) -> tuple[float, float]:
        """Measure two times: starting the judge and judging one row, and judging each further row."""
        rows = make_reference_rows(self._held_out)[:_TIMED_ROWS]
        marks = [time.perf_counter()]
        with _as_task_eval_error(), closing(open_judge(self._manifest)) as judge:
            for part in (rows[:1], rows[1:]):
                judge.judge(part, [row.reference for row in part])
                marks.append(time.perf_counter())
        return marks[1] - marks[0], (marks[2] - marks[1]) / max(1, len(rows) - 1)
