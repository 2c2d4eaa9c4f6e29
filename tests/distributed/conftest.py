"""Fixtures of the distributed tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from launcher.training.engine.run import build_model
from tests.distributed.harness import Harness, TrainedRun, TrainingCase, make_harness
from tests.faults.fork_server import ForkServer
from tests.training.builders import reset_accelerate

Reference = Callable[[TrainingCase], TrainedRun]


@pytest.fixture(scope="session")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    created = _make_harness(tmp_path_factory.getbasetemp())
    before = os.environ.get("LAUNCHER_DATA_DIR"), torch.get_num_threads()
    os.environ["LAUNCHER_DATA_DIR"] = str(created.data)
    torch.set_num_threads(1)
    yield created
    torch.set_num_threads(before[1])
    if before[0] is None:
        del os.environ["LAUNCHER_DATA_DIR"]
    else:
        os.environ["LAUNCHER_DATA_DIR"] = before[0]


@cache
def _make_harness(folder: Path) -> Harness:
    """Once, although several folders of tests have the fixture."""
    return make_harness(Path(tempfile.mkdtemp(prefix="harness-", dir=folder)))


@pytest.fixture(scope="session")
def fork_server(harness: Harness) -> Iterator[ForkServer]:
    """Start one fork server per pytest process: its imports take longer than most launches."""
    server = _start_fork_server(harness)
    yield server
    server.close()


@cache
def _start_fork_server(harness: Harness) -> ForkServer:
    return ForkServer(harness.folder, harness.environment)


@pytest.fixture(scope="session")
def reference(harness: Harness) -> Reference:
    """Return a function that trains a case in one process, once for all cases that are compared with it."""
    cached: dict[str, TrainedRun] = {}

    def train(case: TrainingCase) -> TrainedRun:
        single_process = case.single_process
        key = repr(single_process)
        if key not in cached:
            cached[key] = harness.train_in_process(single_process)
        return cached[key]

    return train


@pytest.fixture(scope="session")
def initial_weights(harness: Harness) -> Callable[[TrainingCase], dict[str, torch.Tensor]]:
    """Return a function that builds the initial weights of a case, by the names under which they are saved."""

    def build(case: TrainingCase) -> dict[str, torch.Tensor]:
        reset_accelerate()
        module = build_model(harness.plan(case.single_process).plan, (), torch.device("cpu"))
        named = {name: weight for name, weight in module.model.named_parameters() if weight.requires_grad}
        return {_saved_name(name): weight.detach().float() for name, weight in named.items()}

    return build


def _saved_name(name: str) -> str:
    """Return the name under which PEFT saves a weight: without the adapter's name and DoRA's ".weight"."""
    return name.replace(".default", "").replace("magnitude_vector.weight", "magnitude_vector")
