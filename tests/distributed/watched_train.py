"""The training script, watched: each rank writes down how its weights lie, and steps take as long as a test wants.

Started by accelerate in place of launcher/train.py, by the same rendered command. Nothing of ours is replaced: one
observer is added to those that every run has.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from torch.distributed.tensor import DTensor

from launcher.metrics import StepMetrics
from launcher.train import main
from launcher.training import session
from launcher.training.observers.console import Console
from launcher.training.optim import innermost
from launcher.training.run import Run

STEP_SECONDS_VARIABLE = "LAUNCHER_TEST_STEP_SECONDS"
END_SECONDS_VARIABLE = "LAUNCHER_TEST_END_SECONDS"  # before the first rank saves


class Watching(Console):
    def on_step(self, run: Run, metrics: StepMetrics) -> None:
        """Behind an update, where engines have put away what they gathered."""
        super().on_step(run, metrics)
        file = run.paths.logs / f"placement-{run.engine.rank}.json"
        if not file.exists():
            file.write_text(json.dumps(describe_placement(run)))
        time.sleep(float(os.environ.get(STEP_SECONDS_VARIABLE, "0")))

    def on_end(self, run: Run, step: int) -> None:
        super().on_end(run, step)
        (run.paths.logs / f"end-{run.engine.rank}.json").write_text(json.dumps(step))
        if run.engine.is_main:
            time.sleep(float(os.environ.get(END_SECONDS_VARIABLE, "0")))


def describe_placement(run: Run) -> dict[str, Any]:
    engine = run.engine
    parameters = list(engine.module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    zero: Any = getattr(engine.optimizer, "optimizer", None)
    stepped = [parameter for group in innermost(engine.optimizer).param_groups for parameter in group["params"]]
    stepped = getattr(zero, "fp32_partitioned_groups_flat", stepped)  # of ZeRO-3, whose groups are empty between steps
    return {
        "pid": os.getpid(),
        "num_parameters": len(parameters),
        "num_dtensors": sum(isinstance(parameter, DTensor) for parameter in parameters),
        "num_partitioned": sum(hasattr(parameter, "ds_tensor") for parameter in parameters),
        # Small ones stay whole under ZeRO-3 (stage3_param_persistence_threshold).
        "num_empty": sum(_local(parameter) == 0 for parameter in parameters),
        "whole_elements": sum(_whole(parameter) for parameter in parameters),
        "held_elements": sum(_held(parameter) for parameter in parameters),
        "trained_elements": sum(_whole(parameter) for parameter in trained),
        "stepped_elements": sum(_local(parameter) for parameter in stepped),
        "splits_gradients": bool(getattr(zero, "partition_gradients", False)),
    }


def _whole(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _held(parameter: Any) -> int:
    """By this rank, as its share."""
    return int(parameter.ds_tensor.numel()) if hasattr(parameter, "ds_tensor") else _local(parameter)


def _local(parameter: Any) -> int:
    return int(parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel())


if __name__ == "__main__":
    vars(session)["Console"] = Watching
    sys.exit(main())
