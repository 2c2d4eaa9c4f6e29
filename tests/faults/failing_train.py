"""The training script with injected faults: a rank runs out of memory, dies, or computes a NaN loss.

Only the micro-step is replaced; it calls the original one first.
"""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path

import torch
from torch import Tensor

from launcher.train import run as run_training
from launcher.training.data.collate import PackedBatch
from launcher.training.engine.engine import Engine

FULL_VARIABLE = "LAUNCHER_TEST_FULL"  # RANK:TOKENS: larger micro-batches run out of memory on this rank
POISON_VARIABLE = "LAUNCHER_TEST_POISON"  # RANK:COUNT: the loss of this rank's COUNT-th micro-step is NaN
DEATH_VARIABLE = "LAUNCHER_TEST_DEATH"  # RANK:COUNT:FILE: this rank dies once, in its COUNT-th micro-step

_real = Engine.micro_step
_count = 0


def micro_step(self: Engine, batch: PackedBatch, num_trained: int, *, is_last: bool) -> Tensor:
    global _count
    _count += 1
    rank, _, count = os.environ.get(POISON_VARIABLE, "-1:0").partition(":")
    is_poisoned = self.rank == int(rank) and _count == int(count)
    loss = _real(self, batch, num_trained / math.nan if is_poisoned else num_trained, is_last=is_last)  # type: ignore[arg-type]
    rank, _, tokens = os.environ.get(FULL_VARIABLE, "-1:0").partition(":")
    if self.rank == int(rank) and _count > 2 and batch.input_ids.numel() > int(tokens):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    if DEATH_VARIABLE in os.environ:
        rank, count, mark = os.environ[DEATH_VARIABLE].split(":", 2)
        if self.rank == int(rank) and _count == int(count) and not Path(mark).exists():
            Path(mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return loss


if __name__ == "__main__":
    Engine.micro_step = micro_step  # type: ignore[method-assign]
    run_training()
