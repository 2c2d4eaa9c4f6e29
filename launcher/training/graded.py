"""Answers to held-out rows, judged: what an evaluation leaves behind."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from launcher.corpus.questions import HeldOut
from launcher.manifest import Manifest
from launcher.manifest.metadata import Decoding
from launcher.plan.model import Plan
from launcher.quality.judging import Judge, Question
from launcher.quality.results import AnswerResult, EvalResult, sum_up
from launcher.training.chronicle import find_versions

if TYPE_CHECKING:
    from launcher.training.answering import Answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    answers: list[Answer]  # one for each row
    max_new_tokens: int
    seconds: float


def grade(judge: Judge, held_out: HeldOut, asked: Asked, *, title: str, plan: Plan, manifest: Manifest) -> EvalResult:
    """`title` says whose answers they are."""
    from launcher.training.answering import samples  # with all of torch: mistakes are told before it is loaded

    began = time.monotonic()
    rows = held_out.rows
    questions = [Question(instruction=row.instruction, context=row.context, reference=row.answer) for row in rows]
    verdicts = judge.judge(questions, [answer.text for answer in asked.answers])
    decoding = manifest.training.decoding or Decoding()
    return EvalResult(
        expert=plan.expert,
        subject=title,
        base=plan.base.name,
        split=held_out.split,
        source=held_out.source,
        num_rows=held_out.num_rows,
        main_check=judge.main_check,
        checks=sum_up(judge.checks, verdicts),
        answers=tuple(
            AnswerResult(
                key=row.key,
                instruction=row.instruction,
                reference=row.answer,
                answer=answer.text,
                checks=dict(verdict.checks),
                reason=verdict.reason,
                num_tokens=answer.num_tokens,
                end=answer.end,
            )
            for row, answer, verdict in zip(rows, asked.answers, verdicts, strict=True)
        ),
        greedy=not samples(decoding),
        seed=plan.schedule.seed,
        max_new_tokens=asked.max_new_tokens,
        seconds=asked.seconds,
        judging_seconds=time.monotonic() - began,
        versions=find_versions(),
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
