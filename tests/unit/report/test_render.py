"""The report of a made run by exact equality, and each way in which a run can end.

After a change that was meant: UPDATE_GOLDEN=1 pytest tests/unit/report.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import metrics
from launcher.evaluations import RunEvaluations
from launcher.hardware import make_hardware
from launcher.metrics import StepMetrics
from launcher.paths import RunPaths
from launcher.plan.model import Decision
from launcher.record import Status, WandbTrace
from launcher.report import render_report
from tests.conftest import ROOT
from tests.unit.report.made_run import REQUEST, make_facts, make_outcome, make_plan

GOLDEN = ROOT / "tests/golden/report.md"


def section(report: str, title: str) -> str:
    return report.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_report_equals_the_golden_file() -> None:
    report = render_report(make_facts(outcome=make_outcome()))
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(report, encoding="utf-8")
    assert report == GOLDEN.read_text(encoding="utf-8")


def test_the_same_facts_make_the_same_report() -> None:
    assert render_report(make_facts(outcome=make_outcome())) == render_report(make_facts(outcome=make_outcome()))


@pytest.mark.parametrize(
    ("status", "code", "verdict", "way_out"),
    [
        ("stopped", 75, "**Stopped** after step 4 in 20 s, exit code 75. It can be resumed.", "Step 2 is saved"),
        ("failed", 1, "**Failed** after step 4 in 20 s, exit code 1.", "Its log: `runs/made/logs/console.log`"),
        ("failed", 2, "**Failed** after step 4 in 20 s, exit code 2.", "Mend what the message above names."),
        ("failed", 3, "**Failed** after step 4 in 20 s, exit code 3.", "It needs more memory than there is"),
        ("failed", 5, "**Failed** after step 4 in 20 s, exit code 5.", "Mend what the message above names."),
        ("crashed", 4, "**Died** after step 4 in 20 s, and could not say why itself; exit code 4.", "Its log: "),
        ("running", None, "**Running** when this was written, after step 4; or it was killed", "Step 2 is saved"),
    ],
)
def test_a_run_that_did_not_end_well_says_so_and_how_to_go_on(
    status: Status, code: int | None, verdict: str, way_out: str
) -> None:
    report = render_report(make_facts(outcome=make_outcome(status=status, exit_code=code, error="it went wrong")))
    assert verdict in report.splitlines()[2]
    assert "```text\nit went wrong\n```" in report
    assert way_out in section(report, "What next")
    assert "launcher train neo4j --resume made\n" in section(report, "What next")
    assert "launcher ask" not in report


def test_a_run_that_never_began_has_a_plan_and_no_figures() -> None:
    nothing = RunEvaluations()
    report = render_report(make_facts(outcome=None, rows=(), saved_step=None, evaluations=nothing))
    assert section(report, "Quality").strip() == (
        "No answers were judged: losses are all that is known of this run's quality."
    )
    assert report.splitlines()[2] == "**Not started.** Its files are written; nothing ran."
    assert "| precision | BF16 | the GPU has it | hardware |" in report
    for title in ("Speed", "Learning", "Stability"):
        assert section(report, title).strip() == "No step was finished: nothing was measured."
    assert "Not measured: no step was finished." in section(report, "Memory")
    assert "Where the time went" not in report
    assert "Seen in the live process" not in report
    assert "Nothing is saved: it begins at its first step." in report
    assert "Medians" not in report


def test_a_run_that_failed_before_its_first_step() -> None:
    outcome = make_outcome(status="failed", exit_code=4, steps_done=0, num_steps=None, goodput={}, attempts=())
    report = render_report(make_facts(outcome=outcome, rows=(), saved_step=None))
    assert report.splitlines()[2] == "**Failed** before its first step was done, exit code 4."
    assert "tokens/s" not in report


def test_without_a_gpu_nothing_of_one_is_told() -> None:
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
    assert "Of one step." in speed_section
    assert "| tokens a second | 50 tokens/s |\n" in speed_section
    assert "| host waits for data | 25.0 % of a step |" in speed_section
    for word in ("FLOPs", "GPU", "energy", "cost", "planned"):
        assert word not in speed_section
    assert "only GPUs count their peaks" in section(report, "Memory")
    assert "predicted against measured" not in report
    assert "No held-out loss was measured." in section(report, "Learning")
    assert "No answers were judged" in section(report, "Quality")
    assert "A smoke run: a tiny base on a small sample." in report


def test_predicted_and_measured_memory_are_compared_at_the_highest_peak() -> None:
    memory = section(render_report(make_facts(outcome=make_outcome())), "Memory")
    assert "| predicted, each rank | 4.0 GiB |" in memory
    assert "| measured, highest peak | 3.9 GiB |" in memory
    assert "| predicted against measured | +2.6 % |" in memory


def test_the_energy_is_that_of_all_steps() -> None:
    # 4 steps of 12,000 tokens/s x 1.25 s x 0.06 J = 3,600 J
    assert "| energy of the steps | 1.0 Wh |" in section(render_report(make_facts(outcome=make_outcome())), "Speed")


def test_many_steps_passed_over_are_counted_and_some_named() -> None:
    values = {metrics.TRAIN_LOSS: 1.0, metrics.SKIPPED: 1.0}
    rows = tuple(StepMetrics(step=step, epoch=0.1, values=values) for step in range(1, 14))
    report = render_report(make_facts(outcome=make_outcome(), rows=rows))
    assert "13 of 13 steps passed over: step 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 3 more" in section(report, "Stability")


def test_early_stopping_is_told() -> None:
    report = render_report(make_facts(outcome=make_outcome(ended_because="no better for 3 evaluations")))
    assert "It ended early, by its own rules." in report.splitlines()[2]
    assert "no better for 3 evaluations" in section(report, "Learning")


def test_a_run_elsewhere_is_named_by_its_path() -> None:
    report = render_report(make_facts(outcome=make_outcome(), paths=RunPaths(Path("/data/my runs/made"))))
    assert "launcher ask '/data/my runs/made' 'your question'" in section(report, "What next")


def test_random_weights_are_not_worth_asking() -> None:
    report = render_report(make_facts(plan=make_plan(random_weights=True), outcome=make_outcome()))
    assert "what it learnt is not" in report
    assert "launcher ask" not in report


def test_what_is_not_kept_is_said() -> None:
    outcome = make_outcome(git_commit="12ab+changes", wandb=None)
    request = replace(REQUEST, overrides=("training.config.api_key=***",))
    reproduction = section(
        render_report(make_facts(outcome=outcome, request=request, command=None)), "How to reproduce it"
    )
    assert "git checkout 12ab\n" in reproduction
    assert "Files of the checkout were changed after that commit" in reproduction
    assert "*** stands for a secret: it is not kept." in reproduction
    assert "It was started by `accelerate launch launcher/train.py`" in reproduction
    nothing = section(
        render_report(make_facts(outcome=make_outcome(git_commit=None), request=None, command=None)),
        "How to reproduce it",
    )
    assert "```" not in nothing


def test_an_online_run_has_its_address() -> None:
    trace = WandbTrace(id="x", project="p", mode="online", url="https://wandb.ai/team/p/runs/x")
    assert "In W&B: https://wandb.ai/team/p/runs/x" in render_report(make_facts(outcome=make_outcome(wandb=trace)))


def test_foreign_text_is_neither_markup_nor_a_secret() -> None:
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


def test_no_cell_of_any_table_is_torn() -> None:
    outside = re.sub(r"(?ms)^```.*?^```$", "", render_report(make_facts(outcome=make_outcome())))
    blocks = re.findall(r"(?m)(?:^\|.*\|$\n?)+", outside)
    assert len(blocks) >= 10
    for block in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1, block
