"""The training script with injected delays: slow data loading, or a slow step at regular intervals."""

from __future__ import annotations

import os
import time

from torch import Tensor

from launcher.train import run as run_training
from launcher.training.data.collate import PackedBatch
from launcher.training.data.loader import MicroBatchDataset
from launcher.training.engine.engine import Engine

LOADING_VARIABLE = "LAUNCHER_TEST_LOADING"  # additional seconds to load each micro-batch
SLOW_VARIABLE = "LAUNCHER_TEST_SLOW"  # EVERY:SECONDS: every EVERY-th micro-step takes SECONDS longer

_get_item = MicroBatchDataset.__getitem__
_micro_step = Engine.micro_step
_count = 0


def get_item(self: MicroBatchDataset, index: int) -> PackedBatch:
    time.sleep(float(os.environ.get(LOADING_VARIABLE, "0")))
    return _get_item(self, index)


def micro_step(self: Engine, batch: PackedBatch, num_trained: int, *, is_last: bool) -> Tensor:
    global _count
    _count += 1
    every, _, seconds = os.environ.get(SLOW_VARIABLE, "0:0").partition(":")
    if int(every) and _count % int(every) == 0:
        time.sleep(float(seconds))
    return _micro_step(self, batch, num_trained, is_last=is_last)


if __name__ == "__main__":
    MicroBatchDataset.__getitem__ = get_item  # type: ignore[method-assign]
    Engine.micro_step = micro_step  # type: ignore[method-assign]
    run_training()
