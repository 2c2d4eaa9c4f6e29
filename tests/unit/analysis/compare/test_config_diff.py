"""Settings that differ, and only those."""

from __future__ import annotations

import pytest

from launcher.analysis.compare.config_diff import (
    clean_text,
    collect_plan_settings,
    diff_settings,
    format_setting,
)
from tests.made_runs import MadeRun, make_plan_of

ONE = MadeRun(run_id="one")


def differences(*runs: MadeRun) -> dict[str, tuple[str | None, ...]]:
    found, _ = diff_settings([collect_plan_settings(make_plan_of(run), None) for run in runs])
    return {one.key: one.values for one in found}


def test_equal_plans_have_no_differences() -> None:
    found, num_equal = diff_settings([collect_plan_settings(make_plan_of(ONE), None)] * 2)
    assert found == ()
    assert num_equal > 50


def test_manifest_settings_come_before_derived_ones() -> None:
    rank = MadeRun(run_id="two", overrides=("training.config.rank=64",))
    found, _ = diff_settings([collect_plan_settings(make_plan_of(run), None) for run in (ONE, rank)])
    assert (found[0].section, found[0].key, found[0].values[1]) == ("what is learnt", "adapter.rank", "64")
    learnt = {one.key: one.values for one in found if one.section == "what is learnt"}
    assert all("," in str(count) for count in learnt["adapter.trainable_parameters"])
    assert learnt["adapter.scale"] == ("2", "0.5")  # alpha stays, so the scale changes with the rank
    noisy = (
        "memory",
        "speed",
        "oom_fallbacks",
        "decisions",
        "notes",
        "hardware.free",
        "manifest_sha256",
        "data.folder",
    )
    assert not [one.key for one in found if one.key.startswith(noisy)]


def test_different_gpu_is_shown_by_name() -> None:
    assert differences(ONE, MadeRun(run_id="two", gpu="rtx3090"))["hardware.gpu"] == (
        "GeForce RTX 4090",
        "GeForce RTX 3090",
    )


def test_part_of_only_one_run_differs() -> None:
    quantised = MadeRun(run_id="two", overrides=("base_models.0.quantization=int4",))
    found = differences(ONE, quantised)
    assert found["quantization.kind"] == (None, "int4")


def test_secrets_and_surrogates_are_removed() -> None:
    assert clean_text("hf_" + "a" * 30) == "***"
    assert clean_text("a\ud800b") == "a?b"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "none"),
        (True, "yes"),
        (False, "no"),
        (0.0002, "0.0002"),
        (1e-8, "1e-08"),
        (16, "16"),
        (233_472, "233,472"),
        (["q", "v"], "q, v"),
        ([], "none"),
        ({}, "none"),
        ("x" * 400, "x" * 299 + "…"),
    ],
)
def test_values_are_formatted_for_people(value: object, text: str) -> None:
    assert format_setting(value) == text
