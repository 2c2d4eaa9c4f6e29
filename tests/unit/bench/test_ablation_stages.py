"""The stages of an ablation follow the plan, and an ablation reuses only what it measured with the same software."""

from __future__ import annotations

from importlib import metadata
from itertools import pairwise
from pathlib import Path

import pytest

from launcher.bench import ablation
from launcher.bench.ablation import AblationEffort, StageSpec, run_ablation
from launcher.bench.ablation_stages import BASELINE, LoopConfig, list_measurements, list_stages
from launcher.cli.bench import complete
from launcher.core.versions import PACKAGES
from launcher.plan.model import Plan
from launcher.request.request import Request, plan_request

ALL = ["tokenization", "packing", "tf32", "half", "sdpa", "varlen", "optimizer", "loss", "checkpointing"]
ALL += ["batch", "compile", "workers"]


def make_plan(gpu: str | None = "h100", *overrides: str) -> Plan:
    return plan_request(Request(expert="neo4j", gpu=gpu, overrides=overrides, random_weights=True)).plan


def test_all_stages_are_available_on_a_gpu() -> None:
    stages = list_stages(make_plan("h100", "training.config.torch_compile=true"))
    assert [stage.key for stage in stages] == ALL
    assert [stage.key for stage in stages if stage.unavailable] == []


def test_without_a_gpu_unavailable_stages_have_the_plans_reason() -> None:
    reasons = {stage.key: stage.unavailable for stage in list_stages(make_plan(None)) if stage.unavailable}
    assert set(reasons) == {"tf32", "half", "varlen", "batch", "compile", "workers"}
    decision = next(decision for decision in make_plan(None).decisions if decision.name == "precision")
    assert reasons["half"] == f"the plan has FP32: {decision.reason}"


def test_settings_that_the_manifest_keeps_are_unavailable() -> None:
    plan = make_plan("h100", "training.config.packing=false", "training.config.optim=adamw_torch")
    assert {stage.key for stage in list_stages(plan) if stage.unavailable} == {"packing", "optimizer"}


@pytest.mark.parametrize(("precision", "adapter"), [("bf16", "lora"), ("fp8", "lora"), ("fp8", "full")])
def test_only_the_last_stage_is_in_fp8(
    precision: str, adapter: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = make_plan("h100", f"training.config.precision={precision}", f"training.config.adapter_type={adapter}")
    measurements = list_measurements((), in_fp8=plan.precision.uses_fp8)
    in_fp8 = {each.title: each.in_fp8 for each in measurements if not each.unavailable}
    expected = ["the launcher's own loop, in FP8"] if precision == "fp8" else []
    assert [title for title, is_fp8 in in_fp8.items() if is_fp8] == expected
    plans: dict[str, bool] = {}

    def note_plan(_module: str, spec: StageSpec, _folder: Path, name: str) -> None:
        mode, _, key = name.partition("-")
        title = next(each.title for each in measurements if (each.mode, each.key) == (mode, key))
        plans[title] = spec.plan.precision.uses_fp8

    monkeypatch.setattr(ablation, "MeasurementProcess", note_plan)
    monkeypatch.setattr(ablation, "_measure", lambda *_: {"status": "failed"})
    effort = AblationEffort(warmup_steps=1, timed_steps=1, seconds=1, limit_seconds=1)
    run_ablation(plan, tmp_path, measurements, effort, tmp_path, lambda _line: None)
    assert plans == in_fp8


def test_each_stage_changes_one_setting_cumulatively_and_alone() -> None:
    plan = make_plan("h100", "training.config.torch_compile=true")
    measurements = list_measurements(list_stages(plan), in_fp8=False)
    cumulative = [each for each in measurements if each.mode == "cumulative" and each.key != "fp8"]
    alone = {measurement.key: measurement for measurement in measurements if measurement.mode == "alone"}
    assert (cumulative[0].config, cumulative[-1].config) == (BASELINE, None)
    for before, after in pairwise(cumulative[:-1]):
        assert before.config is not None
        assert after.config is not None
        assert (after.key, count_changes(before.config, after.config)) == (after.key, 1)
        own = alone[after.key].config
        assert own is not None
        assert count_changes(BASELINE, own) == 1
    last = cumulative[-2].config
    assert last is not None
    assert (last.rows, last.precision, last.attention, last.is_compiled) == ("packed", "planned", "planned", True)
    assert (last.optimizer, last.loss, last.checkpointing) == (
        plan.optimizer.name,
        plan.loss_kernel,
        plan.checkpointing,
    )
    assert (last.micro_batch_size, last.num_workers) == (plan.batch.micro_batch_size, plan.loader.num_workers)
    assert alone["baseline"].config == BASELINE


def count_changes(config: LoopConfig, other: LoopConfig) -> int:
    left, right = config.model_dump(), other.model_dump()
    return sum(left[key] != right[key] for key in left)


def test_records_are_reused_after_the_data_was_prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before, the plan estimates the mean length of the rows."""
    measured: list[str] = []
    monkeypatch.setattr(ablation, "MeasurementProcess", lambda *arguments: measured.append(arguments[-1]))
    monkeypatch.setattr(ablation, "_measure", lambda *_: {"status": "out of memory"})
    effort = AblationEffort(warmup_steps=1, timed_steps=1, seconds=1, limit_seconds=1)
    before = make_plan("h100")
    prepared = before.data.model_copy(update={"basis": "prepared data", "mean_tokens": before.data.mean_tokens + 1})
    measurements = list_measurements((), in_fp8=False)
    for plan in (before, before.model_copy(update={"data": prepared})):
        run_ablation(plan, tmp_path, measurements, effort, tmp_path, lambda _line: None)
    assert len(measured) == len(set(measured))


def test_unavailable_stages_start_no_process(tmp_path: Path) -> None:
    measurements = [each for each in list_measurements(list_stages(make_plan(None)), in_fp8=False) if each.unavailable]
    effort = AblationEffort(warmup_steps=1, timed_steps=1, seconds=1, limit_seconds=1)
    records = run_ablation(make_plan(None), tmp_path, measurements, effort, tmp_path, lambda _text: None)
    assert {record.status for record in records} == {"unavailable"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_records_are_not_reused_with_another_package_version(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    before, read = ablation._hash_software(), metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.1" if name == package else read(name))
    assert ablation._hash_software() != before


@pytest.mark.parametrize("folder", ["training", "corpus", "plan/estimate", "bench"])
def test_records_are_not_reused_with_other_code(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    before, read = ablation._hash_software(), Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda file: read(file) + (b"#" if f"launcher/{folder}/" in str(file) else b"")
    )
    assert ablation._hash_software() != before


def test_vary_is_the_default_subcommand() -> None:
    assert complete(["bench", "neo4j", "--vary", "a=1,2"]) == ["bench", "vary", "neo4j", "--vary", "a=1,2"]
    assert complete(["bench", "--vary", "a=1,2", "neo4j"])[:2] == ["bench", "vary"]
    for words in (["bench"], ["bench", "ablation"], ["bench", "--help"], ["plan", "sql"]):
        assert complete(words) == words
