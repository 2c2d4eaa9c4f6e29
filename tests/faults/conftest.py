"""Fixtures of the fault tests, and the table of kills at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.conftest import ROOT
from tests.distributed.bench import Bench, Cell, Trained
from tests.distributed.conftest import bench  # noqa: F401  (a fixture)
from tests.faults.courses import make_course
from tests.faults.killing import Tally
from tests.faults.warm import Warm

Undisturbed = Callable[[Cell], Trained]
TALLY = pytest.StashKey[Tally]()


@pytest.fixture(scope="session")
def warm(bench: Bench) -> Iterator[Warm]:  # noqa: F811
    """One for all tests of this process: its imports take longer than most launches do."""
    made = Warm(bench.folder, bench.environment)
    yield made
    made.close()


@pytest.fixture(scope="session")
def undisturbed(bench: Bench, warm: Warm) -> Undisturbed:  # noqa: F811
    """What a run becomes if nothing happens to it, trained once for all tests that compare with it."""
    made: dict[str, Trained] = {}

    def train(cell: Cell) -> Trained:
        if repr(cell) not in made:
            course = make_course(bench, cell)
            launched = warm.launch(course.command)
            assert launched.returncode == 0, launched.console
            made[repr(cell)] = course.trained
        return made[repr(cell)]

    return train


@pytest.fixture(scope="session")
def tally(request: pytest.FixtureRequest) -> Tally:
    return request.config.stash.setdefault(TALLY, Tally())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    tally = config.stash.get(TALLY, None)
    if tally is None or not tally.kills:
        return
    terminalreporter.section(f"{len(tally.kills)} kills, seed {tally.seed}")
    terminalreporter.write_line(tally.describe())
    if tally.is_torture:
        file = ROOT / f"runs/torture-{tally.seed}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"{tally.describe()}\n\n{tally.list_kills()}\n")
        terminalreporter.write_line(f"each kill: {file}")
