"""A run judged by its metrics: each planted fault is named, with what to do; a healthy run has nothing named."""

from __future__ import annotations

import math
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher import metrics
from launcher.doctor.examine import judge_run
from launcher.doctor.findings import Finding
from launcher.doctor.pace import Speed, find_speed, judge_pace
from launcher.doctor.series import find_period, judged_steps
from launcher.inputs import Request, plan_request
from launcher.plan import Plan
from launcher.record import Attempt, RunRecord
from tests.conftest import ROOT
from tests.unit.doctor.made import Change, Values, make_facts, make_record, make_steps, named, only, plan_for

H200 = plan_for()
CARD_GIB = 143771 / 1024


def judge(change: Change | None = None, plan: Plan = H200, speed: float = 1.0, **outcome: Any) -> list[Finding]:
    return judge_run(make_facts(make_record(plan, make_steps(plan, change=change, speed=speed), **outcome)))


@pytest.mark.parametrize("plan", [H200, plan_for("rtx4090"), plan_for("h100", 8), plan_for(None)])
@pytest.mark.parametrize("num_steps", [6, 12, 60, 400])
def test_a_healthy_run_has_nothing_named(plan: Plan, num_steps: int) -> None:
    findings = judge_run(make_facts(make_record(plan, make_steps(plan, num_steps))))
    assert named(findings) == []
    assert findings[0].found.startswith(f"healthy: {num_steps:,} steps, ")
    assert "loss 2.4" in findings[0].found


def test_a_run_of_two_noisy_cores_is_healthy() -> None:
    """As measured beside other processes: steps between 0.18 and 0.58 s."""
    seconds = [0.225, 0.241, 0.575, 0.501, 0.389, 0.318, 0.201, 0.545, 0.410, 0.179, 0.264, 0.237]

    def noisy(step: int) -> Values:
        took = seconds[step % len(seconds)]
        return {metrics.STEP_SECONDS: took, metrics.TOKENS_PER_SECOND: 430 / took, metrics.DATA_WAIT_SHARE: 0.006}

    plan = plan_for(None)
    for count in (12, 16, 60):
        assert named(judge_run(make_facts(make_record(plan, make_steps(plan, count, noisy))))) == []


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
def test_speed_in_a_word(ratio: float, error: float, word: str) -> None:
    assert Speed(tokens_per_second=1000 * ratio, expected=1000, error=error).word == word


def test_the_error_of_an_estimate_is_what_the_plan_says_of_it() -> None:
    def error(plan: Plan, **outcome: Any) -> float:
        speed = find_speed(make_record(plan, make_steps(plan), **outcome))
        assert speed is not None
        return speed.error

    assert error(H200) == 0.2
    assert error(plan_for("rtx4090")) == 0.4
    assert error(H200, rungs=("micro-batch 8",)) == 0.6
    assert error(plan_for(overrides=("training.config.packing=false",))) == 0.6
    assert find_speed(make_record(plan_for(None), make_steps(plan_for(None)))) is None


def test_a_slow_run_without_a_visible_cause() -> None:
    finding = only(judge(speed=0.6))
    assert finding.subject == "speed"
    assert finding.found.startswith("problem: ")
    assert "60 % of the" in finding.found
    assert "off by 20 %, which does not explain it" in finding.matters
    assert finding.next_step.startswith("launcher doctor, whose micro-test")


def test_first_steps_do_not_count() -> None:
    def cold(step: int) -> Values:
        return {metrics.TOKENS_PER_SECOND: 1.0, metrics.DATA_WAIT_SHARE: 0.9} if step <= 5 or 61 <= step <= 65 else {}

    attempts = (Attempt(started_at="a"), Attempt(started_at="b", from_step=60, ended_at="c"))
    assert [finding.subject for finding in named(judge(cold, attempts=attempts))] == ["restarts"]


def test_starving() -> None:
    finding = only(judge(lambda _step: {metrics.DATA_WAIT_SHARE: 0.31}, plan=plan_for("rtx4090")))
    assert (finding.subject, finding.status) == ("data", "problem")
    assert finding.found == "31.0 % of a step waits for data, in every step; 2 loader workers, 8 cores"
    assert finding.next_step.startswith("launcher train neo4j --set training.config.dataloader_num_workers=4; ")
    assert "launcher data --move-to DIR" in finding.next_step


def test_starving_a_little_is_a_note_and_one_percent_nothing() -> None:
    assert only(judge(lambda _step: {metrics.DATA_WAIT_SHARE: 0.07})).status == "note"
    assert named(judge(lambda _step: {metrics.DATA_WAIT_SHARE: 0.03})) == []


def test_starving_now_and_then_is_told_with_how_often() -> None:
    finding = only(judge(lambda step: {metrics.DATA_WAIT_SHARE: 0.6 if step % 4 == 0 else 0.0}))
    assert (finding.subject, finding.status) == ("data", "problem")
    assert "in 29 of 115 steps" in finding.found


def test_the_hosts_wait_stands_in_for_the_devices() -> None:
    """On a GPU the host may wait while the device works: more of it must be seen than on a CPU."""

    def waits(plan: Plan, share: float) -> list[Finding]:
        rows = make_steps(plan)
        for row in rows:
            del row.values[metrics.DATA_WAIT_SHARE]
            row.values[metrics.DATA_WAIT_SECONDS] = share * row.values[metrics.STEP_SECONDS]
        return [one for one in judge_pace(make_record(plan, rows)) if one.status != "ok"]

    assert waits(H200, 0.12) == []
    assert only(waits(H200, 0.3)).status == "problem"
    assert only(waits(plan_for(None), 0.12)).status == "problem"


def test_no_core_left_for_workers() -> None:
    hardware = H200.hardware.model_copy(update={"cpu_cores_per_node": 3})
    plan = H200.model_copy(update={"hardware": hardware})
    finding = only(judge(lambda _step: {metrics.DATA_WAIT_SHARE: 0.31}, plan=plan))
    assert finding.next_step.startswith("no core is left for more workers: give the run more cores")


def test_memory_pressure_names_the_next_rung() -> None:
    plan = plan_for("rtx4090")
    finding = only(judge(lambda step: {metrics.ALLOC_RETRIES: float(step)}, plan=plan))
    assert (finding.subject, finding.status) == ("memory pressure", "problem")
    assert "114 of 115 steps got their memory only by emptying the cache" in finding.found
    assert f"next rung of the ladder: {plan.ladder[0].action} (" in finding.next_step
    once = only(judge(lambda step: {metrics.ALLOC_RETRIES: float(step > 50)}, plan=plan))
    assert once.status == "note"


def test_rungs_that_have_a_setting_are_offered_with_it() -> None:
    plan = plan_for("rtx4090")
    rungs = {rung.action: rung for rung in plan.ladder}
    full = next(rung for name, rung in rungs.items() if "checkpointing: full" in name)
    same = full.model_copy(update={"strategy": plan.strategy})
    lower = plan.model_copy(update={"ladder": (same,)})
    finding = only(judge(lambda step: {metrics.ALLOC_RETRIES: float(step)}, plan=lower))
    assert "--set training.config.gradient_checkpointing=true" in finding.next_step
    bare = plan.model_copy(update={"ladder": ()})
    finding = only(judge(lambda step: {metrics.ALLOC_RETRIES: float(step)}, plan=bare))
    assert "the ladder has no rung left" in finding.next_step


def test_spill_into_the_hosts_memory() -> None:
    finding = only(judge(lambda _step: {metrics.PEAK_RESERVED_GIB: CARD_GIB + 3}))
    assert (finding.subject, finding.status) == ("spill", "problem")
    assert "more than the card has" in finding.found
    assert "Sysmem Fallback Policy" in finding.next_step


def test_a_full_card_that_collapses_spills() -> None:
    rate = H200.speed.tokens_per_second or 0.0

    def collapse(step: int) -> Values:
        return {metrics.PEAK_RESERVED_GIB: 0.99 * CARD_GIB, metrics.TOKENS_PER_SECOND: rate * (1 if step < 60 else 0.2)}

    assert "spill" in {finding.subject for finding in named(judge(collapse))}
    assert named(judge(lambda _step: {metrics.PEAK_RESERVED_GIB: 0.99 * CARD_GIB})) == []


@pytest.mark.parametrize(("error", "status"), [(0.05, "note"), (-0.05, "note"), (-0.2, "problem"), (0.02, None)])
def test_a_prediction_beyond_three_percent(error: float, status: str | None) -> None:
    findings = named(judge(lambda _step: {metrics.PREDICTION_ERROR: error}))
    assert [(one.subject, one.status) for one in findings] == ([("prediction", status)] if status else [])


def test_a_prediction_says_which_way_it_was_off() -> None:
    assert "less than it took" in only(judge(lambda _step: {metrics.PREDICTION_ERROR: -0.05})).found
    assert "more than it took" in only(judge(lambda _step: {metrics.PREDICTION_ERROR: 0.05})).found
    rows = make_steps(H200)
    for row in rows:
        del row.values[metrics.PREDICTION_ERROR]
        row.values[metrics.PEAK_ALLOCATED_GIB] /= 1.05
    finding = only(judge_run(make_facts(make_record(H200, rows))))
    assert finding.found == "memory was predicted 5.0 % more than it took"


def small_steps(plan: Plan, **changes: object) -> Plan:
    batch = plan.batch.model_copy(update={"micro_batch_size": 1})
    return plan.model_copy(update={"batch": batch, **changes})


def test_launch_bound() -> None:
    plan = small_steps(H200, compile=None)
    finding = next(
        one
        for one in judge(lambda _step: {metrics.GPU_UTILIZATION: 0.45}, plan=plan, speed=0.5)
        if one.subject != "speed" and one.status != "ok"
    )
    assert (finding.subject, finding.status) == ("launch-bound", "problem")
    assert finding.found == "the GPU is 45.0 % busy with micro-steps of 2,048 tokens"
    assert finding.next_step == "launcher train neo4j --set training.config.torch_compile=true"


def test_launch_bound_as_expected_is_a_note() -> None:
    finding = only(judge(lambda _step: {metrics.GPU_UTILIZATION: 0.45}, plan=small_steps(H200)))
    assert (finding.subject, finding.status) == ("launch-bound", "note")
    assert "larger micro-batches" in finding.next_step


def test_an_idle_gpu_with_large_steps() -> None:
    finding = only(judge(lambda _step: {metrics.GPU_UTILIZATION: 0.45}))
    assert finding.subject == "idle GPU"
    assert "though it does not wait for data" in finding.found


def test_a_gpu_that_waits_for_data_is_not_launch_bound() -> None:
    finding = only(judge(lambda _step: {metrics.GPU_UTILIZATION: 0.45, metrics.DATA_WAIT_SHARE: 0.5}))
    assert finding.subject == "data"


def compiled(text: str) -> dict[str, Any]:
    return {"observed": {"torch.compile": text}}


def test_recompiling() -> None:
    told = "each layer: 2 graphs, 0 graph breaks, 22 s; 9 more graphs while training (evaluation has its own)"
    finding = only(judge(**compiled(told)))
    assert (finding.subject, finding.status) == ("recompiling", "problem")
    assert finding.found == "9 graphs were compiled while training, 4 are usual"
    assert finding.next_step.endswith("--set training.config.torch_compile=false")
    assert named(judge(**compiled(told.replace("9 more", "2 more")))) == []
    unpacked = plan_for(overrides=("training.config.packing=false",))
    assert named(judge(plan=unpacked, **compiled(told))) == []


def test_steps_that_compile_again_are_spikes() -> None:
    rate = H200.speed.tokens_per_second or 0.0
    rows = make_steps(H200)
    usual = rows[50].values[metrics.STEP_SECONDS]

    def spike(step: int) -> Values:
        slow = step in (31, 47, 48, 90)
        return {metrics.STEP_SECONDS: usual * 9, metrics.TOKENS_PER_SECOND: rate / 9} if slow else {}

    finding = only(judge(spike))
    assert (finding.subject, finding.status) == ("slow steps", "problem")
    assert finding.found.startswith("4 steps took more than 3 times the usual (steps 31, 47, 48, 90): ")
    assert "compiling again" in finding.matters


def slow_every(plan: Plan, period: int, times: float) -> Change:
    usual = make_steps(plan)[50].values

    def change(step: int) -> Values:
        if step % period:
            return {}
        rate, seconds = usual[metrics.TOKENS_PER_SECOND] / times, usual[metrics.STEP_SECONDS] * times
        return {metrics.STEP_SECONDS: seconds, metrics.TOKENS_PER_SECOND: rate}

    return change


@pytest.mark.parametrize("period", [2, 3, 10])
def test_a_pattern_of_slow_steps(period: int) -> None:
    findings = {one.subject: one for one in named(judge(slow_every(H200, period, 3.0)))}
    finding = findings["slow steps"]
    assert finding.status == "problem"
    assert finding.found.startswith(f"every {period} steps one is slow (steps ")
    assert "nothing in the plan comes as often" in finding.matters


def test_a_pattern_is_explained_by_the_plan() -> None:
    def explain(**schedule: object) -> Finding:
        plan = H200.model_copy(update={"schedule": H200.schedule.model_copy(update=schedule)})
        return next(one for one in judge(slow_every(plan, 20, 3.0), plan=plan) if one.subject == "slow steps")

    assert explain(save_every_steps=20).matters == "checkpoints are saved as often"
    assert "--set training.config.save_steps=80" in explain(save_every_steps=20).next_step
    assert explain(evaluate_every_steps=20).matters == "evaluations come as often"
    assert "--set training.config.eval_steps=80" in explain(evaluate_every_steps=20).next_step


def test_steps_with_more_to_do_are_not_slow() -> None:
    usual = make_steps(H200)[50].values[metrics.STEP_SECONDS]
    findings = judge(lambda step: {metrics.STEP_SECONDS: usual * (3 if step % 10 == 0 else 1)})
    assert named(findings) == []


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
def test_periods(slow: list[int], period: int | None) -> None:
    assert find_period(range(1, 101), set(slow)) == period


def test_what_a_run_is_told_to_do_while_it_runs() -> None:
    record = make_record(H200, make_steps(H200, change=lambda _step: {metrics.DATA_WAIT_SHARE: 0.31}), status="running")
    facts = replace(make_facts(record), is_trained=True)
    finding = next(one for one in judge_run(facts) if one.subject == "data")
    assert finding.next_step.startswith("stop it, which saves; then launcher train neo4j --resume made --set ")


def test_an_earlier_attempt_elsewhere_does_not_count() -> None:
    attempts = (Attempt(started_at="a", ended_at="b"), Attempt(started_at="c", from_step=60))
    findings = judge(lambda step: {metrics.DATA_WAIT_SHARE: 0.5 if step <= 60 else 0.0}, attempts=attempts)
    assert [one.subject for one in named(findings)] == ["restarts"]


def test_a_long_run_is_judged_within_seconds() -> None:
    rows = make_steps(H200, 30_000, slow_every(H200, 250, 40.0))
    began = time.monotonic()
    findings = judge_run(make_facts(make_record(H200, rows)))
    assert time.monotonic() - began < 10
    assert only(findings).found.startswith("every 250 steps one is slow (steps 28250, 28500, 28750, 29000, …)")


def test_throttling_and_slowing_down() -> None:
    rate = H200.speed.tokens_per_second or 0.0

    def slows(heat: float) -> Change:
        return lambda step: {metrics.TOKENS_PER_SECOND: rate * (1.2 - step / 300), metrics.GPU_TEMPERATURE: heat}

    assert named(judge(slows(88.0), plan=plan_for(None))) == [], "a CPU is shared, and its speed comes and goes"
    short = make_steps(H200, 30, lambda step: {metrics.TOKENS_PER_SECOND: rate * (1.2 - step / 60)})
    assert named(judge_run(make_facts(make_record(H200, short)))) == [], "too few steps for a trend"
    hot = only(judge(slows(88.0)))
    assert (hot.subject, hot.status) == ("throttling", "problem")
    assert "at 88 °C" in hot.found
    assert only(judge(slows(60.0))).subject == "slowing down"


def test_slow_links_are_taken_from_what_was_measured_at_the_start() -> None:
    plan = plan_for("h100", 8)
    slow = "the ranks reach each other at 3.1 GB/s, and the plan counts on 315: steps will take longer than it says"
    finding = only(judge(plan=plan, observed={"links": f"all-reduce of 64 MiB over 8 ranks in 20 ms; {slow}"}))
    assert (finding.subject, finding.status, finding.found) == ("communication", "problem", slow)
    assert "NCCL_DEBUG=INFO" in finding.next_step


def test_busy_gpus_that_compute_little_wait_for_links() -> None:
    plan = plan_for("h100", 8, 4)
    findings = {one.subject: one for one in named(judge(plan=plan, speed=0.4))}
    assert findings.keys() == {"speed", "communication"}
    assert findings["speed"].next_step == "first what is named here: communication"
    assert "ranks wait for each other" in findings["communication"].matters
    assert "communication" not in {one.subject for one in named(judge(speed=0.4))}, "one GPU has no links"


def test_links_that_were_expected_to_be_waited_for_are_no_problem() -> None:
    plan = plan_for("h100", 8)
    plan = plan.model_copy(update={"speed": plan.speed.model_copy(update={"communication_fraction": 0.5})})
    assert named(judge(plan=plan)) == []
    findings = {one.subject: one for one in named(judge(plan=plan, speed=0.4))}
    assert findings["communication"].found == "50.0 % of a step was expected to wait for links, it is more"


def test_sharded_runs_may_gather_less() -> None:
    plan = plan_for("h100", 8).model_copy(update={"strategy": "fsdp2"})
    findings = {one.subject: one for one in named(judge(plan=plan, speed=0.4))}
    assert findings["communication"].next_step.startswith("--strategy zero2, where memory allows")


def test_spikes_of_a_cpu_are_a_note_and_must_be_large() -> None:
    plan = plan_for(None)
    usual = make_steps(plan)[50].values

    def spikes(times: float) -> Change:
        slow = {metrics.STEP_SECONDS: usual[metrics.STEP_SECONDS] * times, metrics.TOKENS_PER_SECOND: 1.0}
        return lambda step: slow if step in (31, 47, 48, 90) else {}

    assert named(judge(spikes(9.0), plan=plan)) == []
    finding = only(judge(spikes(40.0), plan=plan))
    assert (finding.subject, finding.status) == ("slow steps", "note")
    assert "others on this machine" in finding.matters


def test_steps_passed_over() -> None:
    finding = only(judge(lambda step: {metrics.SKIPPED: 1.0} if step in (9, 10, 33) else {}))
    assert (finding.subject, finding.status) == ("unstable loss", "problem")
    assert "3 of 120 steps were passed over (steps 9, 10, 33)" in finding.found
    assert "--set training.config.learning_rate=0.0001" in finding.next_step
    assert only(judge(lambda step: {metrics.TRAIN_LOSS: math.nan} if step == 40 else {})).status == "note"


def test_loss_scaling_passes_steps_over_by_design() -> None:
    scaled = H200.precision.model_copy(update={"loss_scaling": True})
    plan = H200.model_copy(update={"precision": scaled})
    assert named(judge(lambda step: {metrics.SKIPPED: float(step < 8)}, plan=plan)) == []


def test_a_short_warm_up_is_made_longer_too() -> None:
    schedule = H200.schedule.model_copy(update={"warmup_ratio": None, "warmup_steps": 0})
    plan = H200.model_copy(update={"schedule": schedule})
    finding = only(judge(lambda step: {metrics.SKIPPED: float(step > 100)}, plan=plan))
    assert "--set training.config.warmup_ratio=0.05" in finding.next_step


def test_jumps() -> None:
    finding = only(judge(lambda step: {metrics.TRAIN_LOSS: 7.0} if step in (50, 51, 80) else {}))
    assert (finding.subject, finding.status) == ("unstable loss", "problem")
    assert finding.found == "the loss jumped 3 times (steps 50, 51, 80)"
    assert (
        only(judge(lambda step: {metrics.TRAIN_LOSS: 7.0} if step == 50 else {})).found == "the loss jumped at step 50"
    )


def test_divergence() -> None:
    finding = only(judge(lambda step: {metrics.TRAIN_LOSS: 2.0 - step / 80 if step < 60 else 1.25 + (step - 60) / 80}))
    assert finding.status == "problem"
    assert finding.found.startswith("it rises: ")
    assert "--set training.config.learning_rate=0.0001" in finding.next_step


def test_a_loss_that_does_not_fall() -> None:
    finding = only(judge(lambda step: {metrics.TRAIN_LOSS: 2.0 + 0.001 * (step % 3)}))
    assert (finding.subject, finding.status) == ("loss", "note")
    rows = make_steps(H200, 300, lambda step: {metrics.TRAIN_LOSS: 2.0 + 0.001 * (step % 3)})
    finding = only(judge_run(make_facts(make_record(H200, rows))))
    assert finding.status == "problem"
    assert "--set training.config.learning_rate=0.0004" in finding.next_step


def test_quality_that_nobody_looked_at() -> None:
    record = make_record(H200, make_steps(H200))
    finding = only(judge_run(make_facts(replace(record, rows=record.steps))))
    assert (finding.subject, finding.status) == ("quality", "note")
    assert "not known" in finding.found
    short = make_record(H200, make_steps(H200, 40))
    assert named(judge_run(make_facts(replace(short, rows=short.steps)))) == []


def test_overfitting_is_told_unless_the_best_is_kept() -> None:
    def judge_with(*, keeps_best: bool) -> list[Finding]:
        schedule = H200.schedule.model_copy(update={"load_best_model_at_end": keeps_best})
        record = make_record(H200.model_copy(update={"schedule": schedule}), make_steps(H200))
        (held_out,) = record.evaluations
        evaluations = [replace(held_out, values={metrics.EVAL_LOSS: loss}) for loss in (1.5, 1.2, 1.4)]
        return named(judge_run(make_facts(replace(record, rows=(*record.steps, *evaluations)))))

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
    assert finding.found == "42.0 % of 2.0 h trained what counts; most was lost to checkpoints: 60 min"
    assert "--set training.config.save_strategy=epoch --set training.config.save_epochs=4 " in finding.next_step
    assert only(judge(goodput={**GOODPUT, metrics.GOODPUT: 0.7})).status == "note"
    assert named(judge(goodput={**GOODPUT, metrics.GOODPUT: 0.9})) == []
    assert named(judge(goodput={**GOODPUT, metrics.TOTAL_SECONDS: 300.0})) == [], "a short run is mostly start"


def test_restarts_and_rungs_are_notes() -> None:
    attempts = (Attempt(started_at="a"), Attempt(started_at="b", from_step=40, ended_at="c"))
    finding = only(judge(attempts=attempts))
    assert (finding.subject, finding.status) == ("restarts", "note")
    assert finding.found == "2 starts, 1 of them ended without a word"
    finding = only(judge(rungs=("micro-batch 8",)))
    assert (finding.subject, finding.status) == ("out of memory", "note")
    assert "1 rungs were taken: micro-batch 8; the next would be: " in finding.found


def running(record: RunRecord, **facts: Any) -> Finding:
    assert record.outcome is not None
    live = replace(record, outcome=record.outcome.model_copy(update={"status": "running", "num_steps": 1000}))
    given = {"is_trained": True, **facts}
    return next(one for one in judge_run(replace(make_facts(live), **given)) if one.subject == "status")


def test_a_run_that_runs() -> None:
    record = make_record(H200, make_steps(H200))
    assert running(record).found.startswith("running, 120 of 1,000 steps, about ")
    assert running(record, is_trained=None).status == "ok", "a file system that cannot lock tells nothing"
    fresh = running(record, is_trained=False)
    assert (fresh.status, fresh.next_step) == ("note", "look again in a minute")
    dead = running(record, is_trained=False, idle_seconds=90.0)
    assert (dead.status, dead.next_step) == ("problem", "launcher train neo4j --resume made")
    stuck = running(record, idle_seconds=1800.0)
    assert stuck.status == "problem"
    assert "no step for 30 min, after 120 of 1,000 steps" in stuck.found
    assert "py-spy dump --pid 1" in stuck.next_step


def test_a_run_that_starts() -> None:
    record = make_record(H200, [])
    assert running(record, idle_seconds=None, age_seconds=60.0).found == "it starts"
    late = running(record, idle_seconds=None, age_seconds=7200.0)
    assert (late.status, late.found) == ("problem", "started 2.0 h ago, and no step is done")


@pytest.mark.parametrize(
    ("status", "expected"), [("failed", "problem"), ("crashed", "problem"), ("stopped", "note"), ("done", None)]
)
def test_how_it_ended(status: str, expected: str | None) -> None:
    findings = named(judge(status=status, error="the loss is nan\nhint: lower the rate" if expected else ""))
    assert [one.status for one in findings] == ([expected] if expected else [])
    if expected == "problem":
        assert findings[0].found == f"{status} after 120 of 120 steps: the loss is nan hint: lower the rate"
        assert findings[0].next_step == "launcher train neo4j --resume made"


def test_a_run_that_was_never_started() -> None:
    record = replace(make_record(H200, []), outcome=None, rows=())
    finding = only(judge_run(make_facts(record)))
    assert finding.found == "it was planned, but never started"


def test_a_run_elsewhere_is_resumed_from_there() -> None:
    record = make_record(H200, make_steps(H200), root=Path("some where/r1"), status="stopped")
    assert only(judge_run(make_facts(record))).next_step == "launcher train neo4j --resume r1 --runs-dir 'some where'"


def test_too_few_steps_are_not_judged() -> None:
    record = make_record(H200, make_steps(H200, 6, lambda _step: {metrics.DATA_WAIT_SHARE: 0.9}))
    assert [one.found for one in judge_pace(record)] == ["6 steps are too few to judge it"]
    assert len(judged_steps(make_record(H200, make_steps(H200, 12)))) == 9


def test_every_setting_that_is_advised_is_one() -> None:
    """Each `--set` of each finding above is taken by the manifest, and makes a plan."""
    changes: list[Change] = [
        lambda _step: {metrics.DATA_WAIT_SHARE: 0.31},
        lambda step: {metrics.ALLOC_RETRIES: float(step)},
        lambda step: {metrics.SKIPPED: float(step > 100)},
        lambda step: {metrics.TRAIN_LOSS: 2.0 + step / 100},
        lambda step: {metrics.TRAIN_LOSS: 2.0 + 0.001 * (step % 3)},
    ]
    findings = [one for change in changes for one in judge(change)]
    findings += judge(lambda _step: {metrics.GPU_UTILIZATION: 0.4}, plan=small_steps(H200, compile=None))
    findings += judge(**compiled("each layer: 2 graphs, 0 graph breaks, 2 s; 99 more graphs while training"))
    record = make_record(H200, make_steps(H200))
    findings += judge_run(make_facts(replace(record, rows=record.steps)))
    for name in (
        metrics.CHECKPOINT_SECONDS,
        metrics.EVALUATION_SECONDS,
        metrics.RESTART_SECONDS,
        metrics.COMPILE_SECONDS,
    ):
        findings += judge(goodput={metrics.GOODPUT: 0.4, metrics.TOTAL_SECONDS: 7200.0, name: 4000.0})
    advised = [re.findall(r"--set (\S+)", finding.next_step) for finding in findings]
    commands = {tuple(setting.rstrip(";") for setting in settings) for settings in advised if settings}
    assert len(commands) >= 9
    for settings in commands:
        plan_request(Request(expert=str(ROOT / "experts/neo4j/manifest.json"), gpu="h200", overrides=settings))


def test_steps_are_saved_less_often_by_steps() -> None:
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
