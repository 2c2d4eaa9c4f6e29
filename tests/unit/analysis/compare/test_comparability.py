"""Every warning, and its silence where nothing differs."""

from __future__ import annotations

import fcntl
import math
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.analysis.compare.comparability import collect_cautions, group_by_data
from launcher.analysis.compare.load_run import RunFacts, load_run_facts
from launcher.analysis.compare.model import Caution
from launcher.base_models.catalogue import TINY_BASE_NAME
from launcher.core import metrics
from tests.made_runs import MadeRun, write_run
from tests.unit.analysis.compare.made_facts import TRAITS, make_facts, with_traits


def only(*runs: RunFacts) -> Caution:
    (caution,) = collect_cautions(runs)
    return caution


def test_comparable_runs_have_no_caveat() -> None:
    assert collect_cautions([make_facts("a"), make_facts("b")]) == ()
    assert collect_cautions([make_facts("a")]) == ()


def test_different_data_affects_losses() -> None:
    caution = only(make_facts("a"), with_traits("b", data_key="f" * 64), make_facts("c"))
    assert caution.title == "The runs were trained on different data"
    assert caution.spoils == ("loss", "validation loss")
    assert "A: a, c (data key 0123456789ab); B: b (data key ffffffffffff)" in caution.detail
    assert "Speed and memory are still comparable" in caution.detail


def test_smoke_runs_are_noted() -> None:
    caution = only(with_traits("a", base=TINY_BASE_NAME), with_traits("b", base=TINY_BASE_NAME))
    assert (caution.level, caution.title, caution.spoils) == ("note", "Smoke runs", ())
    assert caution.detail.startswith("a, b. A tiny base model on a small sample")


def test_groups_are_letters_in_order() -> None:
    keys = ["x", "y", None, "x"]
    assert group_by_data([with_traits(str(at), data_key=key) for at, key in enumerate(keys)]) == ("A", "B", None, "A")
    many = group_by_data([with_traits(str(at), data_key=str(at)) for at in range(28)])
    assert many[24:] == ("Y", "Z", "AA", "AB")


@pytest.mark.parametrize(
    ("trait", "value", "title", "spoils", "words"),
    [
        ("global_batch_size", 1024, "The global batch differs", ("loss by step",), "32: a; 1,024: b"),
        ("sequence_length", 4096, "The sequence length differs", ("loss", "speed", "memory"), "2,048: a; 4,096: b"),
        (
            "base",
            "tiny",
            "The runs have different base models",
            ("loss", "validation loss", "speed", "memory"),
            "tiny: b",
        ),
        (
            "loss_on",
            "all",
            "The loss is computed on different tokens",
            ("loss", "validation loss"),
            "completion: a; all: b",
        ),
        ("held_out", "none", "The validation rows differ", ("validation loss",), "validation.jsonl: a; none: b"),
        ("precision", "fp16", "The precision differs", ("speed", "memory"), "bf16: a; fp16: b"),
        ("seed", 7, "The seed differs", (), "42: a; 7: b. Runs with equal settings differ by chance"),
        ("hardware", "CPU", "The hardware differs", ("speed", "time"), "CPU: b"),
        (
            "random_weights",
            True,
            "Trained from random weights",
            ("loss", "validation loss"),
            "b. The base model has random",
        ),
        (
            "data_key",
            None,
            "The training data of some runs are unknown",
            ("loss", "validation loss"),
            "b: no",
        ),
    ],
)
def test_each_difference_gives_a_caveat(
    trait: str, value: object, title: str, spoils: tuple[str, ...], words: str
) -> None:
    caution = only(make_facts("a"), with_traits("b", **{trait: value}))
    assert caution.title == title
    assert caution.spoils == spoils
    assert words in caution.detail


def test_unknown_values_give_no_caveat() -> None:
    unknown = replace(TRAITS, global_batch_size=None, sequence_length=None, base=None, precision=None, hardware=None)
    assert collect_cautions([make_facts("a"), make_facts("b", traits=unknown)]) == ()


def test_speeds_of_short_runs_are_not_compared() -> None:
    caution = only(make_facts("a"), make_facts("b", steps_done=3, num_steps=40))
    assert caution.title == "Too few steps to compare speeds"
    assert caution.spoils == ("speed", "time")
    assert caution.detail.startswith("b (3 steps). ")


@pytest.mark.parametrize(
    ("metric", "title", "spoils"),
    [
        (metrics.TRAIN_LOSS, "The training loss at the end is not a number", ("loss",)),
        (metrics.EVAL_LOSS, "The validation loss at the end is not a number", ("loss", "validation loss")),
    ],
)
def test_runs_that_diverged_are_listed(metric: str, title: str, spoils: tuple[str, ...]) -> None:
    caution = only(make_facts("a", {metric: [2.0, 1.0]}), make_facts("b", {metric: [2.0, 1.0, math.nan, math.nan]}))
    assert (caution.title, caution.spoils) == (title, spoils)
    assert caution.detail.startswith("b (the last finite one at step 2). ")
    assert "c (never finite)" in only(make_facts("c", {metric: [math.nan]})).detail


def test_unfinished_runs_are_listed_with_their_step() -> None:
    running = make_facts("b", status="running", steps_done=40, num_steps=1200)
    caution = only(make_facts("a", num_steps=1200), running)
    assert caution.title == "Not finished"
    assert "b (running, step 40 of 1,200)" in caution.detail
    assert "c (not started)" in only(make_facts("c", {}, status="not started")).detail


def test_different_planned_steps_affect_loss_by_step() -> None:
    caution = only(make_facts("a"), make_facts("b", num_steps=9))
    assert caution.title == "The number of planned steps differs"
    assert caution.spoils == ("loss by step", "time")
    assert "40 steps: a; 9 steps: b" in caution.detail


def test_oom_fallbacks_are_listed() -> None:
    caution = only(make_facts("a", oom_fallbacks=("micro-batch 2", "full checkpointing")))
    assert caution.title == "CUDA out of memory during the run"
    assert "a (micro-batch 2, then full checkpointing)" in caution.detail


def test_estimated_clock_is_a_note() -> None:
    caution = only(make_facts("a", {metrics.STEP_SECONDS: [1.0]}))
    assert (caution.level, caution.title) == ("note", "The wall-clock axis is estimated")
    assert collect_cautions([make_facts("a", {metrics.STEP_SECONDS: [1.0], metrics.TOTAL_SECONDS: [1.0]})]) == ()


def test_warnings_come_before_notes_and_long_lists_are_cut() -> None:
    runs = [
        with_traits(f"run{at}", hardware="CPU" if at else "GPU", global_batch_size=8 if at else 16) for at in range(9)
    ]
    cautions = collect_cautions(runs)
    assert [caution.level for caution in cautions] == ["warning", "note"]
    assert "8: run1, run2, run3, run4 and 4 more" in cautions[0].detail


def test_killed_run_is_not_shown_as_running(tmp_path: Path) -> None:
    paths = write_run(tmp_path, MadeRun(run_id="r", num_steps=20, status="running"))
    assert load_run_facts(paths).status == "killed or elsewhere"
    with (paths.root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert load_run_facts(paths).status == "running"
