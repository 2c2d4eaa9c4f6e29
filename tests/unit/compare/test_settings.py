"""Settings that differ, and only those."""

from __future__ import annotations

import pytest

from launcher.compare.settings import clean_text, config_settings, find_differences, format_setting, plan_settings
from tests.made_runs import MadeRun, make_plan_of

ONE = MadeRun(run_id="one")


def differences(*runs: MadeRun) -> dict[str, tuple[str | None, ...]]:
    found, _ = find_differences([plan_settings(make_plan_of(run), None) for run in runs])
    return {one.key: one.values for one in found}


def test_equal_plans_differ_in_nothing() -> None:
    found, num_equal = find_differences([plan_settings(make_plan_of(ONE), None)] * 2)
    assert found == ()
    assert num_equal > 50


def test_a_manifests_value_comes_first_and_what_follows_from_it_behind() -> None:
    rank = MadeRun(run_id="two", overrides=("training.config.rank=64",))
    found, _ = find_differences([plan_settings(make_plan_of(run), None) for run in (ONE, rank)])
    assert (found[0].section, found[0].key, found[0].values[1]) == ("what is learnt", "adapter.rank", "64")
    assert "adapter.trainable_parameters" in {one.key for one in found if one.section == "how it runs"}
    noisy = ("memory", "speed", "ladder", "decisions", "notes", "hardware.free", "manifest_sha256", "data.folder")
    assert not [one.key for one in found if one.key.startswith(noisy)]


def test_another_card_is_told_by_its_name() -> None:
    assert differences(ONE, MadeRun(run_id="two", gpu="rtx3090"))["hardware.gpu"] == (
        "GeForce RTX 4090",
        "GeForce RTX 3090",
    )


def test_a_part_that_only_one_run_has_differs() -> None:
    quantised = MadeRun(run_id="two", overrides=("base_models.0.quantization=int4",))
    found = differences(ONE, quantised)
    assert found["quantization.kind"] == (None, "int4")


def test_runs_of_wandb_are_not_held_against_ours() -> None:
    ours = plan_settings(make_plan_of(ONE), None)
    theirs = [config_settings({"lr": lr, "model": {"name": "x"}}) for lr in (1e-4, 2e-4)]
    found, _ = find_differences([ours, *theirs])
    assert [(one.section, one.key, one.values) for one in found] == [("W&B config", "lr", (None, "0.0001", "0.0002"))]


def test_secrets_and_half_characters_are_gone() -> None:
    told = config_settings({"api_key": "hunter2hunter2", "url": "https://user:pass@host/", "name": "a\ud800b"})
    assert told == {
        ("W&B config", "api_key"): "***",
        ("W&B config", "url"): "https://***@host/",
        ("W&B config", "name"): "a?b",
    }
    assert clean_text("hf_" + "a" * 30) == "***"


def test_a_tracked_run_of_ours_is_told_once() -> None:
    config = {"rank": 8, "plan": {"batch": {"packed": True}}, "manifest": {}, "decisions": {"a": "b"}}
    assert config_settings(config) == {("W&B config", "rank"): "8"}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "none"),
        (True, "yes"),
        (False, "no"),
        (0.0002, "0.0002"),
        (1e-8, "1e-08"),
        (16, "16"),
        (["q", "v"], "q, v"),
        ([], "none"),
        ({}, "none"),
        ("x" * 400, "x" * 299 + "…"),
    ],
)
def test_values_as_people_read_them(value: object, words: str) -> None:
    assert format_setting(value) == words
