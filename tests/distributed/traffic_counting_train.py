"""The training script with counted collectives: each rank writes how many bytes each step communicates.

accelerate starts it instead of launcher/train.py, with the same rendered command. It counts the operations that torch
passes to the process group, from Python, FSDP2, DeepSpeed, or DDP's reducer in C++.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.core.metrics import StepMetrics
from launcher.train import run as run_training
from launcher.training import trainer as session
from launcher.training.engine.run import TrainingRun
from launcher.training.observers.console import Console

# Position of the argument that has the full size (of all ranks together), by operation.
_FULL_TENSOR_ARGUMENT = {
    "allreduce_": 0,
    "allreduce_coalesced_": 0,
    "reduce_": 0,
    "broadcast_": 0,
    "allgather_": 0,
    "_allgather_base_": 0,
    "allgather_into_tensor_coalesced_": 0,
    "reduce_scatter_": 1,
    "_reduce_scatter_base_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
}


class CollectiveCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, list[int]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.split("::")[1]
            self.sizes[name].append(
                _count_bytes(args[_FULL_TENSOR_ARGUMENT[name]]) if name in _FULL_TENSOR_ARGUMENT else -1
            )
        return func(*args, **(kwargs or {}))


def _count_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_count_bytes(one) for one in value)


class TrafficRecorder(Console):
    """Counts from the start of a step to the start of the next one, or to an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self._counting: CollectiveCounter | None = None

    def before_step(self, run: TrainingRun, step: int) -> None:
        super().before_step(run, step)
        self._write_counts(run, step - 1)
        self._counting = CollectiveCounter()
        self._counting.__enter__()

    def on_evaluation(self, run: TrainingRun, metrics: StepMetrics) -> bool:
        self._write_counts(run, metrics.step)
        return super().on_evaluation(run, metrics)

    def on_end(self, run: TrainingRun, step: int) -> None:
        self._write_counts(run, step)
        super().on_end(run, step)

    def _write_counts(self, run: TrainingRun, step: int) -> None:
        if self._counting is not None:
            self._counting.__exit__(None, None, None)
            file = run.paths.logs / f"traffic-{run.engine.rank}-{step}.json"
            file.write_text(json.dumps(self._counting.sizes))
            self._counting = None


if __name__ == "__main__":
    vars(session)["Console"] = TrafficRecorder
    run_training()
