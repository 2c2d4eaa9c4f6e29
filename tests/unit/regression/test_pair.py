"""The old side differs from the optimised one in how it runs, never in what it learns, from which rows, how often."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.errors import InputError
from launcher.inputs import Request, plan_request
from launcher.regression.pair import Pair, find_notes, match_rows, plan_pair
from tests.conftest import WriteManifest
from tests.unit.regression.made_audit import make_audit


def pair_of(*, expert: str = "json", **asked: Any) -> Pair:
    request = replace(Request(expert=expert), **asked)
    return plan_pair(request, lambda _planned: make_audit())


def test_on_a_gpu_everything_is_as_it_was_by_hand() -> None:
    pair = pair_of(gpu="rtx4090")
    told = {setting.name: (setting.old, setting.new) for setting in pair.changed}
    assert told == {
        "rows": ("one by one, 155 a step", "packed, 48 sequences of 2,048 tokens a step"),
        "attention": ("sdpa", "varlen"),
        "torch.compile": ("off", "on, by layer"),
        "optimizer": ("adamw_torch", "adamw_torch_fused"),
        "gradient checkpointing": ("full", "off"),
        "loader workers": ("0", "2"),
        "pinned memory": ("off", "on"),
    }
    assert all(setting.why for setting in pair.settings)


def test_what_is_learnt_stays() -> None:
    pair = pair_of(gpu="h100")
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


def test_without_a_gpu_some_settings_leave_no_choice() -> None:
    pair = pair_of()
    assert [setting.name for setting in pair.changed] == ["rows", "optimizer", "gradient checkpointing"]
    same = {setting.name: setting.new for setting in pair.settings if not setting.is_real}
    assert same == {"attention": "sdpa", "torch.compile": "off", "loader workers": "0", "pinned memory": "off"}


def test_a_base_that_caps_its_scores_has_no_sdpa_to_fall_back_to() -> None:
    pair = pair_of(gpu="h100", base="google/gemma-2-2b-it")
    attention = next(setting for setting in pair.settings if setting.name == "attention")
    assert (attention.override, attention.old, attention.new) == ("training.config.attention=eager", "eager", "eager")


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


def test_the_old_side_gets_the_matching_batch_whatever_was_given() -> None:
    given = ("training.config.batch_size=2", "training.config.gradient_accumulation_steps=3")
    pair = pair_of(overrides=given)
    assert (pair.new.plan.batch.global_batch_size, pair.old.plan.batch.global_batch_size) == (6, 19)


def test_in_the_smoke_profile_both_see_every_row_once() -> None:
    pair = pair_of()
    for side in (pair.old, pair.new):
        assert (side.plan.schedule.max_steps, side.plan.schedule.epochs) == (None, 1.0)
    assert pair.notes == ()


def test_answers_are_judged_at_the_end_unless_somebody_wants_more() -> None:
    pair = pair_of()
    assert (pair.old.plan.tasks, pair.new.plan.tasks) == (None, None)
    pair = pair_of(overrides=("evaluation.task_rows=3",))
    assert [side.plan.tasks and side.plan.tasks.num_rows for side in (pair.old, pair.new)] == [3, 3]


def test_a_manifest_that_says_num_epochs_is_not_contradicted(write_manifest: WriteManifest) -> None:
    path = write_manifest({"training.config.num_epochs": 3.0}, drop=("training.config.epochs",))
    assert pair_of(expert=str(path)).new.plan.schedule.epochs == 1.0


@pytest.mark.parametrize(
    ("asked", "note"),
    [
        ({"max_steps": 5}, "5 steps may end inside an epoch"),
        ({"overrides": ("training.config.max_steps=7",)}, "7 steps may end inside an epoch"),
        ({"overrides": ("training.config.epochs=1.5",)}, "of 1.5 epochs the last is a part"),
    ],
)
def test_a_length_of_the_command_line_holds_for_both_and_is_told(asked: dict[str, Any], note: str) -> None:
    pair = pair_of(**asked)
    assert pair.old.plan.schedule.max_steps == pair.new.plan.schedule.max_steps
    assert pair.old.plan.schedule.epochs == pair.new.plan.schedule.epochs
    (told,) = pair.notes
    assert told.startswith(note)


def test_two_whole_epochs_are_no_note() -> None:
    pair = pair_of(overrides=("training.config.epochs=2",))
    assert find_notes(pair.new.plan.schedule) == []


def test_nobody_trains_twice_to_learn_that_there_is_nothing_to_ask() -> None:
    with pytest.raises(InputError, match="json has no held-out rows to ask"):
        plan_pair(Request(expert="json"), lambda _planned: make_audit(held_out=0))
