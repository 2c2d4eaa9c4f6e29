"""The training script, with its collectives counted: each rank writes down how many bytes every step exchanged.

Started by accelerate in place of launcher/train.py, by the same rendered command. What is counted are the operations
that torch hands to the process group, whoever asks for them: Python, FSDP2, DeepSpeed, or DDP's reducer in C++.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.metrics import StepMetrics
from launcher.train import main
from launcher.training import session
from launcher.training.observers.console import Console
from launcher.training.run import Run

# Of each operation, the argument that is as large as what all ranks together hold of it.
_WHOLE = {
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


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, list[int]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.split("::")[1]
            self.sizes[name].append(_count_bytes(args[_WHOLE[name]]) if name in _WHOLE else -1)
        return func(*args, **(kwargs or {}))


def _count_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_count_bytes(one) for one in value)


class Counted(Console):
    """From one step's beginning to the next: evaluations and checkpoints are left out, where none stands between."""

    def __init__(self) -> None:
        super().__init__()
        self._counting: Counting | None = None

    def before_step(self, run: Run, step: int) -> None:
        super().before_step(run, step)
        self._tell(run, step - 1)
        self._counting = Counting()
        self._counting.__enter__()

    def on_evaluation(self, run: Run, metrics: StepMetrics) -> bool:
        self._tell(run, metrics.step)
        return super().on_evaluation(run, metrics)

    def on_end(self, run: Run, step: int) -> None:
        self._tell(run, step)
        super().on_end(run, step)

    def _tell(self, run: Run, step: int) -> None:
        if self._counting is not None:
            self._counting.__exit__(None, None, None)
            file = run.paths.logs / f"traffic-{run.engine.rank}-{step}.json"
            file.write_text(json.dumps(self._counting.sizes))
            self._counting = None


if __name__ == "__main__":
    vars(session)["Console"] = Counted
    sys.exit(main())
