"""Facts of runs by hand: a few steps, traits that a test sets, nothing from a disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from launcher.analysis.compare.load_run import Column, Judged, JudgedRun, RunFacts, Traits, drop_answer_texts
from launcher.analysis.compare.make import make_comparison
from launcher.analysis.compare.model import Comparison
from launcher.core import metrics
from launcher.runs.evaluations import Evaluation, RunEvaluations
from tests.made_evaluations import make_evaluation

DATA_KEY = "0123456789abcdef" * 4
MADE_AT = "2026-11-15T12:00:00+00:00"
TRAITS = Traits(
    expert="neo4j",
    base="Qwen3-8B",
    hardware="1 x GeForce RTX 4090 (24.0 GiB)",
    data_key=DATA_KEY,
    global_batch_size=32,
    sequence_length=2048,
    loss_on="completion",
    held_out="validation.jsonl",
    precision="bf16",
    seed=42,
    card="GeForce RTX 4090",
    card_gib=23.9883,
    predicted_gib=18.0,
)


def make_column(values: Sequence[float], steps: Sequence[int] | None = None) -> Column:
    return Column(steps=tuple(range(1, len(values) + 1) if steps is None else steps), values=tuple(values))


def make_facts(
    name: str, columns: Mapping[str, Sequence[float]] | None = None, *, traits: Traits = TRAITS, **changes: object
) -> RunFacts:
    """Done, on the same data as all others, with a falling loss; whatever a test says instead."""
    logged = {metrics.TRAIN_LOSS: (3.0, 2.0, 1.5, 1.0)} if columns is None else columns
    num_steps = max(40, *(len(values) for values in logged.values()), 0)
    facts = RunFacts(
        name=name,
        place=f"runs/{name}",
        status="done",
        traits=traits,
        columns={metric: make_column(values) for metric, values in logged.items()},
        started_at="2026-11-15T10:00:00+00:00",
        steps_done=num_steps,
        num_steps=num_steps,
    )
    return replace(facts, **changes)  # type: ignore[arg-type]


def make_judged(rates: Mapping[str, float], **changes: Any) -> Judged:
    """See tests/made_evaluations.py."""
    found = RunEvaluations(base=Evaluation(result=make_evaluation(rates, **changes), step=0))
    judged = drop_answer_texts(found).base
    assert judged is not None
    return judged


def with_answers(name: str, first: float, last: float, *, columns: bool = True, **changes: Any) -> RunFacts:
    """Facts with judged answers of base and trained model, logged at steps 0, 2 and 4."""
    base, trained = (
        make_judged({"parses": (1 + rate) / 2, "matches": rate}, seed=name, **changes) for rate in (first, last)
    )
    facts = make_facts(name, judged=JudgedRun(base=base, trained=trained))
    rates = {
        "eval/parses": make_column([(1 + first) / 2, 0.8, (1 + last) / 2], [0, 2, 4]),
        "eval/matches": make_column([first, (first + last) / 2, last], [0, 2, 4]),
    }
    return replace(facts, columns={**facts.columns, **rates}) if columns else facts


def with_traits(name: str, **changes: object) -> RunFacts:
    return make_facts(name, traits=replace(TRAITS, **changes))  # type: ignore[arg-type]


def compare(*runs: RunFacts) -> Comparison:
    return make_comparison(runs, made_at=MADE_AT)
