"""The ladder follows the plan: what the plan keeps as it was is no rung, and says why."""

from __future__ import annotations

from importlib import metadata
from itertools import pairwise
from pathlib import Path

import pytest

from launcher.bench import ladder
from launcher.bench.ladder import LadderEffort, _has_room, climb_ladder
from launcher.bench.rungs import BEFORE, Setup, make_climbs, make_rungs
from launcher.cli.bench import complete
from launcher.inputs import Request, plan_request
from launcher.plan.model import Plan
from launcher.versions import PACKAGES

ALL = ["tokenised", "packing", "tf32", "half", "sdpa", "varlen", "optimizer", "loss", "checkpointing"]
ALL += ["batch", "compile", "workers"]


def make_plan(gpu: str | None = "h100", *overrides: str) -> Plan:
    return plan_request(Request(expert="neo4j", gpu=gpu, overrides=overrides, random_weights=True)).plan


def test_on_a_gpu_every_rung_is_there() -> None:
    rungs = make_rungs(make_plan())
    assert [rung.key for rung in rungs] == ALL
    assert [rung.key for rung in rungs if rung.missing] == []


def test_without_a_gpu_those_that_need_one_say_so() -> None:
    missing = {rung.key: rung.missing for rung in make_rungs(make_plan(None)) if rung.missing}
    assert set(missing) == {"tf32", "half", "varlen", "batch", "compile", "workers"}
    assert missing["half"] == "the plan has FP32: no GPU: CPUs emulate BF16, about 20 times slower than FP32"


def test_what_the_manifest_keeps_is_no_rung() -> None:
    plan = make_plan("h100", "training.config.packing=false", "training.config.optim=adamw_torch")
    missing = {rung.key for rung in make_rungs(plan) if rung.missing}
    assert missing == {"packing", "optimizer"}


def test_each_rung_stands_on_all_below_it_and_alone() -> None:
    plan = make_plan()
    climbs = make_climbs(make_rungs(plan))
    together = [climb for climb in climbs if climb.stack == "cumulative"]
    alone = {climb.key: climb for climb in climbs if climb.stack == "alone"}
    assert (together[0].setup, together[-1].setup) == (BEFORE, None)
    for before, after in pairwise(together[:-1]):
        assert before.setup is not None
        assert after.setup is not None
        changed = count_changes(before.setup, after.setup)
        assert (after.key, changed) == (after.key, 1)
        own = alone[after.key].setup
        assert own is not None
        assert count_changes(BEFORE, own) == 1
    last = together[-2].setup
    assert last is not None
    assert (last.rows, last.precision, last.attention, last.is_compiled) == ("packed", "planned", "planned", True)
    assert (last.optimizer, last.loss, last.checkpointing) == (
        plan.optimizer.name,
        plan.loss_kernel,
        plan.checkpointing,
    )
    assert (last.micro_batch_size, last.num_workers) == (plan.batch.micro_batch_size, plan.loader.num_workers)
    assert alone["before"].setup == BEFORE


def count_changes(one: Setup, other: Setup) -> int:
    left, right = one.model_dump(), other.model_dump()
    return sum(left[key] != right[key] for key in left)


def test_a_ladder_of_what_is_not_here_starts_nothing(tmp_path: Path) -> None:
    climbs = [climb for climb in make_climbs(make_rungs(make_plan(None))) if climb.missing]
    effort = LadderEffort(warm_steps=1, timed_steps=1, seconds=1, limit_seconds=1)
    records = climb_ladder(make_plan(None), tmp_path, climbs, effort, tmp_path, lambda _text: None)
    assert {record.status for record in records} == {"not here"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_ladder_begins_anew_with_another_version_of_a_package(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    before, read = ladder._find_software(), metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.1" if name == package else read(name))
    assert ladder._find_software() != before


@pytest.mark.parametrize("folder", ["training", "corpus", "memory", "bench"])
def test_a_ladder_begins_anew_with_other_code(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    before, read = ladder._find_software(), Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda file: read(file) + (b"#" if f"launcher/{folder}/" in str(file) else b"")
    )
    assert ladder._find_software() != before


def test_an_expert_may_stand_where_a_part_could() -> None:
    assert complete(["bench", "neo4j", "--vary", "a=1,2"]) == ["bench", "vary", "neo4j", "--vary", "a=1,2"]
    assert complete(["bench", "--vary", "a=1,2", "neo4j"])[:2] == ["bench", "vary"]
    for words in (["bench"], ["bench", "ladder"], ["bench", "memory", "--list"], ["bench", "--help"], ["plan", "sql"]):
        assert complete(words) == words


def test_the_next_rung_starts_ahead_where_a_gpu_computes_and_cores_are_left() -> None:
    plan = make_plan()
    few = plan.model_copy(update={"hardware": plan.hardware.model_copy(update={"cpu_cores_per_node": 4})})
    assert [_has_room(one) for one in (plan, few, make_plan(None))] == [True, False, False]
