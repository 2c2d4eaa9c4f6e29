"""Asks the expert in the midst of its training: held-out rows answered by the live model, judged by the real judges.

Nothing that trains may change by it: random numbers, attention and the mode of the model are as before, and whatever
goes wrong here is said and costs the run no more than its task metrics.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object

from launcher import metrics
from launcher.corpus.preparation import Preparation
from launcher.corpus.questions import HeldOut, read_held_out
from launcher.errors import LauncherError
from launcher.manifest import Manifest, load_manifest
from launcher.manifest.metadata import Decoding
from launcher.paths import write_text_atomically
from launcher.quality.judges import open_judge
from launcher.quality.results import EvalResult
from launcher.training.answering import Answer, encode, make_generator, quiet_transformers
from launcher.training.cadence import is_due
from launcher.training.graded import Asked, grade
from launcher.training.handing import hand_out
from launcher.training.layers import uncompiled
from launcher.training.slices import (
    Allowance,
    Pace,
    TaskSlice,
    bound_answer,
    choose_slice,
    load_slice,
    save_slice,
)

if TYPE_CHECKING:
    from launcher.training.run import Run

_READ_ROWS = 2000  # of the validation split: a training shall not wait until millions are read
_MOST_AT_ONCE = 64
_TIMED_TOKENS = 8
_KEY_AND_VALUE = 2


def open_tasks(run: Run, wanted: Preparation) -> Tasks | None:
    """Every rank must call it. None: no answers are judged, and if that was not planned it is said why."""
    plan = run.plan
    if plan.tasks is None:
        return None
    found: tuple[HeldOut, Manifest] | str = "no rank has all weights at hand"
    if run.engine.is_main and plan.strategy not in ("fsdp2", "zero3") and plan.offload == "none":
        found = _find(run, wanted, plan.tasks.num_rows)
    found = hand_out(run.engine.accelerator, found)
    if isinstance(found, str):
        _say(run, f"note: no answers are judged while it trains: {found}")
        return None
    quiet_transformers()
    tasks = Tasks(run, wanted, *found)
    return tasks if tasks.settle() else None


def _find(run: Run, wanted: Preparation, num_rows: int) -> tuple[HeldOut, Manifest] | str:
    """The rows and who judges them; or why not."""
    try:
        manifest = load_manifest(run.paths.manifest).manifest
        with closing(open_judge(manifest)):
            return read_held_out(wanted, num_rows, "validation", among=_READ_ROWS), manifest
    except Exception as error:  # a hub that cannot be reached, a package that is missing: the training needs neither
        return _tell(error)


class Tasks:
    def __init__(self, run: Run, wanted: Preparation, held_out: HeldOut, manifest: Manifest) -> None:
        self._run, self._manifest = run, manifest
        self._tokenizer, self._end_token = wanted.tokenizer, wanted.template.end_token
        self._held_out = held_out
        self._slice: TaskSlice | None = None

    def settle(self) -> bool:
        """How many rows, for the run's whole life. False: none can be afforded."""
        run = self._run
        file = run.paths.evaluations / "slice.json"
        kept = hand_out(run.engine.accelerator, load_slice(file) if run.engine.is_main else None)
        chosen = kept or self._choose()
        if chosen is None:
            _say(run, "note: no answers are judged while it trains: they would take too long; `launcher eval` asks it")
            return False
        if run.engine.is_main and kept is None:
            save_slice(file, chosen)
        rows = self._held_out.rows[: chosen.num_rows]
        self._held_out = HeldOut(
            split=self._held_out.split, source=self._held_out.source, rows=rows, num_rows=self._held_out.num_rows
        )
        self._slice = chosen
        return True

    def is_due(self, step: int) -> bool:
        assert self._slice is not None
        return not self._slice.only_ends or step in (0, self._run.num_steps)

    def evaluate(self, step: int) -> dict[str, float]:
        """The share of answers that pass each check; empty where something went wrong. Every rank must call it."""
        assert self._slice is not None
        began = time.perf_counter()
        answers = self._answer(self._slice.max_new_tokens)
        values: dict[str, float] | str = {}
        if self._run.engine.is_main:
            seconds = time.perf_counter() - began
            values = answers if isinstance(answers, str) else self._judge(step, answers, seconds)
        values = hand_out(self._run.engine.accelerator, values)
        if isinstance(values, str):
            _say(self._run, f"note: the answers of step {step:,} were not judged: {values}")
            return {}
        return {**values, metrics.TASK_SECONDS: time.perf_counter() - began}

    def _judge(self, step: int, answers: list[Answer], seconds: float) -> dict[str, float] | str:
        assert self._slice is not None
        run = self._run
        run.pulse.beat("evaluating")
        asked = Asked(answers=answers, max_new_tokens=self._slice.max_new_tokens, seconds=seconds)
        title = f"run {run.paths.run_id}, step {step}" if step else f"base {run.plan.base.name}"
        try:
            with closing(open_judge(self._manifest)) as judge:
                result = grade(judge, self._held_out, asked, title=title, plan=run.plan, manifest=self._manifest)
            run.paths.evaluations.mkdir(exist_ok=True)
            write_text_atomically(run.paths.evaluation_at(step), result.model_dump_json(indent=1) + "\n")
        except Exception as error:  # of a judge, perhaps somebody's own
            return _tell(error)
        return name_values(result)

    def _answer(self, max_new_tokens: int) -> list[Answer] | str:
        """Of all rows, on every rank; each rank generates its share. Or why one of them could not."""
        engine = self._run.engine
        mine = [row.prompt for row in self._held_out.rows[engine.rank :: engine.num_ranks]]
        found = self._generate(mine, max_new_tokens, self._rows_at_once(max_new_tokens))
        shares: list[list[Answer] | str] = gather_object([found]) if engine.num_ranks > 1 else [found]
        for share in shares:
            if isinstance(share, str):
                return share
        whole = [share for share in shares if isinstance(share, list)]
        return [whole[index % engine.num_ranks][index // engine.num_ranks] for index in range(len(self._held_out.rows))]

    def _generate(self, prompts: list[str], max_new_tokens: int, at_once: int) -> list[Answer] | str:
        """Or why not. It never raises: other ranks wait for this one."""
        run = self._run
        while True:
            generator = make_generator(
                run.engine.module.model,
                run.plan,
                tokenizer=self._tokenizer,
                end_token=self._end_token,
                decoding=self._manifest.training.decoding or Decoding(),
                max_new_tokens=max_new_tokens,
                batch_size=at_once,
            )
            try:
                with _answering(run):
                    return generator.answer(prompts, lambda _count: run.pulse.beat("evaluating"))
            except torch.OutOfMemoryError:
                if at_once == 1:
                    return "memory ran out"
            except Exception as error:
                return _tell(error)
            at_once //= 2
            torch.cuda.empty_cache()

    def _choose(self) -> TaskSlice | None:
        tasks = self._run.plan.tasks
        assert tasks is not None
        rows = self._held_out.rows
        longest = bound_answer(max(len(encode(self._tokenizer, row.answer)) for row in rows))
        if tasks.is_fixed:
            return TaskSlice(num_rows=len(rows), max_new_tokens=longest, only_ends=False, why="as planned")
        allowance = self._find_allowance(tasks.share)
        pace = hand_out(self._run.engine.accelerator, self._time(longest))
        return None if pace is None else choose_slice(len(rows), longest, pace, allowance)

    def _find_allowance(self, share: float) -> Allowance:
        run, schedule = self._run, self._run.plan.schedule
        seconds = run.plan.speed.seconds_per_step
        assert seconds is not None  # otherwise the plan has fixed the rows
        every = schedule.evaluate_every_steps, schedule.evaluate_every_epochs
        times = sum(is_due(run, step, *every) for step in range(1, run.num_steps + 1))
        return Allowance(training_seconds=run.num_steps * seconds, share=share, num_evaluations=times + 1)

    def _time(self, max_new_tokens: int) -> Pace | None:
        """By a few tokens of one batch, once to warm up."""
        at_once = self._rows_at_once(max_new_tokens)
        prompts = [row.prompt for row in self._held_out.rows[:at_once]]
        seconds = []
        for num_tokens in (1, 1, 1 + _TIMED_TOKENS):
            began = time.perf_counter()
            trouble = self._generate(prompts, num_tokens, at_once)
            if isinstance(trouble, str):
                _say(self._run, f"note: the expert cannot be asked while it trains: {trouble}")
                return None
            seconds.append(time.perf_counter() - began)
        _, first, more = seconds
        return Pace(
            first_token_seconds=first,
            token_seconds=max(0.0, more - first) / _TIMED_TOKENS,
            rows_at_once=at_once * self._run.engine.num_ranks,
        )

    def _rows_at_once(self, max_new_tokens: int) -> int:
        """No more than a micro-batch has tokens, and keys and values no larger than what its activations take."""
        plan, base = self._run.plan, self._run.plan.base
        longest = max(len(encode(self._tokenizer, row.prompt)) for row in self._held_out.rows) + max_new_tokens
        tokens = plan.batch.micro_batch_size * plan.batch.sequence_length
        kept = _KEY_AND_VALUE * base.num_layers * base.num_kv_heads * base.head_dim * 4  # FP32 at most
        if self._run.engine.device.type == "cuda":
            tokens = min(tokens, plan.memory.activation_bytes // kept)
        return max(1, min(_MOST_AT_ONCE, tokens // longest))


def name_values(result: EvalResult) -> dict[str, float]:
    """A check that nobody could make has no value."""
    return {f"{metrics.EVAL_PREFIX}{check.name}": check.rate for check in result.checks if check.num_judged}


@contextmanager
def _answering(run: Run) -> Iterator[None]:
    """The live model, for a while as one that answers: its own attention, no graphs, other random numbers."""
    engine = run.engine
    base: Any = engine.module.base
    trained_with = base.config._attn_implementation
    devices = [engine.device] if engine.device.type == "cuda" else []
    caps = getattr(base.config.get_text_config(), "attn_logit_softcapping", None) is not None
    base.set_attn_implementation("eager" if caps else "sdpa")
    try:
        with engine.evaluating(), uncompiled(), torch.random.fork_rng(devices=devices), engine.accelerator.autocast():
            yield
    finally:
        base.set_attn_implementation(trained_with)


def _tell(error: Exception) -> str:
    words = error.title if isinstance(error, LauncherError) else str(error)
    return (words.strip() or type(error).__name__).splitlines()[0][:300]


def _say(run: Run, text: str) -> None:
    if run.engine.is_main:
        print(text, file=sys.stderr, flush=True)
