"""The old training differs from the optimized one in execution settings only; rows, epochs and seed are equal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.bench.regression import Pair, list_caveats, match_rows, plan_pair
from launcher.core.errors import InputError
from launcher.request.request import Request, plan_request
from tests.conftest import WriteManifest
from tests.unit.bench.synthetic_audit import make_audit

pytestmark = pytest.mark.long


def make_pair(*, expert: str = "json", **fields: Any) -> Pair:
    request = replace(Request(expert=expert), **fields)
    return plan_pair(request, lambda _planned: make_audit())


def test_all_old_settings_take_effect_on_a_gpu() -> None:
    pair = make_pair(gpu="rtx4090", overrides=("training.config.epochs=9",))
    changed = {setting.name: (setting.old, setting.new) for setting in pair.settings if setting.has_effect}
    assert changed == {
        "rows": ("not packed, 155 per step", "packed, 48 sequences of 2,048 tokens per step"),
        "attention": ("sdpa", "varlen"),
        "torch.compile": ("off", "on, by layer"),
        "optimizer": ("adamw_torch", "adamw_torch_fused"),
        "gradient checkpointing": ("full", "off"),
        "loader workers": ("0", "2"),
        "pinned memory": ("off", "on"),
    }
    assert all(setting.reason for setting in pair.settings)


def test_settings_that_affect_learning_are_equal() -> None:
    pair = make_pair(gpu="h100")
    old, new = pair.old.plan, pair.new.plan
    assert old.adapter == new.adapter
    assert old.precision == new.precision
    assert old.loss_on == new.loss_on
    assert old.data == new.data
    assert old.base == new.base
    assert old.optimizer.model_copy(update={"name": new.optimizer.name}) == new.optimizer
    assert (old.schedule.seed, old.schedule.epochs) == (new.schedule.seed, new.schedule.epochs)
    assert (old.schedule.lr_scheduler, old.schedule.warmup_ratio) == (
        new.schedule.lr_scheduler,
        new.schedule.warmup_ratio,
    )
    assert old.batch.sequence_length == new.batch.sequence_length


def test_without_a_gpu_some_settings_have_no_effect() -> None:
    pair = make_pair()
    changed = [setting.name for setting in pair.settings if setting.has_effect]
    assert changed == [
        "rows",
        "optimizer",
        "gradient checkpointing",
    ]
    same = {setting.name: setting.new for setting in pair.settings if not setting.has_effect}
    assert same == {
        "precision": "fp32",
        "attention": "sdpa",
        "torch.compile": "off",
        "loader workers": "0",
        "pinned memory": "off",
    }


@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_fp8_is_compared_with_bf16(adapter: str) -> None:
    overrides = "training.config.precision=fp8", f"training.config.adapter_type={adapter}"
    pair = make_pair(gpu="h200", overrides=overrides)
    precision = next(setting for setting in pair.settings if setting.name == "precision")
    assert (precision.old, precision.new) == ("bf16", "fp8")
    assert pair.old.plan.precision.trainable_dtype == pair.new.plan.precision.trainable_dtype


def test_a_base_that_caps_its_scores_has_no_sdpa_to_fall_back_to() -> None:
    pair = make_pair(gpu="h100", base="google/gemma-2-2b-it")
    attention = next(setting for setting in pair.settings if setting.name == "attention")
    assert (attention.override, attention.old, attention.new) == ("training.config.attention=eager", "eager", "triton")


@pytest.mark.parametrize(
    ("num_documents", "num_packs", "rows"),
    [
        (2000, 621, 26),  # 8 sequences of 3.2 rows
        (2000, 2000, 8),  # not packed: a row each
        (1, 1, 8),
        (0, 0, 1),
    ],
)
def test_a_step_has_as_many_rows_as_its_packs_hold(num_documents: int, num_packs: int, rows: int) -> None:
    plan = plan_request(Request(expert="json")).plan
    assert plan.batch.global_batch_size == 8
    assert match_rows(plan, make_audit(num_documents, num_packs)) == rows


def test_old_batch_matches_the_rows_per_step_of_the_new_one() -> None:
    given = ("training.config.batch_size=2", "training.config.gradient_accumulation_steps=3")
    pair = make_pair(overrides=given)
    assert (pair.new.plan.batch.global_batch_size, pair.old.plan.batch.global_batch_size) == (6, 19)


def test_smoke_profile_trains_one_complete_epoch() -> None:
    pair = make_pair()
    for side in (pair.old, pair.new):
        assert (side.plan.schedule.max_steps, side.plan.schedule.epochs) == (None, 1.0)
    assert pair.notes == ()


def test_task_eval_during_training_is_off_unless_requested() -> None:
    pair = make_pair()
    assert (pair.old.plan.task_eval, pair.new.plan.task_eval) == (None, None)
    pair = make_pair(overrides=("evaluation.task_rows=3",))
    assert [side.plan.task_eval and side.plan.task_eval.num_rows for side in (pair.old, pair.new)] == [3, 3]


def test_num_epochs_of_the_manifest_is_overridden_by_the_same_key(write_manifest: WriteManifest) -> None:
    path = write_manifest({"training.config.num_epochs": 3.0}, drop=("training.config.epochs",))
    assert make_pair(expert=str(path)).new.plan.schedule.epochs == 1.0


def test_max_steps_of_the_manifest_do_not_end_the_epoch(write_manifest: WriteManifest) -> None:
    pair = make_pair(expert=str(write_manifest({"training.config.max_steps": 9})))
    for side in (pair.old, pair.new):
        assert (side.plan.schedule.max_steps, side.plan.schedule.epochs) == (None, 1.0)


def test_precision_from_the_command_line_is_that_of_both() -> None:
    pair = make_pair(gpu="rtx4090", overrides=("training.config.bf16=true",))
    assert [side.plan.precision.compute_dtype for side in (pair.old, pair.new)] == ["bf16", "bf16"]


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"max_steps": 5}, "5 steps may end within an epoch"),
        ({"overrides": ("training.config.max_steps=7",)}, "7 steps may end within an epoch"),
        ({"overrides": ("training.config.epochs=1.5",)}, "1.5 epochs end within an epoch"),
    ],
)
def test_length_from_the_command_line_applies_to_both_and_is_noted(fields: dict[str, Any], note: str) -> None:
    pair = make_pair(**fields)
    assert pair.old.plan.schedule.max_steps == pair.new.plan.schedule.max_steps
    assert pair.old.plan.schedule.epochs == pair.new.plan.schedule.epochs
    (caveat,) = pair.notes
    assert caveat.startswith(note)


def test_complete_epochs_have_no_caveat() -> None:
    pair = make_pair(overrides=("training.config.epochs=2",))
    assert list(list_caveats(pair.new.plan.schedule)) == []


def test_missing_test_rows_are_refused_before_training() -> None:
    with pytest.raises(InputError, match="json has no rows to evaluate on"):
        plan_pair(Request(expert="json"), lambda _planned: make_audit(held_out=0))
