"""Checks of a run by its metrics: each fault is reported with a next step; a healthy run has no issues."""

from __future__ import annotations

import math
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.analysis.doctor.findings import Finding
from launcher.analysis.doctor.run_doctor import check_run
from launcher.analysis.doctor.run_helpers import (
    find_period,
    prepare_command,
    select_warm_steps,
    suggest_longer_interval,
    train_command,
)
from launcher.analysis.doctor.speed_checks import Speed, check_speed, compare_speed
from launcher.core import metrics
from launcher.plan import Plan
from launcher.request.request import Request, format_request, plan_request
from launcher.runs.record import Attempt, RunRecord
from tests.conftest import ROOT
from tests.unit.analysis.doctor.builders import (
    Change,
    Values,
    list_issues,
    make_facts,
    make_record,
    make_steps,
    only,
    plan_for,
)

H200 = plan_for()
COMPILED = plan_for(overrides=("training.config.torch_compile=true",))
GPU_GIB = 143771 / 1024


def judge(change: Change | None = None, plan: Plan = H200, speed: float = 1.0, **outcome: Any) -> list[Finding]:
    return check_run(make_facts(make_record(plan, make_steps(plan, change=change, speed=speed), **outcome)))


@pytest.mark.parametrize("plan", [H200, plan_for("rtx4090"), plan_for("h100", 8), plan_for(None)])
@pytest.mark.parametrize("num_steps", [6, 12, 60, 400])
def test_healthy_run_has_no_issues(plan: Plan, num_steps: int) -> None:
    findings = check_run(make_facts(make_record(plan, make_steps(plan, num_steps))))
    assert list_issues(findings) == []
    assert findings[0].found.startswith(f"healthy: {num_steps:,} steps, ")
    assert "loss 2.4" in findings[0].found


def test_run_with_noisy_step_times_is_healthy() -> None:
    """Step times between 0.18 and 0.58 s, as measured on two cores shared with other processes."""
    seconds = [0.225, 0.241, 0.575, 0.501, 0.389, 0.318, 0.201, 0.545, 0.410, 0.179, 0.264, 0.237]

    def noisy(step: int) -> Values:
        took = seconds[step % len(seconds)]
        return {metrics.STEP_SECONDS: took, metrics.TOKENS_PER_SECOND: 430 / took, metrics.DATA_WAIT_SHARE: 0.006}

    plan = plan_for(None)
    for count in (12, 16, 60):
        assert list_issues(check_run(make_facts(make_record(plan, make_steps(plan, count, noisy))))) == []


@pytest.mark.parametrize(
    ("ratio", "error", "word"),
    [
        (1.06, 0.2, "excellent"),
        (1.04, 0.2, "good"),
        (0.91, 0.2, "good"),
        (0.89, 0.2, "acceptable"),
        (0.81, 0.2, "acceptable"),
        (0.79, 0.2, "problem"),
        (0.79, 0.4, "acceptable"),
        (0.59, 0.4, "problem"),
    ],
)
def test_speed_is_graded(ratio: float, error: float, word: str) -> None:
    speed = H200.speed.model_copy(update={"error": error})
    graded = compare(H200.model_copy(update={"speed": speed}), ratio)
    assert graded is not None
    assert graded.grade == word


def compare(plan: Plan, ratio: float = 1.0, **outcome: Any) -> Speed | None:
    record = make_record(plan, make_steps(plan, speed=ratio), **outcome)
    return compare_speed(record, select_warm_steps(record))


def test_error_of_the_speed_estimate_comes_from_the_plan() -> None:
    def error(plan: Plan, **outcome: Any) -> float:
        speed = compare(plan, **outcome)
        assert speed is not None
        return speed.error

    assert error(H200) == 0.2
    assert error(plan_for("rtx4090")) == 0.4
    assert error(H200, oom_fallbacks=("micro-batch 8",)) == 0.6
    assert error(plan_for(overrides=("training.config.packing=false",))) == 0.6
    unstated = H200.speed.model_copy(update={"error": None})
    assert error(H200.model_copy(update={"speed": unstated})) == 0.6, "a plan of an older version states none"
    assert compare(plan_for(None)) is None


def test_slow_run_without_visible_cause_is_a_problem() -> None:
    finding = only(judge(speed=0.6))
    assert finding.subject == "speed"
    assert finding.found.startswith("problem: ")
    assert "60 % of the" in finding.found
    assert "off by 20 %, which does not explain this" in finding.matters
    assert finding.next_step.startswith("run launcher doctor: its micro-test")


def test_first_steps_are_ignored() -> None:
    def cold(step: int) -> Values:
        return {metrics.TOKENS_PER_SECOND: 1.0, metrics.DATA_WAIT_SHARE: 0.9} if step <= 5 or 61 <= step <= 65 else {}

    attempts = (Attempt(started_at="a"), Attempt(started_at="b", from_step=60, ended_at="c"))
    assert [finding.subject for finding in list_issues(judge(cold, attempts=attempts))] == ["restarts"]


def test_waiting_for_data_is_a_problem() -> None:
    finding = only(judge(lambda _step: {metrics.DATA_WAIT_SHARE: 0.31}, plan=plan_for("rtx4090")))
    assert (finding.subject, finding.status) == ("data", "problem")
    assert finding.found == "31.0 % of the step time waits for data, in every step; 2 loader workers, 8 cores"
    assert finding.next_step.startswith("launcher train neo4j --set training.config.dataloader_num_workers=4; ")
    assert "launcher data --move-to DIR" in finding.next_step


def test_short_wait_for_data_is_a_note_or_ok() -> None:
    assert only(judge(lambda _step: {metrics.DATA_WAIT_SHARE: 0.07})).status == "note"
    assert list_issues(judge(lambda _step: {metrics.DATA_WAIT_SHARE: 0.03})) == []


def test_occasional_wait_for_data_is_reported_with_its_frequency() -> None:
    finding = only(judge(lambda step: {metrics.DATA_WAIT_SHARE: 0.6 if step % 4 == 0 else 0.0}))
    assert (finding.subject, finding.status) == ("data", "problem")
    assert "in 29 of 115 steps" in finding.found


def test_host_wait_is_used_if_device_wait_is_missing() -> None:
    """On a GPU the host may wait while the device computes, so the threshold is higher than on a CPU."""

    def waits(plan: Plan, share: float) -> list[Finding]:
        rows = make_steps(plan)
        for row in rows:
            del row.values[metrics.DATA_WAIT_SHARE]
            row.values[metrics.DATA_WAIT_SECONDS] = share * row.values[metrics.STEP_SECONDS]
        return [one for one in check_speed(make_record(plan, rows)) if one.status != "ok"]

    assert waits(H200, 0.12) == []
    assert only(waits(H200, 0.3)).status == "problem"
    assert only(waits(plan_for(None), 0.12)).status == "problem"


def test_more_cores_are_suggested_if_none_is_free() -> None:
    hardware = H200.hardware.model_copy(update={"cpu_cores_per_node": 3})
    plan = H200.model_copy(update={"hardware": hardware})
    finding = only(judge(lambda _step: {metrics.DATA_WAIT_SHARE: 0.31}, plan=plan))
    assert finding.next_step.startswith("no core is free for more workers: use more cores")


def test_memory_pressure_names_the_next_oom_fallback() -> None:
    plan = plan_for("rtx4090")
    finding = only(judge(lambda step: {metrics.ALLOC_RETRIES: float(step)}, plan=plan))
    assert (finding.subject, finding.status) == ("memory pressure", "problem")
    assert "114 of 115 steps had to empty the allocator cache" in finding.found
    assert f"next OOM fallback: {plan.oom_fallbacks[0].action} (" in finding.next_step
    once = only(judge(lambda step: {metrics.ALLOC_RETRIES: float(step > 50)}, plan=plan))
    assert once.status == "note"


def test_oom_fallback_with_a_setting_is_suggested() -> None:
    plan = plan_for("rtx4090")
    full = next(fallback for fallback in plan.oom_fallbacks if "checkpointing: full" in fallback.action)
    same = full.model_copy(update={"strategy": plan.strategy})
    lower = plan.model_copy(update={"oom_fallbacks": (same,)})
    finding = only(judge(lambda step: {metrics.ALLOC_RETRIES: float(step)}, plan=lower))
    assert "--set training.config.gradient_checkpointing=true" in finding.next_step
    without = plan.model_copy(update={"oom_fallbacks": ()})
    finding = only(judge(lambda step: {metrics.ALLOC_RETRIES: float(step)}, plan=without))
    assert "no OOM fallback is left" in finding.next_step


def test_spill_into_host_memory_is_a_problem() -> None:
    finding = only(judge(lambda _step: {metrics.PEAK_RESERVED_GIB: GPU_GIB + 3}))
    assert (finding.subject, finding.status) == ("spill", "problem")
    assert "more than the GPU has" in finding.found
    assert "Sysmem Fallback Policy" in finding.next_step


def test_speed_drop_on_a_full_gpu_is_reported_as_spill() -> None:
    rate = H200.speed.tokens_per_second or 0.0

    def collapse(step: int) -> Values:
        return {metrics.PEAK_RESERVED_GIB: 0.99 * GPU_GIB, metrics.TOKENS_PER_SECOND: rate * (1 if step < 60 else 0.2)}

    assert "spill" in {finding.subject for finding in list_issues(judge(collapse))}
    assert list_issues(judge(lambda _step: {metrics.PEAK_RESERVED_GIB: 0.99 * GPU_GIB})) == []


@pytest.mark.parametrize(("error", "status"), [(0.05, "note"), (-0.05, "note"), (-0.2, "problem"), (0.02, None)])
def test_prediction_error_above_three_percent_is_reported(error: float, status: str | None) -> None:
    findings = list_issues(judge(lambda _step: {metrics.PREDICTION_ERROR: error}))
    assert [(one.subject, one.status) for one in findings] == ([("prediction", status)] if status else [])


def test_prediction_finding_names_the_direction() -> None:
    assert "too low" in only(judge(lambda _step: {metrics.PREDICTION_ERROR: -0.05})).found
    assert "too high" in only(judge(lambda _step: {metrics.PREDICTION_ERROR: 0.05})).found


def small_steps(plan: Plan, **changes: object) -> Plan:
    batch = plan.batch.model_copy(update={"micro_batch_size": 1})
    return plan.model_copy(update={"batch": batch, **changes})


def test_slow_launch_bound_run_is_a_problem() -> None:
    plan = small_steps(H200, compile=None)
    finding = next(
        one
        for one in judge(lambda _step: {metrics.GPU_UTILIZATION: 0.45}, plan=plan, speed=0.5)
        if one.subject != "speed" and one.status != "ok"
    )
    assert (finding.subject, finding.status) == ("launch-bound", "problem")
    assert finding.found == "GPU utilization is 45.0 % with micro-batches of 2,048 tokens"
    assert finding.next_step == "launcher train neo4j --set training.config.torch_compile=true"


def test_launch_bound_run_at_planned_speed_is_a_note() -> None:
    finding = only(judge(lambda _step: {metrics.GPU_UTILIZATION: 0.45}, plan=small_steps(COMPILED)))
    assert (finding.subject, finding.status) == ("launch-bound", "note")
    assert "larger micro-batches" in finding.next_step


def test_idle_gpu_with_large_steps_is_reported() -> None:
    finding = only(judge(lambda _step: {metrics.GPU_UTILIZATION: 0.45}))
    assert finding.subject == "idle GPU"
    assert "though it does not wait for data" in finding.found


def test_gpu_that_waits_for_data_is_not_launch_bound() -> None:
    finding = only(judge(lambda _step: {metrics.GPU_UTILIZATION: 0.45, metrics.DATA_WAIT_SHARE: 0.5}))
    assert finding.subject == "data"


def compiled(graphs: int, more: int) -> dict[str, Any]:
    return {"compiled_graphs": graphs, "recompiled_graphs": more}


def test_frequent_recompilation_is_a_problem() -> None:
    finding = only(judge(**compiled(2, 9)))
    assert (finding.subject, finding.status) == ("recompilation", "problem")
    assert finding.found == "9 graphs were compiled during training, 4 are usual"
    assert finding.next_step.endswith("--set training.config.torch_compile=false")
    assert list_issues(judge(**compiled(2, 2))) == []
    unpacked = plan_for(overrides=("training.config.packing=false",))
    assert list_issues(judge(plan=unpacked, **compiled(2, 9))) == []
    assert list_issues(judge(recompiled_graphs=9)) == [], "no graphs were compiled ahead to compare with"


def test_slow_single_steps_are_reported() -> None:
    rate = COMPILED.speed.tokens_per_second or 0.0
    rows = make_steps(COMPILED)
    usual = rows[50].values[metrics.STEP_SECONDS]

    def spike(step: int) -> Values:
        slow = step in (31, 47, 48, 90)
        return {metrics.STEP_SECONDS: usual * 9, metrics.TOKENS_PER_SECOND: rate / 9} if slow else {}

    finding = only(judge(spike, COMPILED))
    assert (finding.subject, finding.status) == ("slow steps", "problem")
    assert finding.found.startswith("4 steps took more than 3 times as long as usual (steps 31, 47, 48, 90): ")
    assert "recompilation" in finding.matters


def slow_every(plan: Plan, period: int, times: float) -> Change:
    usual = make_steps(plan)[50].values

    def change(step: int) -> Values:
        if step % period:
            return {}
        rate, seconds = usual[metrics.TOKENS_PER_SECOND] / times, usual[metrics.STEP_SECONDS] * times
        return {metrics.STEP_SECONDS: seconds, metrics.TOKENS_PER_SECOND: rate}

    return change


@pytest.mark.parametrize("period", [2, 3, 10])
def test_periodic_slow_steps_are_reported(period: int) -> None:
    findings = {one.subject: one for one in list_issues(judge(slow_every(H200, period, 3.0)))}
    finding = findings["slow steps"]
    assert finding.status == "problem"
    assert finding.found.startswith(f"every {period} steps, one is slow (steps ")
    assert "nothing in the plan has this interval" in finding.matters


def test_periodic_slow_steps_are_explained_by_the_plan() -> None:
    def explain(**schedule: object) -> Finding:
        plan = H200.model_copy(update={"schedule": H200.schedule.model_copy(update=schedule)})
        return next(one for one in judge(slow_every(plan, 20, 3.0), plan=plan) if one.subject == "slow steps")

    assert explain(save_every_steps=20).matters == "checkpoints are saved at this interval"
    assert "--set training.config.save_steps=80" in explain(save_every_steps=20).next_step
    assert explain(evaluate_every_steps=20).matters == "evaluations run at this interval"
    assert "--set training.config.eval_steps=80" in explain(evaluate_every_steps=20).next_step


@pytest.mark.parametrize(("num_steps", "has_advice"), [(60, False), (79, False), (80, True)])
def test_short_runs_are_not_advised_to_evaluate_less_often(num_steps: int, has_advice: bool) -> None:
    schedule = H200.schedule.model_copy(update={"evaluate_every_steps": 20, "load_best_model_at_end": False})
    plan = H200.model_copy(update={"schedule": schedule})
    record = make_record(plan, make_steps(plan, num_steps), num_steps=num_steps)
    advice = suggest_longer_interval(record, "eval")
    assert ("--set training.config.eval_steps=80" in advice) == has_advice
    assert (f"nothing to change: this run has only {num_steps} steps" in advice) != has_advice


def test_longer_steps_with_more_tokens_are_not_slow() -> None:
    usual = make_steps(H200)[50].values[metrics.STEP_SECONDS]
    findings = judge(lambda step: {metrics.STEP_SECONDS: usual * (3 if step % 10 == 0 else 1)})
    assert list_issues(findings) == []


@pytest.mark.parametrize(
    ("slow", "period"),
    [
        (range(4, 100, 4), 4),
        (range(1, 100, 2), 2),
        ([4, 8, 12, 16], None),
        ([3, 9, 22, 31, 55, 71], None),
        (range(20, 80), None),
        ([], None),
    ],
)
def test_period_of_slow_steps_is_found(slow: list[int], period: int | None) -> None:
    assert find_period(range(1, 101), set(slow)) == period


def test_suggestion_for_running_run_resumes_it() -> None:
    record = make_record(H200, make_steps(H200, change=lambda _step: {metrics.DATA_WAIT_SHARE: 0.31}), status="running")
    facts = replace(make_facts(record), is_trained=True)
    finding = next(one for one in check_run(facts) if one.subject == "data")
    assert finding.next_step.startswith("stop it, which saves a checkpoint; then launcher train --resume made --set ")


def test_steps_of_an_earlier_attempt_are_ignored() -> None:
    attempts = (Attempt(started_at="a", ended_at="b"), Attempt(started_at="c", from_step=60))
    findings = judge(lambda step: {metrics.DATA_WAIT_SHARE: 0.5 if step <= 60 else 0.0}, attempts=attempts)
    assert [one.subject for one in list_issues(findings)] == ["restarts"]


def test_long_run_is_checked_within_seconds() -> None:
    rows = make_steps(H200, 30_000, slow_every(H200, 250, 40.0))
    began = time.monotonic()
    findings = check_run(make_facts(make_record(H200, rows)))
    assert time.monotonic() - began < 60
    assert only(findings).found.startswith("every 250 steps, one is slow (steps 28250, 28500, 28750, 29000, …)")


def test_hot_gpu_is_reported_as_throttling() -> None:
    rate = H200.speed.tokens_per_second or 0.0

    def slows(heat: float) -> Change:
        return lambda step: {metrics.TOKENS_PER_SECOND: rate * (1.2 - step / 300), metrics.GPU_TEMPERATURE: heat}

    assert list_issues(judge(slows(88.0), plan=plan_for(None))) == [], "a CPU is shared, so its speed varies"
    short = make_steps(H200, 30, lambda step: {metrics.TOKENS_PER_SECOND: rate * (1.2 - step / 60)})
    assert list_issues(check_run(make_facts(make_record(H200, short)))) == [], "too few steps for a trend"
    hot = only(judge(slows(88.0)))
    assert (hot.subject, hot.status) == ("throttling", "problem")
    assert "at 88 °C" in hot.found
    assert only(judge(slows(60.0))).subject == "slowing down"


def test_slow_links_measured_at_the_start_are_reported() -> None:
    plan = plan_for("h100", 8)
    slow = "the ranks reach each other at 3.1 GB/s, and the plan counts on 315: steps will take longer than it says"
    finding = only(judge(plan=plan, slow_links=slow))
    assert (finding.subject, finding.status, finding.found) == ("communication", "problem", slow)
    assert "NCCL_DEBUG=INFO" in finding.next_step
    fewer = plan.model_copy(update={"speed": plan.speed.model_copy(update={"fewer_gpus_note": "4 GPUs are faster"})})
    assert only(judge(plan=fewer, slow_links=slow)).next_step == "4 GPUs are faster"


def test_busy_gpus_with_low_mfu_wait_for_communication() -> None:
    plan = plan_for("h100", 8, 4)
    findings = {one.subject: one for one in list_issues(judge(plan=plan, speed=0.4))}
    assert findings.keys() == {"speed", "communication"}
    assert findings["speed"].next_step == "fix these findings first: communication"
    assert "ranks wait for each other" in findings["communication"].matters
    assert "communication" not in {one.subject for one in list_issues(judge(speed=0.4))}, "one GPU has no links"


def test_planned_communication_time_is_not_a_problem() -> None:
    plan = plan_for("h100", 8)
    plan = plan.model_copy(update={"speed": plan.speed.model_copy(update={"communication_fraction": 0.5})})
    assert list_issues(judge(plan=plan)) == []
    findings = {one.subject: one for one in list_issues(judge(plan=plan, speed=0.4))}
    assert findings["communication"].found == "communication takes more than the planned 50.0 % of a step"


def test_zero2_is_suggested_for_sharded_runs() -> None:
    plan = plan_for("h100", 8).model_copy(update={"strategy": "fsdp2"})
    findings = {one.subject: one for one in list_issues(judge(plan=plan, speed=0.4))}
    assert findings["communication"].next_step.startswith("--strategy zero2, if memory allows")


def test_only_large_spikes_on_cpu_are_a_note() -> None:
    plan = plan_for(None)
    usual = make_steps(plan)[50].values

    def spikes(times: float) -> Change:
        slow = {metrics.STEP_SECONDS: usual[metrics.STEP_SECONDS] * times, metrics.TOKENS_PER_SECOND: 1.0}
        return lambda step: slow if step in (31, 47, 48, 90) else {}

    assert list_issues(judge(spikes(9.0), plan=plan)) == []
    finding = only(judge(spikes(40.0), plan=plan))
    assert (finding.subject, finding.status) == ("slow steps", "note")
    assert "other programs" in finding.matters


def test_skipped_steps_are_a_problem() -> None:
    finding = only(judge(lambda step: {metrics.SKIPPED: 1.0} if step in (9, 10, 33) else {}))
    assert (finding.subject, finding.status) == ("unstable loss", "problem")
    assert "3 of 120 steps were skipped (steps 9, 10, 33)" in finding.found
    assert "--set training.config.learning_rate=0.0001" in finding.next_step
    assert only(judge(lambda step: {metrics.TRAIN_LOSS: math.nan} if step == 40 else {})).status == "note"


def test_steps_skipped_by_loss_scaling_are_fine() -> None:
    scaled = H200.precision.model_copy(update={"loss_scaling": True})
    plan = H200.model_copy(update={"precision": scaled})
    assert list_issues(judge(lambda step: {metrics.SKIPPED: float(step < 8)}, plan=plan)) == []


def test_longer_warmup_is_suggested_if_there_is_none() -> None:
    schedule = H200.schedule.model_copy(update={"warmup_ratio": None, "warmup_steps": 0})
    plan = H200.model_copy(update={"schedule": schedule})
    finding = only(judge(lambda step: {metrics.SKIPPED: float(step > 100)}, plan=plan))
    assert "--set training.config.warmup_ratio=0.05" in finding.next_step


def test_loss_spikes_are_reported() -> None:
    finding = only(judge(lambda step: {metrics.TRAIN_LOSS: 7.0} if step in (50, 51, 80) else {}))
    assert (finding.subject, finding.status) == ("unstable loss", "problem")
    assert finding.found == "the loss spiked 3 times (steps 50, 51, 80)"
    assert (
        only(judge(lambda step: {metrics.TRAIN_LOSS: 7.0} if step == 50 else {})).found == "the loss spiked at step 50"
    )


def test_rising_loss_is_a_problem() -> None:
    finding = only(judge(lambda step: {metrics.TRAIN_LOSS: 2.0 - step / 80 if step < 60 else 1.25 + (step - 60) / 80}))
    assert finding.status == "problem"
    assert finding.found.startswith("it rises: ")
    assert "--set training.config.learning_rate=0.0001" in finding.next_step


def test_short_run_with_rising_loss_is_not_healthy() -> None:
    rows = make_steps(H200, 12, lambda step: {metrics.TRAIN_LOSS: 1.0 + step / 10})
    finding = only(list_issues(check_run(make_facts(make_record(H200, rows)))))
    assert (finding.subject, finding.status) == ("loss", "note")
    assert finding.found.startswith("it rises: 1.2")


def test_validation_loss_that_rises_from_the_start_is_reported() -> None:
    record = make_record(H200, make_steps(H200))
    (held_out,) = record.evaluations
    evaluations = [replace(held_out, values={metrics.EVAL_LOSS: loss}) for loss in (1.2, 1.4)]
    finding = only(list_issues(check_run(make_facts(replace(record, rows=(*record.steps, *evaluations))))))
    assert "the validation loss was 1.200 at its best and is 1.400 now" in finding.found


@pytest.mark.parametrize("losses", [(math.nan,), (1.2, math.nan)])
def test_validation_loss_that_is_not_a_number_is_a_problem(losses: tuple[float, ...]) -> None:
    record = make_record(H200, make_steps(H200))
    (held_out,) = record.evaluations
    evaluations = [replace(held_out, values={metrics.EVAL_LOSS: loss}) for loss in losses]
    finding = only(list_issues(check_run(make_facts(replace(record, rows=(*record.steps, *evaluations))))))
    assert (finding.subject, finding.status) == ("unstable loss", "problem")
    assert f"the validation loss after step {held_out.step:,} is not a number" in finding.found


def test_constant_loss_is_reported() -> None:
    finding = only(judge(lambda step: {metrics.TRAIN_LOSS: 2.0 + 0.001 * (step % 3)}))
    assert (finding.subject, finding.status) == ("loss", "note")
    rows = make_steps(H200, 300, lambda step: {metrics.TRAIN_LOSS: 2.0 + 0.001 * (step % 3)})
    finding = only(check_run(make_facts(make_record(H200, rows))))
    assert finding.status == "problem"
    assert "--set training.config.learning_rate=0.0004" in finding.next_step


def test_missing_eval_loss_is_a_note() -> None:
    record = make_record(H200, make_steps(H200))
    finding = only(check_run(make_facts(replace(record, rows=record.steps))))
    assert (finding.subject, finding.status) == ("quality", "note")
    assert "unknown" in finding.found
    short = make_record(H200, make_steps(H200, 40))
    assert list_issues(check_run(make_facts(replace(short, rows=short.steps)))) == []


def test_overfitting_is_reported_unless_the_best_model_is_kept() -> None:
    def judge_with(*, keeps_best: bool) -> list[Finding]:
        schedule = H200.schedule.model_copy(update={"load_best_model_at_end": keeps_best})
        record = make_record(H200.model_copy(update={"schedule": schedule}), make_steps(H200))
        (held_out,) = record.evaluations
        evaluations = [replace(held_out, values={metrics.EVAL_LOSS: loss}) for loss in (1.5, 1.2, 1.4)]
        return list_issues(check_run(make_facts(replace(record, rows=(*record.steps, *evaluations)))))

    assert judge_with(keeps_best=True) == []
    assert "1.200 at its best and is 1.400 now" in only(judge_with(keeps_best=False)).found


GOODPUT = {
    metrics.GOODPUT: 0.42,
    metrics.TOTAL_SECONDS: 7200.0,
    metrics.START_SECONDS: 100.0,
    metrics.CHECKPOINT_SECONDS: 3600.0,
}


def test_low_goodput_names_where_the_time_went() -> None:
    finding = only(judge(goodput=GOODPUT))
    assert (finding.subject, finding.status) == ("goodput", "problem")
    assert finding.found == "42.0 % of 2.0 h was productive training; most of the rest was lost to checkpoints: 60 min"
    assert "--set training.config.save_strategy=epoch --set training.config.save_epochs=4 " in finding.next_step
    assert only(judge(goodput={**GOODPUT, metrics.GOODPUT: 0.7})).status == "note"
    assert list_issues(judge(goodput={**GOODPUT, metrics.GOODPUT: 0.9})) == []
    assert list_issues(judge(goodput={**GOODPUT, metrics.TOTAL_SECONDS: 300.0})) == [], "a short run is mostly start"


def test_restarts_and_oom_fallbacks_are_notes() -> None:
    attempts = (Attempt(started_at="a"), Attempt(started_at="b", from_step=40, ended_at="c"))
    finding = only(judge(attempts=attempts))
    assert (finding.subject, finding.status) == ("restarts", "note")
    assert finding.found == "2 starts, 1 of them killed"
    finding = only(judge(oom_fallbacks=("micro-batch 8",)))
    assert (finding.subject, finding.status) == ("out of memory", "note")
    assert "1 OOM fallbacks used: micro-batch 8; next: " in finding.found


def running(record: RunRecord, **facts: Any) -> Finding:
    assert record.outcome is not None
    live = replace(record, outcome=record.outcome.model_copy(update={"status": "running", "num_steps": 1000}))
    values = {"is_trained": True, **facts}
    return next(one for one in check_run(replace(make_facts(live), **values)) if one.subject == "status")


def test_status_of_running_run() -> None:
    record = make_record(H200, make_steps(H200))
    assert running(record).found.startswith("running, 120 of 1,000 steps, about ")
    assert running(record, is_trained=None).status == "ok", "without file locks the status is unknown"
    fresh = running(record, is_trained=False)
    assert (fresh.status, fresh.next_step) == ("note", "check again in a minute")
    dead = running(record, is_trained=False, idle_seconds=90.0)
    assert (dead.status, dead.next_step) == ("problem", "launcher train --resume made")
    stuck = running(record, idle_seconds=1800.0)
    assert stuck.status == "problem"
    assert "no step for 30 min, after 120 of 1,000 steps" in stuck.found
    assert "py-spy dump --pid 1" in stuck.next_step


def test_late_first_step_is_a_problem() -> None:
    record = make_record(H200, [])
    assert running(record, idle_seconds=None, age_seconds=60.0).found == "starting"
    late = running(record, idle_seconds=None, age_seconds=7200.0)
    assert (late.status, late.found) == ("problem", "started 2.0 h ago, without a step")


@pytest.mark.parametrize(
    ("status", "expected"), [("failed", "problem"), ("crashed", "problem"), ("stopped", "note"), ("done", None)]
)
def test_end_of_run_is_reported(status: str, expected: str | None) -> None:
    findings = list_issues(judge(status=status, error="the loss is nan\nhint: lower the rate" if expected else ""))
    assert [one.status for one in findings] == ([expected] if expected else [])
    if expected == "problem":
        assert findings[0].found == f"{status} after 120 of 120 steps: the loss is nan hint: lower the rate"
        assert findings[0].next_step == "launcher train --resume made"


def test_planned_run_is_reported_as_never_started() -> None:
    record = replace(make_record(H200, []), outcome=None, rows=())
    finding = only(check_run(make_facts(record)))
    assert finding.found == "planned, but never started"


def test_resume_command_names_another_runs_dir() -> None:
    record = make_record(H200, make_steps(H200), root=Path("some where/r1"), status="stopped")
    assert only(check_run(make_facts(record))).next_step == "launcher train --resume r1 --runs-dir 'some where'"


def test_suggested_command_has_all_flags_of_the_run(tmp_path: Path) -> None:
    record = make_record(H200, make_steps(H200), tmp_path)
    overrides = ("training.config.rank=4", "training.config.learning_rate=0.001")
    request = Request(expert="my experts/manifest.json", overrides=overrides, max_steps=9)
    record.paths.request.write_text(format_request(request))
    command = train_command(record, "training.config.learning_rate=0.0005")
    assert command == (
        "launcher train 'my experts/manifest.json' --set training.config.rank=4 "
        "--set training.config.learning_rate=0.0005 --max-steps 9"
    )
    assert prepare_command(record) == "launcher prepare 'my experts/manifest.json'"


def test_too_few_steps_are_not_judged() -> None:
    record = make_record(H200, make_steps(H200, 6, lambda _step: {metrics.DATA_WAIT_SHARE: 0.9}))
    assert [one.found for one in check_speed(record)] == ["6 steps are too few to check it"]
    assert len(select_warm_steps(make_record(H200, make_steps(H200, 12)))) == 9


def test_every_suggested_setting_is_valid() -> None:
    """Each `--set` suggested by the findings above is accepted and yields a plan."""
    changes: list[Change] = [
        lambda _step: {metrics.DATA_WAIT_SHARE: 0.31},
        lambda step: {metrics.ALLOC_RETRIES: float(step)},
        lambda step: {metrics.SKIPPED: float(step > 100)},
        lambda step: {metrics.TRAIN_LOSS: 2.0 + step / 100},
        lambda step: {metrics.TRAIN_LOSS: 2.0 + 0.001 * (step % 3)},
    ]
    findings = [one for change in changes for one in judge(change)]
    findings += judge(lambda _step: {metrics.GPU_UTILIZATION: 0.4}, plan=small_steps(H200, compile=None))
    findings += judge(**compiled(2, 99))
    record = make_record(H200, make_steps(H200))
    findings += check_run(make_facts(replace(record, rows=record.steps)))
    for name in (
        metrics.CHECKPOINT_SECONDS,
        metrics.EVALUATION_SECONDS,
        metrics.RESTART_SECONDS,
        metrics.COMPILE_SECONDS,
    ):
        findings += judge(goodput={metrics.GOODPUT: 0.4, metrics.TOTAL_SECONDS: 7200.0, name: 4000.0})
    suggested = [re.findall(r"--set (\S+)", finding.next_step) for finding in findings]
    commands = {tuple(setting.rstrip(";") for setting in settings) for settings in suggested if settings}
    assert len(commands) >= 9
    for settings in commands:
        plan_request(Request(expert=str(ROOT / "experts/neo4j/manifest.json"), gpu="h200", overrides=settings))


def test_larger_save_steps_is_suggested_for_step_strategy() -> None:
    by_steps = tuple(
        f"training.config.{setting}"
        for setting in ("save_strategy=steps", "save_steps=50", "evaluation_strategy=steps", "eval_steps=50")
    )
    plan = plan_for(overrides=by_steps)
    finding = only(judge(goodput=GOODPUT, plan=plan))
    settings = re.findall(r"--set (\S+)", finding.next_step)
    assert "training.config.save_steps=200" in settings
    saved = plan_for(overrides=(*by_steps, *settings)).schedule
    assert (saved.save_every_steps, saved.evaluate_every_steps) == (200, 200)


def test_a_cpu_has_no_estimate_and_no_gpu() -> None:
    plan = plan_for(None)
    plan = plan.model_copy(update={"speed": plan.speed.model_copy(update={"tokens_per_second": 5000.0, "error": 0.2})})
    findings = judge(plan=plan, speed=0.3)
    (speed,) = (finding for finding in findings if finding.subject == "speed")
    assert speed.status == "ok"
    assert "speed on a CPU is not estimated: only bottlenecks are checked" in speed.found
    assert "median of" in speed.found
    assert not any("GPU" in f"{finding.found} {finding.next_step}" for finding in findings)


def test_load_by_other_programs_is_named() -> None:
    finding = only(judge(lambda step: {metrics.HOST_LOAD: 2.5 if step > 20 else 1.0}, plan=plan_for(None)))
    assert (finding.subject, finding.status) == ("host load", "note")
    assert "in 100 of 120 steps, from step 21" in finding.found


@pytest.mark.parametrize(("from_step", "repeated"), [(60, "0 steps repeated"), (59, "1 step repeated")])
def test_repeated_steps_are_counted(from_step: int, repeated: str) -> None:
    first = Attempt(started_at="a", ended_at="b", steps_done=60)
    attempts = (first, Attempt(started_at="c", from_step=from_step, ended_at="d"))
    (finding,) = (one for one in judge(attempts=attempts) if one.subject == "restarts")
    assert finding.found == f"2 starts, {repeated}"
    assert ("nothing was trained twice" in finding.matters) == (from_step == 60)
