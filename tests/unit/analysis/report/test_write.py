"""report.md is written however a run ends, and a failure to write it changes nothing else."""

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

from launcher.analysis.report import load_facts, render_report, write_report
from launcher.analysis.report.render import format_command
from launcher.core import metrics
from launcher.core.metrics import StepMetrics, append_metrics
from launcher.core.run_paths import RunPaths
from launcher.request.arguments import add_request_arguments, make_request
from launcher.request.request import Request
from launcher.runs.record import Outcome, write_outcome
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


@pytest.mark.process
def test_killed_run_gets_a_report(arena: Arena) -> None:
    result = arena.run("outcome('running'); os.kill(os.getpid(), signal.SIGKILL)")
    assert result.code == 4
    report = arena.paths.report.read_text()
    assert "**Crashed** before the first step finished" in report
    assert "the training was killed (SIGKILL)" in report
    assert f"launcher train --resume {arena.paths.root}" in report


@pytest.mark.process
def test_unwritable_report_keeps_the_exit_code(arena: Arena) -> None:
    arena.paths.report.mkdir()
    result = arena.run("outcome('running'); os.kill(os.getpid(), signal.SIGKILL)")
    assert result.code == 4
    warning = f"warning: cannot write the report: {arena.paths.report} cannot be"
    assert [line for line in result.stderr.splitlines() if line.startswith(warning)], result.stderr


@pytest.mark.parametrize("damage", ["plan", "metrics"])
def test_damaged_run_gives_a_warning(arena: Arena, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    outcome(arena.paths)
    getattr(arena.paths, damage).write_text("{}\n")
    write_report(arena.paths)
    assert not arena.paths.report.exists()
    assert capsys.readouterr().err.startswith("warning: cannot write the report: ")


def test_secrets_of_the_environment_are_redacted(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome(arena.paths, observed={"device": "cuda with hush-hush-1234"})
    monkeypatch.setenv("MY_API_KEY", "hush-hush-1234")
    write_report(arena.paths)
    text = arena.paths.report.read_text()
    assert "hush" not in text
    assert "cuda with" in text


def test_facts_are_loaded_from_the_directory(arena: Arena) -> None:
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
    names = [name for name, _ in facts.files]
    assert {"plan.json", "metrics.jsonl", "checkpoints/", "logs/"} <= set(names)
    assert "deepspeed.json" not in names
    arena.paths.request.unlink()
    arena.paths.command.unlink()
    incomplete = load_facts(arena.paths)
    assert (incomplete.request, incomplete.command) == (None, None)
    assert "## How to reproduce" in render_report(incomplete)


@pytest.mark.process
def test_command_prints_and_writes(arena: Arena) -> None:
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
            max_nonfinite_steps=0,
            hang_seconds=60,
        ),
        Request(expert="neo4j", cpu_ranks_per_node=2),
    ],
)
def test_reproduce_command_parses_to_the_same_request(request_: Request) -> None:
    parser = argparse.ArgumentParser()
    add_request_arguments(parser)
    launcher, verb, *arguments = shlex.split(format_command(request_))
    assert (launcher, verb) == ("launcher", "train")
    assert make_request(parser.parse_args(arguments)) == request_


def test_reproduce_command_covers_every_request_field() -> None:
    nothing = format_command(Request(expert="neo4j"))
    values: dict[str, object] = {
        name: "x"
        for name in Request.__dataclass_fields__
        if name not in ("expert", "overrides", "random_weights", "currency")
    }
    values |= {"overrides": ("a=b",), "random_weights": True, "calibrated": False}
    for name, value in values.items():
        changed = replace(Request(expert="neo4j"), **{name: value})  # type: ignore[arg-type]
        assert format_command(changed) != nothing, name
    assert "--price 24.0EUR/node" in format_command(Request(expert="neo4j", price_per_node_hour=24.0, currency="EUR"))
