"""Fixtures of the fault tests, and the summary of all kills after the last test."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import ROOT
from tests.distributed.conftest import fork_server, harness  # noqa: F401  (fixtures)
from tests.distributed.harness import Harness, TrainedRun, TrainingCase
from tests.faults.fork_server import ForkServer
from tests.faults.random_kills import KillLog
from tests.faults.restartable_run import make_run

TrainUninterrupted = Callable[[TrainingCase], TrainedRun]
KILL_LOG = pytest.StashKey[KillLog]()


@pytest.fixture(scope="session")
def uninterrupted(
    harness: Harness,  # noqa: F811
    fork_server: ForkServer,  # noqa: F811
) -> TrainUninterrupted:
    """Return a function that trains a case without interruption, once for all tests that compare with it."""
    cached: dict[str, TrainedRun] = {}

    def train(case: TrainingCase) -> TrainedRun:
        if repr(case) not in cached:
            run = make_run(harness, case)
            launched = fork_server.launch(run.command)
            assert launched.returncode == 0, launched.console
            cached[repr(case)] = run.trained
        return cached[repr(case)]

    return train


@pytest.fixture(scope="session")
def kill_log(request: pytest.FixtureRequest) -> KillLog:
    return request.config.stash.setdefault(KILL_LOG, KillLog())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    kill_log = config.stash.get(KILL_LOG, None)
    if kill_log is None or not kill_log.kills:
        return
    terminalreporter.section(f"{len(kill_log.kills)} kills, seed {kill_log.seed}")
    terminalreporter.write_line(kill_log.describe())
    if kill_log.is_torture:
        file = ROOT / f"runs/torture-{kill_log.seed}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"{kill_log.describe()}\n\n{kill_log.list_kills()}\n")
        terminalreporter.write_line(f"each kill: {file}")
