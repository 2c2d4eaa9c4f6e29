"""Fixtures of the distributed tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from launcher.training.run import build_module
from tests.distributed.bench import Bench, Cell, Trained, write_bench
from tests.training.builders import reset_accelerate

Reference = Callable[[Cell], Trained]


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = write_bench(tmp_path_factory.mktemp("bench"))
    before = os.environ.get("LAUNCHER_DATA_DIR"), torch.get_num_threads()
    os.environ["LAUNCHER_DATA_DIR"] = str(made.data)
    torch.set_num_threads(1)
    yield made
    torch.set_num_threads(before[1])
    if before[0] is None:
        del os.environ["LAUNCHER_DATA_DIR"]
    else:
        os.environ["LAUNCHER_DATA_DIR"] = before[0]


@pytest.fixture(scope="session")
def reference(bench: Bench) -> Reference:
    """The same training in one process, run once for all cells that are compared with it."""
    made: dict[str, Trained] = {}

    def train(cell: Cell) -> Trained:
        alone = cell.alone
        key = repr(alone)
        if key not in made:
            made[key] = bench.train_here(alone)
        return made[key]

    return train


@pytest.fixture(scope="session")
def begin(bench: Bench) -> Callable[[Cell], dict[str, torch.Tensor]]:
    """The weights that a training begins with, by the names that it saves them under."""

    def build(cell: Cell) -> dict[str, torch.Tensor]:
        reset_accelerate()
        module = build_module(bench.plan(cell.alone).plan, (), torch.device("cpu"))
        named = {name: weight for name, weight in module.model.named_parameters() if weight.requires_grad}
        return {_saved_name(name): weight.detach().float() for name, weight in named.items()}

    return build


def _saved_name(name: str) -> str:
    """PEFT leaves out the adapter's name, and of DoRA's magnitudes the word "weight"."""
    return name.replace(".default", "").replace("magnitude_vector.weight", "magnitude_vector")
