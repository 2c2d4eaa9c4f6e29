"""The report of a synthetic run, compared with a golden file, and each way in which a run can end.

After an intended change: UPDATE_GOLDEN=1 pytest tests/unit/analysis/report.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.analysis.report import render_report
from launcher.core import metrics
from launcher.core.metrics import StepMetrics
from launcher.core.run_paths import RunPaths
from launcher.hardware.model import make_hardware
from launcher.manifest.dataset import FieldMapping
from launcher.plan.model import Decision
from launcher.plan.task_eval import NO_JUDGE
from launcher.runs.evaluations import RunEvaluations
from launcher.runs.record import Status, WandbTrace
from tests.conftest import ROOT
from tests.unit.analysis.report.made_run import REQUEST, make_facts, make_outcome, make_plan, make_rows

GOLDEN = ROOT / "tests/golden/report.md"


def section(report: str, title: str) -> str:
    return report.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_report_equals_golden_file() -> None:
    report = render_report(make_facts(outcome=make_outcome()))
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(report, encoding="utf-8")
    assert report == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("status", "code", "status_line", "next_step"),
    [
        (
            "stopped",
            75,
            "**Stopped** after step 4 in 20 s, exit code 75. The run can be resumed.",
            "checkpoint of step 2",
        ),
        ("failed", 1, "**Failed** after step 4 in 20 s, exit code 1.", "Log: `runs/made/logs/console.log`"),
        ("failed", 2, "**Failed** after step 4 in 20 s, exit code 2.", "Fix the problem in the message above."),
        ("failed", 3, "**Failed** after step 4 in 20 s, exit code 3.", "The run needs more memory than available"),
        ("failed", 5, "**Failed** after step 4 in 20 s, exit code 5.", "Fix the problem in the message above."),
        ("crashed", 4, "**Crashed** after step 4 in 20 s without reporting an error; exit code 4.", "Log: "),
        (
            "running",
            None,
            "**Running** when this report was written, after step 4; or killed",
            "checkpoint of step 2",
        ),
    ],
)
def test_unfinished_run_shows_status_error_and_resume_command(
    status: Status, code: int | None, status_line: str, next_step: str
) -> None:
    report = render_report(make_facts(outcome=make_outcome(status=status, exit_code=code, error="it went wrong")))
    assert status_line in report.splitlines()[2]
    assert "```text\nit went wrong\n```" in report
    assert next_step in section(report, "Next steps")
    assert "launcher train --resume made\n" in section(report, "Next steps")
    assert "launcher ask" not in report


def test_run_that_never_started_shows_the_plan_only() -> None:
    nothing = RunEvaluations()
    report = render_report(make_facts(outcome=None, rows=(), saved_step=None, evaluations=nothing))
    assert section(report, "Quality").strip() == ("No answers were judged: only losses show the quality of this run.")
    assert report.splitlines()[2] == "**Not started.** The run directory is prepared; nothing ran."
    assert "| precision | BF16 | the GPU has it | hardware |" in report
    for title in ("Speed", "Learning", "Stability"):
        assert section(report, title).strip() == "Nothing was measured: no step finished."
    assert "Not measured: no step finished." in section(report, "Memory")
    assert "Where the time went" not in report
    assert "Active at runtime" not in report
    assert "No checkpoint is saved: resuming starts at the first step." in report
    assert "Medians" not in report


def test_run_that_failed_before_its_first_step() -> None:
    outcome = make_outcome(status="failed", exit_code=4, steps_done=0, num_steps=None, goodput={}, attempts=())
    report = render_report(make_facts(outcome=outcome, rows=(), saved_step=None))
    assert report.splitlines()[2] == "**Failed** before the first step finished, after 5 min, exit code 4."
    assert "tokens/s" not in report


def test_cpu_run_shows_no_gpu_values() -> None:
    cpu = make_hardware(None, gpus_per_node=0, nodes=1)
    speed = make_plan().speed.model_copy(
        update=dict.fromkeys(("tokens_per_second", "seconds_per_step", "total_seconds", "mfu", "price_per_gpu_hour"))
    )
    plan = make_plan(hardware=cpu, strategy="single", speed=speed, profile="smoke")
    values = {metrics.TRAIN_LOSS: 2.0, metrics.STEP_SECONDS: 2.0, metrics.DATA_WAIT_SECONDS: 0.5}
    rows = (StepMetrics(step=1, epoch=0.1, values={**values, metrics.TOKENS_PER_SECOND: 50.0}),)
    nothing = RunEvaluations(kept_step=1)
    report = render_report(make_facts(plan=plan, outcome=make_outcome(goodput={}), rows=rows, evaluations=nothing))
    speed_section = section(report, "Speed")
    assert "Only one step was measured." in speed_section
    assert "| tokens per second | 50 tokens/s |\n" in speed_section
    assert "| data wait | 25.0 % of the time of all steps |" in speed_section
    for word in ("FLOPs", "GPU", "energy", "cost", "planned"):
        assert word not in speed_section
    assert "peaks are measured on GPUs only" in section(report, "Memory")
    assert "prediction error" not in report
    assert "No validation loss was measured." in section(report, "Learning")
    assert "No answers were judged" in section(report, "Quality")
    assert "Smoke run: a tiny base model on a small sample" in report


def test_memory_prediction_is_compared_with_the_maximum() -> None:
    memory = section(render_report(make_facts(outcome=make_outcome())), "Memory")
    assert "| predicted, per rank | 4.0 GiB |" in memory
    assert "| measured, maximum | 3.9 GiB |" in memory
    assert "| prediction error | +2.6 % |" in memory


def test_energy_covers_all_steps() -> None:
    # 4 steps of 12,000 tokens/s x 1.25 s x 0.06 J = 3,600 J
    assert "| energy of all steps | 1.0 Wh |" in section(render_report(make_facts(outcome=make_outcome())), "Speed")


def test_skipped_steps_are_counted_and_listed() -> None:
    values = {metrics.TRAIN_LOSS: 1.0, metrics.SKIPPED: 1.0}
    rows = tuple(StepMetrics(step=step, epoch=0.1, values=values) for step in range(1, 14))
    report = render_report(make_facts(outcome=make_outcome(), rows=rows))
    assert "13 of 13 steps skipped: step 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 3 more" in section(report, "Stability")


@pytest.mark.parametrize(
    ("losses", "cells"),
    [
        ((1.6, math.nan), "| validation loss | 1.6000 | not finite | 1.6000 | 1 |  |"),
        ((math.nan, math.nan), "| validation loss | not finite | not finite | not finite |  |  |"),
    ],
)
def test_validation_losses_that_are_not_finite_are_shown(losses: tuple[float, ...], cells: str) -> None:
    rows = [StepMetrics(step=at, epoch=at / 4, values={metrics.EVAL_LOSS: loss}) for at, loss in enumerate(losses, 1)]
    report = render_report(make_facts(outcome=make_outcome(), rows=(*make_rows()[1:3], *rows)))
    assert cells in section(report, "Learning")
    assert "No validation loss was measured" not in report
    broken = ", ".join(str(at) for at, loss in enumerate(losses, 1) if math.isnan(loss))
    assert f"- non-finite validation losses: step {broken}" in section(report, "Stability")


def test_early_stopping_is_reported() -> None:
    report = render_report(make_facts(outcome=make_outcome(ended_because="no better for 3 evaluations")))
    assert "Ended early." in report.splitlines()[2]
    assert "no better for 3 evaluations" in section(report, "Learning")


def test_expert_is_named_as_in_the_request() -> None:
    own = make_facts(outcome=make_outcome(), request=replace(REQUEST, expert="my experts/manifest.json"))
    evaluations = replace(own.evaluations, base=None)
    assert "launcher eval 'my experts/manifest.json' --base\n" in render_report(replace(own, evaluations=evaluations))


def test_run_outside_the_default_directory_is_named_by_path() -> None:
    report = render_report(make_facts(outcome=make_outcome(), paths=RunPaths(Path("/data/my runs/made"))))
    steps = section(report, "Next steps")
    assert "launcher ask '/data/my runs/made'  # a held-out row; your own question: launcher ask '/data/my " in steps
    assert "made' 'your question' --input 'its schema'" in steps


def test_random_weights_suggest_no_ask_command() -> None:
    report = render_report(make_facts(plan=make_plan(random_weights=True), outcome=make_outcome()))
    assert "losses and answers are meaningless" in report
    assert "launcher ask" not in report


def test_unsaved_inputs_are_listed() -> None:
    outcome = make_outcome(git_commit="12ab+changes", wandb=None)
    request = replace(REQUEST, overrides=("training.config.api_key=***",))
    reproduction = section(
        render_report(make_facts(outcome=outcome, request=request, command=None)), "How to reproduce"
    )
    assert "git checkout 12ab  # in the checkout of the launcher\n" in reproduction
    assert "The checkout of the launcher had uncommitted changes" in reproduction
    assert "*** replaces a secret, which is not saved." in reproduction
    assert "Started directly by `accelerate launch launcher/train.py`" in reproduction
    nothing = section(
        render_report(make_facts(outcome=make_outcome(git_commit=None), request=None, command=None)),
        "How to reproduce",
    )
    assert "```" not in nothing


def test_online_run_has_its_url() -> None:
    trace = WandbTrace(id="x", project="p", mode="online", url="https://wandb.ai/team/p/runs/x")
    assert "W&B run: https://wandb.ai/team/p/runs/x" in render_report(make_facts(outcome=make_outcome(wandb=trace)))


def test_foreign_text_is_escaped_and_redacted() -> None:
    evil = "# head | `x` <script>alert(1)</script> [a](b) \x1b[31m hf_abcdefghijklmnopqrstuvwxyz"
    plan = make_plan(
        expert=evil,
        decisions=(Decision(name=evil, value=evil, reason=evil, decided_by="plan"),),
        notes=(f"# {evil}",),
    )
    outcome = make_outcome(status="failed", exit_code=4, error=f"```\n{evil}\n{evil}", observed={evil: evil})
    report = render_report(make_facts(plan=plan, outcome=outcome, request=replace(REQUEST, expert=evil)))
    outside = re.sub(r"(?ms)^(`{3,})[a-z]*\n.*?^\1$", "", report)
    assert "<script" not in outside
    assert "\x1b" not in report
    assert "hf_abc" not in report
    assert "```" not in outside
    assert [line for line in outside.splitlines() if line.startswith("# ")] == [report.splitlines()[0]]
    decision = next(line for line in outside.splitlines() if line.endswith("| plan |"))
    assert len(re.findall(r"(?<!\\)\|", decision)) == 5


def test_all_rows_of_a_table_have_the_same_columns() -> None:
    outside = re.sub(r"(?ms)^```.*?^```$", "", render_report(make_facts(outcome=make_outcome())))
    blocks = re.findall(r"(?m)(?:^\|.*\|$\n?)+", outside)
    assert len(blocks) >= 10
    for block in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1, block


def test_run_without_a_process_is_not_reported_as_running() -> None:
    facts = make_facts(outcome=make_outcome(status="running", exit_code=None))
    report = render_report(replace(facts, is_trained=False))
    assert "**Killed** after step 4, or training on another node: no process on this machine trains it." in report


def test_commands_of_the_report_can_be_run_for_prompts_of_several_fields_without_a_judge() -> None:
    plan = make_plan()
    mapping = FieldMapping(instruction="{subject}: {body}", input="product", response="queue")
    decision = Decision(name="task eval", value="off", reason=NO_JUDGE, decided_by="plan")
    data = plan.data.model_copy(update={"field_mapping": mapping})
    plan = plan.model_copy(update={"data": data, "decisions": (decision,)})
    report = render_report(make_facts(plan=plan, outcome=make_outcome(), evaluations=RunEvaluations()))
    assert "launcher ask made --field subject=... --field body=... --field product=..." in report
    assert "There is no judge for these answers: set `evaluation.judge_command`" in section(report, "Quality")
    assert "launcher eval --run" not in report
