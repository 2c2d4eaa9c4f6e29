"""HSDP on two nodes of two CPU ranks: interrupted, resumed, and continued with another strategy."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch import Tensor

from launcher.launch.start import ACCELERATE
from launcher.render import Rendezvous, render_command
from launcher.request.request import Request
from launcher.runs.checkpoints import find_newest
from launcher.training.checkpoint.shards import TensorShards
from tests.distributed.harness import Harness, TrainingCase, change_json, get_free_port
from tests.faults.fork_server import ForkServer, LaunchedProcesses
from tests.faults.phase_recording_train import SIGNALS_VARIABLE
from tests.faults.random_kills import get_newest_step
from tests.faults.restartable_run import (
    CONFIG,
    PHASE_RECORDING_SCRIPT,
    RestartableRun,
    check_same,
    load_recorded_values,
    make_run,
    plan_run,
    read_tensors,
    resume_run,
)
from tests.faults.test_resume_on_other_ranks import NO_DROPOUT, check_close

STOP_SOON = {SIGNALS_VARIABLE: f"1:3:{int(signal.SIGUSR1)}"}
SAVED = 3  # the step at which it stops
FULL = {"max_steps": 5, "save_steps": 1, "save_total_limit": 3, "eval_steps": 5}


def launch(fork_server: ForkServer, run: RestartableRun, **more: str) -> LaunchedProcesses:
    """Start one agent per node and wait for all; return the first."""
    plan, port = run.planned.plan, get_free_port()
    with ExitStack() as stack:
        agents = [
            stack.enter_context(
                fork_server.started(
                    render_command(
                        plan,
                        run.paths,
                        rendezvous=Rendezvous(host="127.0.0.1", port=port, backend="static"),
                        machine_rank=node,
                        script=PHASE_RECORDING_SCRIPT,
                        accelerate=ACCELERATE,
                    ),
                    **more,
                )
            )
            for node in range(plan.hardware.nodes)
        ]
        for agent in agents:
            agent.wait()
    return agents[0]


@pytest.mark.slow
@pytest.mark.parametrize(("adapter", "is_sharded"), [("lora", False), ("full", True)])
def test_interrupted_hsdp_run_resumes_bit_for_bit(
    harness: Harness, fork_server: ForkServer, adapter: str, is_sharded: bool
) -> None:
    case = TrainingCase(strategy="hsdp", nodes=2, adapter=adapter, config=FULL if is_sharded else CONFIG)
    uninterrupted, run = make_run(harness, case), make_run(harness, case)
    for one in (uninterrupted, run):
        change_json(one.paths.plan, {"shards_checkpoints": is_sharded})
    assert launch(fork_server, uninterrupted).returncode == 0
    assert launch(fork_server, run, **STOP_SOON).returncode != 0
    assert get_newest_step(run.paths) == SAVED
    checkpoint, _ = find_newest(run.paths)
    assert checkpoint is not None
    assert checkpoint.manifest.sharded == is_sharded
    resumed = launch(fork_server, run)
    assert resumed.returncode == 0, resumed.console
    assert run.trained.outcome.attempts[-1].from_step == SAVED
    if not is_sharded:
        check_same(run.trained, uninterrupted.trained)
        return
    assert load_recorded_values(run.paths) == load_recorded_values(uninterrupted.paths)
    assert read_tensors(run.paths.adapter) == read_tensors(uninterrupted.paths.adapter)
    expected, actual = read_shards(uninterrupted), read_shards(run)
    assert expected.keys() == actual.keys()
    assert all(expected[name].equal(actual[name]) for name in expected)


def read_shards(run: RestartableRun) -> dict[str, Tensor]:
    """Return the tensors of the last checkpoint. Which replica writes a shard is not determined."""
    checkpoint, _ = find_newest(run.paths)
    assert checkpoint is not None
    shards = TensorShards(checkpoint.folder, "")
    return {entry.name: shards.read(entry) for entry in shards.entries()}


def make_request(manifest: Path, strategy: str) -> Request:
    return Request(
        expert=str(manifest),
        profile="full",
        strategy=strategy,  # type: ignore[arg-type]
        nodes=2,
        cpu_ranks_per_node=2,
        cpu_cores_per_node=2,
    )


@pytest.mark.slow
def test_hsdp_run_continues_with_other_strategies(harness: Harness, fork_server: ForkServer) -> None:
    manifest = harness.manifest(TrainingCase(strategy="ddp", config=NO_DROPOUT))
    uninterrupted = plan_run(harness, make_request(manifest, "ddp"))
    assert launch(fork_server, uninterrupted).returncode == 0
    run = plan_run(harness, make_request(manifest, "hsdp"))
    for strategy in ("fsdp2", "hsdp", "zero2"):
        signals = f"{get_newest_step(run.paths) + 1}:1:{int(signal.SIGUSR1)}"
        assert launch(fork_server, run, **{SIGNALS_VARIABLE: signals}).returncode != 0
        run = resume_run(harness, run, make_request(manifest, strategy))
        assert (run.planned.plan.strategy, run.planned.plan.batch.num_ranks) == (strategy, 4)
    ended = launch(fork_server, run)
    assert ended.returncode == 0, ended.console
    check_close(run, uninterrupted)
