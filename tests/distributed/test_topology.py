"""What was started is not what was planned: all mismatches at once, told once, exit code 5."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from launcher.errors import ExitCode
from launcher.paths import RunPaths
from launcher.render import Command, render_accelerate, render_deepspeed
from tests.conftest import ROOT
from tests.distributed.bench import Bench, Cell, Ended, Trained, change_json, make_command
from tests.distributed.conftest import Reference

TITLE = "what was started is not what was planned"

Change = Callable[[Bench, RunPaths], None]


def launch_changed(bench: Bench, cell: Cell, change: Change, drop: tuple[str, ...] = ()) -> tuple[Ended, Trained]:
    """The rendered command, with files that somebody changed."""
    planned, paths = bench.write(cell)
    change(bench, paths)
    command = make_command(planned, paths)
    kept = {name: value for name, value in command.environment.items() if name not in drop}
    return bench.launch(Command(argv=command.argv, environment=kept)), Trained(paths)


def check_refused(ended: Ended, trained: Trained, *said: str) -> None:
    assert ended.returncode != 0
    assert ended.console.count(TITLE) == 1, ended.console
    assert "Traceback" not in ended.console.partition("torch/distributed/elastic")[0]
    for words in said:
        assert words in trained.outcome.error
        assert ended.console.count(words) == 1
    assert "command.txt" in trained.outcome.error
    assert (trained.outcome.status, trained.outcome.exit_code) == ("failed", ExitCode.WRONG_TOPOLOGY)
    assert not trained.paths.metrics.exists()


def write_files_of(other: Cell) -> Change:
    """The files of another plan, in place of this run's own."""

    def write(bench: Bench, paths: RunPaths) -> None:
        plan = bench.plan(other).plan
        uses_deepspeed = other.strategy.startswith("zero")
        deepspeed = str(paths.deepspeed) if uses_deepspeed else None
        paths.accelerate.write_text(render_accelerate(plan, deepspeed_config_file=deepspeed))
        if uses_deepspeed:
            paths.deepspeed.write_text(render_deepspeed(plan))

    return write


def test_ddp_in_place_of_fsdp2_with_too_few_ranks(bench: Bench) -> None:
    cell = Cell(strategy="fsdp2", ranks_per_node=3)
    ended, trained = launch_changed(bench, cell, write_files_of(Cell(strategy="ddp")))
    check_refused(
        ended, trained, "ranks: 2 were started, 3 were planned", "strategy: accelerate runs ddp, fsdp2 was planned"
    )


@pytest.mark.slow
def test_fsdp2_in_place_of_ddp(bench: Bench) -> None:
    """On CPU ranks accelerate runs DDP whatever its file says: what was asked for differs all the same."""
    ended, trained = launch_changed(bench, Cell(strategy="ddp"), write_files_of(Cell(strategy="fsdp2")))
    check_refused(ended, trained, "strategy: accelerate was told to run fsdp2, ddp was planned")


@pytest.mark.slow
def test_zero2_in_place_of_zero3(bench: Bench) -> None:
    ended, trained = launch_changed(bench, Cell(strategy="zero3"), write_files_of(Cell(strategy="zero2")))
    check_refused(ended, trained, "strategy: accelerate runs zero2, zero3 was planned")


def test_one_process_in_place_of_two(bench: Bench) -> None:
    def start_one(_bench: Bench, paths: RunPaths) -> None:
        config = yaml.safe_load(paths.accelerate.read_text())
        paths.accelerate.write_text(yaml.safe_dump(config | {"num_processes": 1}))

    ended, trained = launch_changed(bench, Cell(strategy="ddp"), start_one)
    check_refused(ended, trained, "ranks: 1 were started, 2 were planned")


@pytest.mark.slow
def test_values_edited_in_deepspeeds_file(bench: Bench) -> None:
    def edit(_bench: Bench, paths: RunPaths) -> None:
        changes = {"gradient_accumulation_steps": 7, "gradient_clipping": 0.25, "train_batch_size": 14}
        change_json(paths.deepspeed, changes)

    ended, trained = launch_changed(bench, Cell(strategy="zero2"), edit)
    check_refused(
        ended,
        trained,
        "gradient_accumulation_steps: DeepSpeed has 7, 3 was planned",
        "gradient_clipping: DeepSpeed has 0.25, 0.5 was planned",
    )


SLOW_COPIES = [pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp2", "zero3")]


@pytest.mark.parametrize("strategy", ["single", *SLOW_COPIES])
def test_separate_copies(bench: Bench, strategy: Any) -> None:
    """Processes that know of each other by WORLD_SIZE alone: they are refused before they wait for anybody."""
    cell = Cell(strategy=strategy, ranks_per_node=1 if strategy == "single" else 2)
    planned, paths = bench.write(cell)
    argv = (sys.executable, str(ROOT / "launcher/train.py"), "--plan", str(paths.plan))
    environment = {**make_command(planned, paths).environment, "WORLD_SIZE": "2"}
    ended = bench.launch(Command(argv=argv, environment=environment))
    assert ended.returncode == ExitCode.WRONG_TOPOLOGY, ended.console
    check_refused(ended, Trained(paths), "separate copies")


@pytest.mark.slow
def test_engines_make_real_ranks_without_our_variables(bench: Bench, reference: Reference) -> None:
    """accelerate alone would train as many copies as there are processes."""
    cell = Cell(strategy="fsdp2")
    variables = ("ACCELERATE_BYPASS_DEVICE_MAP", "ACCELERATE_TORCH_DEVICE")
    ended, trained = launch_changed(bench, cell, lambda _bench, _paths: None, drop=variables)
    assert ended.returncode == 0, ended.console
    assert trained.packs == reference(cell).packs
    assert [trained.placement(rank)["num_dtensors"] for rank in (0, 1)] == [52, 52]
