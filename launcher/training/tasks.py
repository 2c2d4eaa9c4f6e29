"""Asks the expert in the midst of its training: held-out rows answered by the live model, judged by the real judges.

Whatever goes wrong here is said, and costs the run no more than its task metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from accelerate.utils import gather_object

from launcher import metrics
from launcher.corpus.preparation import Preparation
from launcher.corpus.questions import HeldOut, read_held_out
from launcher.errors import first_line
from launcher.manifest import Manifest, load_manifest
from launcher.manifest.metadata import MOST_TASK_ROWS, Decoding
from launcher.paths import write_text_atomically
from launcher.quality.judges import open_judge
from launcher.quality.judging import Question
from launcher.quality.results import EvalResult
from launcher.training.answering import Answer
from launcher.training.asking import Asker, StoppedError, kept_alive
from launcher.training.cadence import is_due
from launcher.training.graded import Asked, grade
from launcher.training.handing import hand_out
from launcher.training.slices import Allowance, Pace, TaskSlice, bound_answer, choose_slice, load_slice, save_slice
from launcher.units import format_duration

if TYPE_CHECKING:
    from launcher.training.run import Run

_TIMED_TOKENS, _TIMED_ROWS = 8, 8
_UNKNOWN_SECONDS = 30.0  # for one evaluation, where nobody knows how long the training takes

Found = tuple[HeldOut, Manifest, TaskSlice | None]


def open_tasks(run: Run, wanted: Preparation, stops: Callable[[], bool]) -> Tasks | None:
    """Every rank must call it. None: no answers are judged, and if that was not planned it is said why.

    `stops` tells that this rank was asked to stop.
    """
    plan = run.plan
    if plan.tasks is None:
        return None
    run.pulse.beat("evaluating")
    found: Found | str = "no rank has all weights at hand; `launcher eval` asks it when it is trained"
    if run.engine.is_main and plan.strategy not in ("fsdp2", "zero3") and plan.offload == "none":
        found = _find(run, wanted, plan.tasks.num_rows)
    found = hand_out(run.engine.accelerator, found)
    tasks = None if isinstance(found, str) else Tasks(run, wanted, *found, stops)
    trouble = found if tasks is None else tasks.settle()
    if trouble:
        run.say(f"note: no answers are judged while it trains: {trouble}")
        return None
    return tasks


def _find(run: Run, wanted: Preparation, num_rows: int) -> Found | str:
    """The rows, who judges them, and how many it was before; or why not."""
    try:
        kept = load_slice(run.paths.evaluations / "slice.json")
        manifest = load_manifest(run.paths.manifest).manifest
        limit = num_rows if kept is None else kept.num_rows
        with closing(open_judge(manifest)):
            return read_held_out(wanted, limit, "validation", among=MOST_TASK_ROWS), manifest, kept
    except Exception as error:  # a hub that cannot be reached, a package that is missing: the training needs neither
        return first_line(error)


class Tasks:
    def __init__(
        self,
        run: Run,
        wanted: Preparation,
        held_out: HeldOut,
        manifest: Manifest,
        kept: TaskSlice | None,
        stops: Callable[[], bool],
    ) -> None:
        self._run, self._manifest, self._held_out, self._stops = run, manifest, held_out, stops
        self._asker = Asker(run, wanted, manifest.training.decoding or Decoding(), stops)
        self._slice: TaskSlice | None = kept
        self._asked_at: int | None = None

    def settle(self) -> str:
        """How many rows, for the run's whole life. Why none, where none can be afforded."""
        run, rows = self._run, self._held_out.rows
        longest = bound_answer(max(self._asker.count_tokens(row.answer) for row in rows))
        self._asker.bound([row.prompt for row in rows], longest)
        if self._slice is None:
            chosen = hand_out(run.engine.accelerator, self._choose(longest))
            if isinstance(chosen, str):
                return chosen
            self._slice = chosen
            trouble = hand_out(run.engine.accelerator, self._keep(chosen) if run.engine.is_main else "")
            if trouble:
                return trouble
        self._held_out = replace(self._held_out, rows=rows[: self._slice.num_rows])
        when = "before the first step and after the last" if self._slice.only_ends else "at each evaluation"
        run.say(f"answers to {len(self._held_out.rows)} validation rows are judged {when}: {self._slice.why}")
        return ""

    def is_due(self, step: int, *, is_last: bool = False) -> bool:
        assert self._slice is not None
        if step == self._asked_at:
            return False
        return is_last or not self._slice.only_ends or step in (0, self._run.num_steps)

    def evaluate(self, step: int) -> dict[str, float]:
        """The share of answers that pass each check; empty where something went wrong. Every rank must call it."""
        assert self._slice is not None
        self._asked_at = step
        self._run.pulse.beat("evaluating")
        began = time.perf_counter()
        answers = self._answer(self._slice.max_new_tokens)
        values: dict[str, float] | str = {}
        with kept_alive(self._run):
            if self._run.engine.is_main:
                seconds = time.perf_counter() - began
                values = answers if isinstance(answers, str) else self._judge(step, answers, seconds)
            values = hand_out(self._run.engine.accelerator, values)
        if isinstance(values, str):
            self._run.say(f"note: the answers of step {step:,} were not judged: {values}")
            return {}
        return {**values, metrics.TASK_SECONDS: time.perf_counter() - began}

    def _judge(self, step: int, answers: list[Answer], seconds: float) -> dict[str, float] | str:
        assert self._slice is not None
        run, plan = self._run, self._run.plan
        asked = Asked(answers=answers, max_new_tokens=self._slice.max_new_tokens, seconds=seconds)
        quantised = "" if plan.quantization is None else f", {plan.quantization.kind}"
        title = f"run {run.paths.run_id}, step {step}" if step else f"base {plan.base.name}{quantised}"
        try:
            if self._stops():
                raise StoppedError
            with closing(open_judge(self._manifest)) as judge:
                result = grade(judge, self._held_out, asked, title=title, plan=plan, manifest=self._manifest)
            run.paths.evaluations.mkdir(exist_ok=True)
            write_text_atomically(run.paths.evaluation_at(step), result.model_dump_json(indent=1) + "\n")
        except Exception as error:  # of a judge, perhaps somebody's own
            return first_line(error)
        return name_values(result)

    def _answer(self, max_new_tokens: int) -> list[Answer] | str:
        """Of all rows, on every rank; each rank generates its share. Or why one of them could not."""
        engine = self._run.engine
        mine = [row.prompt for row in self._held_out.rows[engine.rank :: engine.num_ranks]]
        found = self._asker.answer(mine, max_new_tokens)
        with kept_alive(self._run):  # others may have more to say
            shares: list[list[Answer] | str] = gather_object([found]) if engine.num_ranks > 1 else [found]
        for share in shares:
            if isinstance(share, str):
                return share
        whole = [share for share in shares if isinstance(share, list)]
        return [whole[index % engine.num_ranks][index // engine.num_ranks] for index in range(len(self._held_out.rows))]

    def _keep(self, chosen: TaskSlice) -> str:
        try:
            save_slice(self._run.paths.evaluations / "slice.json", chosen)
        except Exception as error:  # a full disk: a training that saves nothing else yet may still go on
            return first_line(error)
        return ""

    def _choose(self, max_new_tokens: int) -> TaskSlice | str:
        """On every rank, since all of them are timed; the first one's word counts."""
        tasks = self._run.plan.tasks
        assert tasks is not None
        rows = len(self._held_out.rows)
        if tasks.is_fixed:
            return TaskSlice(num_rows=rows, max_new_tokens=max_new_tokens, only_ends=False, why="as planned")
        pace = self._time()
        if isinstance(pace, str):
            return pace
        allowance = self._find_allowance(tasks.share)
        chosen = choose_slice(rows, max_new_tokens, pace, allowance)
        if chosen is not None:
            return chosen
        least = format_duration(2 * pace.predict(min(rows, _TIMED_ROWS), max_new_tokens))
        return f"they would take {least}, and {format_duration(allowance.seconds)} are allowed (evaluation.task_share)"

    def _find_allowance(self, share: float) -> Allowance:
        run, schedule = self._run, self._run.plan.schedule
        every = schedule.evaluate_every_steps, schedule.evaluate_every_epochs
        times = 1 + sum(is_due(run, step, *every) for step in range(1, run.num_steps + 1))
        seconds = run.plan.speed.seconds_per_step
        training = times * _UNKNOWN_SECONDS / share if seconds is None else run.num_steps * seconds
        return Allowance(training_seconds=training, share=share, num_evaluations=times)

    def _time(self) -> Pace | str:
        """By a few tokens of one batch, once to warm up; and by judging some references, which pass every check."""
        prompts = [row.prompt for row in self._held_out.rows]
        seconds = []
        for num_tokens in (1, 1, 1 + _TIMED_TOKENS):
            began = time.perf_counter()
            trouble = self._asker.answer(prompts[: self._asker.at_once], num_tokens, to_the_end=True)
            if isinstance(trouble, str):
                return trouble
            seconds.append(time.perf_counter() - began)
        _, first, more = seconds
        with kept_alive(self._run):
            judging = self._time_judge() if self._run.engine.is_main else (0.0, 0.0)
        if isinstance(judging, str):
            return judging
        return Pace(
            first_token_seconds=first,
            token_seconds=max(0.0, more - first) / _TIMED_TOKENS,
            rows_at_once=self._asker.at_once * self._run.engine.num_ranks,
            judge_seconds=judging[0],
            row_seconds=judging[1],
        )

    def _time_judge(self) -> tuple[float, float] | str:
        """To begin, and for each row."""
        rows = self._held_out.rows[:_TIMED_ROWS]
        questions = [Question(instruction=row.instruction, context=row.context, reference=row.answer) for row in rows]
        marks = [time.perf_counter()]
        try:
            with closing(open_judge(self._manifest)) as judge:
                for part in (slice(0, 1), slice(1, None)):
                    judge.judge(questions[part], [question.reference for question in questions[part]])
                    marks.append(time.perf_counter())
        except Exception as error:
            return first_line(error)
        return marks[1] - marks[0], (marks[2] - marks[1]) / max(1, len(rows) - 1)


def name_values(result: EvalResult) -> dict[str, float]:
    """A check that nobody could make has no value."""
    return {f"{metrics.EVAL_PREFIX}{check.name}": check.rate for check in result.checks if check.num_judged}
