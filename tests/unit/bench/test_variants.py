"""Variants of an A/B test are planned first: incomparable ones are refused, consequences of a change are listed."""

from __future__ import annotations

import pytest

from launcher.bench.ab_test import fit_together, make_block_size
from launcher.bench.result import list_caveats, make_verdicts
from launcher.bench.variants import Variant, list_changes, parse_vary, plan_variants
from launcher.bench.worker import Timing
from launcher.core.errors import InputError
from launcher.request.request import Request


def plan(text: str, **more: object) -> tuple[Variant, ...]:
    return plan_variants(Request(expert="neo4j", gpu="h100", **more), parse_vary(text))  # type: ignore[arg-type]


def test_only_the_varied_decision_differs_without_consequences() -> None:
    variants = plan("optim=adamw_torch,adamw_torch_fused")
    assert [change.name for change in list_changes(variants)] == ["optimizer"]


def test_consequences_of_a_change_are_listed() -> None:
    """Without gradient checkpointing the same micro-batch does not fit."""
    variants = plan("gradient_checkpointing=true,false", base="Qwen/Qwen3-8B")
    names = [change.name for change in list_changes(variants)]
    assert "gradient checkpointing" in names
    assert "batch split" in names


def test_equal_plans_are_refused_with_the_reason() -> None:
    """Without a GPU the smoke profile compiles nothing, whatever the manifest says."""
    with pytest.raises(InputError) as caught:
        plan_variants(Request(expert="neo4j"), parse_vary("torch_compile=true,false"))
    assert "torch_compile=true and torch_compile=false have the same plan here" in str(caught.value)
    assert [problem.where for problem in caught.value.problems] == ["torch.compile"]


def test_error_of_a_plan_names_the_variant() -> None:
    with pytest.raises(InputError) as caught:
        plan("max_seq_length=2048,9999999", base="Qwen/Qwen3-0.6B")
    assert "max_seq_length=9999999 cannot be planned here" in str(caught.value)


def test_unknown_path_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be planned here"):
        plan("training.config.torch_compil=true,false")


def test_several_ranks_are_refused_with_a_hint() -> None:
    with pytest.raises(InputError) as caught:
        plan("optim=adamw_torch,adamw_torch_fused", gpus_per_node=8)
    assert "bench measures one process" in str(caught.value)
    assert "--gpus 1" in str(caught.value)


def test_large_models_are_not_loaded_together() -> None:
    assert fit_together(plan("optim=adamw_torch,adamw_torch_fused", base="Qwen/Qwen3-8B")) is False
    small = plan("optim=adamw_torch,adamw_torch_fused", overrides=("training.config.batch_size=1",))
    assert fit_together(small) is True


def test_caveats_list_what_is_unequal() -> None:
    variants = plan("batch_size=4,8")
    size = make_block_size([variant.plan.batch.global_batch_size for variant in variants], 1, 2)
    assert list_caveats(variants, size, ["a", "a"], 1_000_000) == [
        "sequences per step differ (batch_size=4: 12, batch_size=8: 24): compare tokens/s, not step times"
    ]
    assert list_caveats(variants, size, ["a", "b"], 10)[:2] == [
        "the change affects the data: variants train different sequences; compare tokens/s",
        "the data has 10 sequences, a block 72: sequences repeat within a block",
    ]


def test_verdict_compares_tokens_per_second_not_steps() -> None:
    """Steps of the second variant take twice as long and have three times as many tokens."""
    first = [Timing(seconds=(1.0, 1.0 + noise), tokens=(100, 100)) for noise in (0.0, 0.01, 0.02, 0.0, 0.01)]
    second = [Timing(seconds=(2.0, 2.0 + noise), tokens=(300, 300)) for noise in (0.01, 0.0, 0.02, 0.01, 0.0)]
    (verdict,) = make_verdicts(["A", "B"], [first, second])
    assert verdict.ratio == pytest.approx(2 / 3, rel=0.02)
    assert verdict.text.startswith("B is 1.50 times as fast as A")
