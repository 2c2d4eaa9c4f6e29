"""Processes that do not match the plan are refused: all differences, reported once, exit code 5."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from launcher.core.errors import ExitCode
from launcher.core.run_paths import RunPaths
from launcher.render import Command, render_accelerate, render_deepspeed
from launcher.render.spec import make_launch_spec
from tests.conftest import ROOT
from tests.distributed.conftest import Reference
from tests.distributed.harness import Harness, ProcessResult, TrainedRun, TrainingCase, change_json, make_command

TITLE = "the started processes do not match the plan"

ChangeFiles = Callable[[Harness, RunPaths], None]


def launch_changed(
    harness: Harness, case: TrainingCase, change: ChangeFiles, drop: tuple[str, ...] = ()
) -> tuple[ProcessResult, TrainedRun]:
    """Launch the rendered command with changed config files."""
    planned, paths = harness.write(case)
    change(harness, paths)
    command = make_command(planned, paths)
    kept = {name: value for name, value in command.environment.items() if name not in drop}
    return harness.launch(Command(argv=command.argv, environment=kept)), TrainedRun(paths)


def check_refused(ended: ProcessResult, trained: TrainedRun, *messages: str) -> None:
    assert ended.returncode != 0
    assert ended.console.count(TITLE) == 1, ended.console
    assert "Traceback" not in ended.console.partition("torch/distributed/elastic")[0]
    for message in messages:
        assert message in trained.outcome.error
        assert ended.console.count(message) == 1
    assert "command.txt" in trained.outcome.error
    assert (trained.outcome.status, trained.outcome.exit_code) == ("failed", ExitCode.WRONG_TOPOLOGY)
    assert not trained.paths.metrics.exists()


def use_files_of(other: TrainingCase) -> ChangeFiles:
    """Return a change that replaces the rendered files of the run by those of another plan."""

    def write(harness: Harness, paths: RunPaths) -> None:
        spec = make_launch_spec(harness.plan(other).plan)
        paths.accelerate.write_text(render_accelerate(spec, deepspeed_config_file=str(paths.deepspeed)))
        if spec.uses_deepspeed:
            paths.deepspeed.write_text(render_deepspeed(spec))

    return write


@pytest.mark.slow
def test_ddp_instead_of_fsdp2_with_too_few_ranks_is_refused(harness: Harness) -> None:
    case = TrainingCase(strategy="fsdp2", ranks_per_node=3)
    ended, trained = launch_changed(harness, case, use_files_of(TrainingCase(strategy="ddp")))
    check_refused(ended, trained, "ranks: 2 started, 3 planned", "strategy: accelerate runs ddp, fsdp2 is planned")


@pytest.mark.slow
def test_fsdp2_instead_of_ddp_is_refused(harness: Harness) -> None:
    """On CPU ranks accelerate runs DDP whatever its config says: the requested strategy still differs."""
    ended, trained = launch_changed(harness, TrainingCase(strategy="ddp"), use_files_of(TrainingCase(strategy="fsdp2")))
    check_refused(ended, trained, "strategy: accelerate is configured for fsdp2, ddp is planned")


@pytest.mark.slow
def test_zero2_instead_of_zero3_is_refused(harness: Harness) -> None:
    ended, trained = launch_changed(
        harness, TrainingCase(strategy="zero3"), use_files_of(TrainingCase(strategy="zero2"))
    )
    check_refused(ended, trained, "strategy: accelerate runs zero2, zero3 is planned")


@pytest.mark.slow
def test_one_process_instead_of_two_is_refused(harness: Harness) -> None:
    def start_one(_harness: Harness, paths: RunPaths) -> None:
        config = yaml.safe_load(paths.accelerate.read_text())
        paths.accelerate.write_text(yaml.safe_dump(config | {"num_processes": 1}))

    ended, trained = launch_changed(harness, TrainingCase(strategy="ddp"), start_one)
    check_refused(ended, trained, "ranks: 1 started, 2 planned")


@pytest.mark.slow
def test_edited_deepspeed_config_is_refused(harness: Harness) -> None:
    def edit(_harness: Harness, paths: RunPaths) -> None:
        changes = {"gradient_accumulation_steps": 7, "gradient_clipping": 0.25, "train_batch_size": 14}
        change_json(paths.deepspeed, changes)

    ended, trained = launch_changed(harness, TrainingCase(strategy="zero2"), edit)
    check_refused(
        ended,
        trained,
        "gradient_accumulation_steps: DeepSpeed has 7, 3 is planned",
        "gradient_clipping: DeepSpeed has 0.25, 0.5 is planned",
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "fsdp2", "zero3"])
def test_separate_copies_are_refused(harness: Harness, strategy: Any) -> None:
    """Processes with WORLD_SIZE but without a rank are refused before they wait for others."""
    case = TrainingCase(strategy=strategy, ranks_per_node=1 if strategy == "single" else 2)
    planned, paths = harness.write(case)
    argv = (sys.executable, str(ROOT / "launcher/train.py"), "--plan", str(paths.plan))
    environment = {**make_command(planned, paths).environment, "WORLD_SIZE": "2"}
    ended = harness.launch(Command(argv=argv, environment=environment))
    assert ended.returncode == ExitCode.WRONG_TOPOLOGY, ended.console
    check_refused(ended, TrainedRun(paths), "separate copy")


@pytest.mark.slow
def test_fsdp2_without_our_environment_variables(harness: Harness, reference: Reference) -> None:
    """Ranks train together although accelerate alone would train one copy per process."""
    case = TrainingCase(strategy="fsdp2")
    variables = ("ACCELERATE_BYPASS_DEVICE_MAP", "ACCELERATE_TORCH_DEVICE")
    ended, trained = launch_changed(harness, case, lambda _harness, _paths: None, drop=variables)
    assert ended.returncode == 0, ended.console
    assert trained.packs == reference(case).packs
    assert [trained.placement(rank)["num_dtensors"] for rank in (0, 1)] == [52, 52]
