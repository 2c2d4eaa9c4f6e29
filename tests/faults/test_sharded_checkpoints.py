"""Full fine-tuning with sharded checkpoints on real ranks: killed, damaged, and resumed on other numbers of ranks."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from launcher.core.errors import ExitCode
from launcher.request.request import Request
from launcher.runs.checkpoints import find_newest
from tests.distributed.harness import Harness, TrainedRun, TrainingCase, change_json
from tests.faults.fork_server import ForkServer
from tests.faults.phase_recording_train import SIGNALS_VARIABLE
from tests.faults.restartable_run import RestartableRun, load_recorded_values, make_request, plan_run, resume_run
from tests.training.builders import relative_difference

CONFIG = {"max_steps": 5, "save_steps": 1, "save_total_limit": 3, "eval_steps": 5}
CASE = TrainingCase(strategy="fsdp2", adapter="full", config=CONFIG)
WEIGHTS = 1e-3


def shard(run: RestartableRun) -> RestartableRun:
    change_json(run.paths.plan, {"shards_checkpoints": True})
    return run


def read_model(run: TrainedRun) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in run.paths.adapter.glob("*.safetensors"):
        found |= load_file(file)
    return found


@pytest.fixture(scope="module")
def gathered(harness: Harness, fork_server: ForkServer) -> TrainedRun:
    """Train without interruption, with checkpoints gathered on rank 0."""
    run = plan_run(harness, make_request(harness.manifest(CASE), "fsdp2"))
    assert fork_server.launch(run.command).returncode == 0
    return run.trained


def stop(
    harness: Harness, fork_server: ForkServer, number: signal.Signals, step: int
) -> tuple[RestartableRun, Request]:
    request = make_request(harness.manifest(CASE), "fsdp2")
    run = shard(plan_run(harness, request))
    ended = fork_server.launch(run.command, **{SIGNALS_VARIABLE: f"{step}:1:{int(number)}"})
    assert ended.returncode != 0
    return run, request


def test_killed_fsdp2_run_resumes_from_shards_bit_for_bit(
    harness: Harness, fork_server: ForkServer, gathered: TrainedRun
) -> None:
    """Rank 1 dies by SIGKILL; then a shard of the newest checkpoint is damaged, so the previous one is used."""
    run, request = stop(harness, fork_server, signal.SIGKILL, 3)
    checkpoint, _ = find_newest(run.paths)
    assert checkpoint is not None
    assert checkpoint.manifest.sharded
    ranks = {file.name[:11] for file in checkpoint.folder.glob("shard-*")}
    assert ranks == {"shard-00001", "shard-00002"}, "both ranks wrote"
    file = next(checkpoint.folder.glob("shard-00002-*"))
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)
    resumed = shard(resume_run(harness, run, request))
    ended = fork_server.launch(resumed.command)
    assert ended.returncode == 0, ended.console
    assert resumed.trained.outcome.attempts[-1].from_step == checkpoint.manifest.step - 1
    expected, actual = read_model(gathered), read_model(resumed.trained)
    assert expected.keys() == actual.keys()
    assert all(expected[name].equal(actual[name]) for name in expected)
    assert load_recorded_values(resumed.paths) == load_recorded_values(gathered.paths)


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [
        pytest.param("fsdp2", 3, marks=pytest.mark.slow),
        pytest.param("ddp", 1, marks=pytest.mark.slow),
        pytest.param("fsdp2", 4, marks=pytest.mark.slow),
        pytest.param("zero3", 2, marks=pytest.mark.slow),
        pytest.param("zero2", 2, marks=pytest.mark.slow),
    ],
)
def test_shards_resume_on_other_ranks_and_strategies(
    harness: Harness, fork_server: ForkServer, gathered: TrainedRun, strategy: str, num_ranks: int
) -> None:
    """Two ranks of FSDP2 write the first half, and what resumes them writes shards of its own."""
    run, first = stop(harness, fork_server, signal.SIGUSR1, 1)  # stops two or three steps later
    assert run.trained.outcome.exit_code == ExitCode.PREEMPTED
    request = make_request(Path(first.expert), strategy, num_ranks)
    moved = shard(resume_run(harness, run, request))
    assert (moved.planned.plan.strategy, moved.planned.plan.batch.num_ranks) == (strategy, num_ranks)
    ended = fork_server.launch(moved.command)
    assert ended.returncode == 0, ended.console
    newest, _ = find_newest(moved.paths)
    assert newest is not None
    assert (newest.manifest.sharded, newest.manifest.num_ranks) == (True, num_ranks)
    assert moved.trained.packs == gathered.packs
    assert relative_difference(read_model(moved.trained), read_model(gathered)) < WEIGHTS
