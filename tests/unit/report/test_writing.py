"""report.md in a run directory: written however a run ended, by launcher and verb alike, and never in its way."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import metrics
from launcher.arguments import add_request_arguments, make_request
from launcher.inputs import Request
from launcher.metrics import StepMetrics, append_metrics
from launcher.paths import RunPaths
from launcher.record import Outcome, write_outcome
from launcher.report import load_facts, render_report, write_report
from launcher.report.asking import format_command
from tests.conftest import ROOT, python_path
from tests.unit.standins import Arena, make_arena


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = make_arena(tmp_path)
    yield arena
    arena.close()


def outcome(paths: RunPaths, **changes: object) -> None:
    known = Outcome(run_id=paths.run_id, status="done", exit_code=0, started_at="2026-11-15T10:00:00+00:00", pid=1)
    write_outcome(paths.outcome, known.model_copy(update=changes))


def test_a_killed_run_is_reported_by_the_launcher(arena: Arena) -> None:
    result = arena.run("outcome('running'); os.kill(os.getpid(), signal.SIGKILL)")
    assert result.code == 4
    report = arena.paths.report.read_text()
    assert "**Died** before its first step was done" in report
    assert "the training was killed (SIGKILL)" in report
    assert f"launcher train neo4j --resume {arena.paths.root}" in report


def test_a_report_that_cannot_be_written_changes_no_exit_code(arena: Arena) -> None:
    arena.paths.report.mkdir()
    result = arena.run("outcome('running'); os.kill(os.getpid(), signal.SIGKILL)")
    assert result.code == 4
    assert result.stderr.splitlines()[-2].startswith(f"warning: no report was written: {arena.paths.report} cannot be")


@pytest.mark.parametrize("damage", ["plan", "metrics"])
def test_a_damaged_run_makes_a_warning(arena: Arena, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    outcome(arena.paths)
    getattr(arena.paths, damage).write_text("{}\n")
    write_report(arena.paths)
    assert not arena.paths.report.exists()
    assert capsys.readouterr().err.startswith("warning: no report was written: ")


def test_secrets_of_the_environment_never_appear(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome(arena.paths, observed={"device": "cuda with hush-hush-1234"})
    monkeypatch.setenv("MY_API_KEY", "hush-hush-1234")
    write_report(arena.paths)
    text = arena.paths.report.read_text()
    assert "hush" not in text
    assert "cuda with" in text


def test_facts_are_what_lies_in_the_directory(arena: Arena) -> None:
    outcome(arena.paths)
    append_metrics(arena.paths.metrics, StepMetrics(step=1, epoch=0.1, values={metrics.TRAIN_LOSS: 2.0}))
    for step in (10, 20):
        arena.paths.checkpoint(step).mkdir(parents=True)
    facts = load_facts(arena.paths)
    assert facts.saved_step == 20
    assert facts.request is not None
    assert format_command(facts.request) == "launcher train neo4j --profile smoke"
    assert facts.command is not None
    assert "accelerate launch" in facts.command
    names = [file.name for file in facts.files]
    assert {"plan.json", "metrics.jsonl", "checkpoints/", "logs/"} <= set(names)
    assert "deepspeed.json" not in names
    arena.paths.request.unlink()
    arena.paths.command.unlink()
    bare = load_facts(arena.paths)
    assert (bare.request, bare.command) == (None, None)
    assert "## How to reproduce it" in render_report(bare)


def test_the_verb_prints_and_writes(arena: Arena) -> None:
    outcome(arena.paths)
    environment = {**os.environ, "PYTHONPATH": python_path()}
    command = [sys.executable, "-m", "launcher", "report", "r", "--runs-dir", str(arena.paths.root.parent)]
    shown = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("# neo4j, run `r`\n\n**Done.**")
    assert not arena.paths.report.exists()
    written = subprocess.run(
        [*command, "--write"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert arena.paths.report.read_text() == written.stdout == shown.stdout


@pytest.mark.parametrize(
    "request_",
    [
        Request(expert="neo4j"),
        Request(
            expert="my experts/manifest.json",
            overrides=("training.config.rank=8", "name=a b"),
            base="Qwen/Qwen3-0.6B",
            max_steps=5,
            profile="full",
            gpu="rtx4090",
            gpus_per_node=4,
            nodes=2,
            cpu_cores_per_node=16,
            ram_gib_per_node=64.5,
            strategy="fsdp2",
            price_per_gpu_hour=0.4,
            tokens_per_row=300,
            random_weights=True,
            save_errors="continue",
            max_bad_steps=0,
            hang_seconds=60,
        ),
        Request(expert="neo4j", cpu_ranks_per_node=2),
    ],
)
def test_the_command_asks_for_the_same_again(request_: Request) -> None:
    parser = argparse.ArgumentParser()
    add_request_arguments(parser)
    launcher, verb, *arguments = shlex.split(format_command(request_))
    assert (launcher, verb) == ("launcher", "train")
    assert make_request(parser.parse_args(arguments)) == request_


def test_every_field_of_a_request_is_in_its_command() -> None:
    nothing = format_command(Request(expert="neo4j"))
    values: dict[str, object] = {
        name: "x" for name in Request.__dataclass_fields__ if name not in ("expert", "overrides", "random_weights")
    }
    values |= {"overrides": ("a=b",), "random_weights": True, "calibrated": False}
    for name, value in values.items():
        changed = replace(Request(expert="neo4j"), **{name: value})  # type: ignore[arg-type]
        assert format_command(changed) != nothing, name
