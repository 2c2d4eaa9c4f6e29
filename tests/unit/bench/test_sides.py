"""Sides are planned before anything is measured: what cannot be compared is refused, what follows a change is told."""

from __future__ import annotations

import pytest

from launcher.bench.comparing import fit_together
from launcher.bench.order import make_course
from launcher.bench.result import find_notes, make_verdicts
from launcher.bench.sides import Side, find_changes, plan_sides
from launcher.bench.values import Timing
from launcher.bench.varying import parse_vary
from launcher.errors import InputError
from launcher.inputs import Request


def plan(text: str, **more: object) -> tuple[Side, ...]:
    return plan_sides(Request(expert="neo4j", gpu="h100", **more), parse_vary(text))  # type: ignore[arg-type]


def test_only_the_key_differs_where_nothing_follows_from_it() -> None:
    sides = plan("optim=adamw_torch,adamw_torch_fused")
    assert [change.name for change in find_changes(sides)] == ["optimizer"]


def test_what_the_plan_decides_otherwise_is_told() -> None:
    """Without recomputation there is no room for the same micro-batch."""
    sides = plan("gradient_checkpointing=true,false", base="Qwen/Qwen3-8B")
    names = [change.name for change in find_changes(sides)]
    assert "gradient checkpointing" in names
    assert "split" in names


def test_plans_that_run_the_same_are_refused_with_the_reason() -> None:
    """Without a GPU the smoke profile compiles nothing, whatever the manifest says."""
    with pytest.raises(InputError) as caught:
        plan_sides(Request(expert="neo4j"), parse_vary("torch_compile=true,false"))
    assert "torch_compile=true and torch_compile=false run the same here" in str(caught.value)
    assert "no GPU: compiling would take longer than it saves" in str(caught.value)


def test_a_plan_that_is_refused_names_its_side() -> None:
    with pytest.raises(InputError) as caught:
        plan("max_seq_length=2048,9999999", base="Qwen/Qwen3-0.6B")
    assert "max_seq_length=9999999 has no plan here" in str(caught.value)


def test_an_unknown_path_is_refused() -> None:
    with pytest.raises(InputError, match="has no plan here"):
        plan("training.config.torch_compil=true,false")


def test_many_ranks_are_refused_with_the_way_out() -> None:
    with pytest.raises(InputError) as caught:
        plan("optim=adamw_torch,adamw_torch_fused", gpus_per_node=8)
    assert "bench measures one process" in str(caught.value)
    assert "--gpus 1" in str(caught.value)


def test_models_that_fill_the_card_are_not_loaded_together() -> None:
    assert fit_together(plan("optim=adamw_torch,adamw_torch_fused", base="Qwen/Qwen3-8B")) is False
    small = plan("optim=adamw_torch,adamw_torch_fused", overrides=("training.config.batch_size=1",))
    assert fit_together(small) is True


def test_notes_say_what_is_not_the_same() -> None:
    sides = plan("batch_size=4,8")
    course = make_course([side.plan.batch.global_batch_size for side in sides], 1, 2)
    assert find_notes(sides, course, ["a", "a"], 1_000_000) == [
        "sequences a step differ (batch_size=4: 12, batch_size=8: 24): compare tokens/s, not steps"
    ]
    assert find_notes(sides, course, ["a", "b"], 10)[:2] == [
        "the change makes other data: sides do not train the same sequences; compare tokens/s",
        "the data has 10 sequences, a block 72: they come more than once",
    ]


def test_a_verdict_compares_tokens_not_steps() -> None:
    """The second side makes steps that take twice as long, of three times as many tokens."""
    first = [Timing(seconds=(1.0, 1.0 + wobble), tokens=(100, 100)) for wobble in (0.0, 0.01, 0.02, 0.0, 0.01)]
    second = [Timing(seconds=(2.0, 2.0 + wobble), tokens=(300, 300)) for wobble in (0.01, 0.0, 0.02, 0.01, 0.0)]
    (verdict,) = make_verdicts(["A", "B"], [first, second])
    assert verdict.ratio == pytest.approx(2 / 3, rel=0.02)
    assert verdict.words.startswith("B is 1.50 times as fast as A")
