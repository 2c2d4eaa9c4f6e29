"""Grade generated answers with the expert's judge."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from launcher.core.errors import escape
from launcher.corpus.heldout import HeldOutRows
from launcher.judges.base import Judge, ReferenceRow
from launcher.judges.results import AnswerResult, EvalResult, summarize_checks
from launcher.manifest import Manifest
from launcher.manifest.model import Decoding
from launcher.plan.model import Plan
from launcher.training.runtime.run_record import collect_versions

if TYPE_CHECKING:
    from launcher.training.inference.generate import Answer


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedAnswers:
    """One answer per held-out row, and how they were generated."""

    answers: list[Answer]
    max_new_tokens: int
    seconds: float


def make_reference_rows(held_out: HeldOutRows) -> list[ReferenceRow]:
    """Return instruction, context and reference answer of each row, which is what judges take."""
    return [
        ReferenceRow(instruction=row.instruction, context=row.context, reference=row.answer) for row in held_out.rows
    ]


def grade(
    judge: Judge, held_out: HeldOutRows, generated: GeneratedAnswers, *, title: str, plan: Plan, manifest: Manifest
) -> EvalResult:
    """Judge generated answers and return an EvalResult; `title` names the model that gave them."""
    from launcher.training.inference.generate import (
        uses_sampling,  # imports torch: only after input errors are reported
    )

    began = time.monotonic()
    verdicts = judge.judge(make_reference_rows(held_out), [answer.text for answer in generated.answers])
    decoding = manifest.training.decoding or Decoding()
    return EvalResult(
        expert=plan.expert,
        subject=title,
        base=plan.base.name,
        split=held_out.split,
        source=held_out.source,
        num_rows=held_out.num_rows,
        num_chats=sum(row.num_answers > 1 for row in held_out.rows),
        main_check=judge.main_check,
        checks=summarize_checks(judge.checks, verdicts),
        answers=tuple(
            AnswerResult(
                key=row.key,
                instruction=row.instruction,
                reference=row.answer,
                answer=answer.text,
                checks=dict(verdict.checks),
                reason=escape(verdict.reason),
                num_tokens=answer.num_tokens,
                end=answer.end,
            )
            for row, answer, verdict in zip(held_out.rows, generated.answers, verdicts, strict=True)
        ),
        greedy=not uses_sampling(decoding),
        seed=plan.schedule.seed,
        max_new_tokens=generated.max_new_tokens,
        seconds=generated.seconds,
        judging_seconds=time.monotonic() - began,
        versions=collect_versions(),
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
