"""The global batch of an epoch that has fewer sequences: the same number in report, comparison and W&B."""

from __future__ import annotations

from pathlib import Path

from launcher.analysis.compare.config_diff import collect_plan_settings
from launcher.analysis.compare.load_run import load_run_facts
from launcher.analysis.report import write_report
from launcher.runs.record import load_record, write_outcome
from launcher.runs.wandb_settings import make_config
from tests.made_runs import MadeRun, write_run


def test_every_output_has_the_sequences_of_a_step(tmp_path: Path) -> None:
    paths = write_run(tmp_path, MadeRun(run_id="small"))
    record = load_record(paths)
    assert record.outcome is not None
    assert record.plan.batch.global_batch_size == 48
    outcome = record.outcome.model_copy(update={"train_sequences": 25})
    write_outcome(paths.outcome, outcome)
    write_report(paths)
    assert "25 sequences of 2,048 tokens, packed; 48 planned, but an epoch has fewer" in paths.report.read_text()
    assert load_run_facts(paths).traits.global_batch_size == 25
    assert collect_plan_settings(record.plan, outcome)["what is learnt", "batch.global_batch_size"] == "25"
    assert make_config(record.plan, {}, outcome)["global_batch_size"] == 25
    assert make_config(record.plan, {})["global_batch_size"] == 48
