"""The training script with placement records: each rank writes how its weights are sharded; tests set the step time.

accelerate starts it instead of launcher/train.py, with the same rendered command. Only the console observer is
extended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from torch.distributed.tensor import DTensor

from launcher.core.metrics import StepMetrics
from launcher.core.run_paths import write_text_atomically
from launcher.train import run as run_training
from launcher.training import trainer as session
from launcher.training.engine.optimizer import unwrap_optimizer
from launcher.training.engine.run import TrainingRun
from launcher.training.observers.console import Console

STEP_SECONDS_VARIABLE = "LAUNCHER_TEST_STEP_SECONDS"
END_SECONDS_VARIABLE = "LAUNCHER_TEST_END_SECONDS"  # additional time of rank 0 before it exits


class PlacementRecorder(Console):
    def on_step(self, run: TrainingRun, metrics: StepMetrics) -> None:
        """Record after an update, when engines have freed gathered weights."""
        super().on_step(run, metrics)
        file = run.paths.logs / f"placement-{run.engine.rank}.json"
        if not file.exists():
            write_text_atomically(file, json.dumps(describe_placement(run)))
        time.sleep(float(os.environ.get(STEP_SECONDS_VARIABLE, "0")))

    def on_end(self, run: TrainingRun, step: int) -> None:
        super().on_end(run, step)
        write_text_atomically(run.paths.logs / f"end-{run.engine.rank}.json", json.dumps(step))
        if run.engine.is_main:
            time.sleep(float(os.environ.get(END_SECONDS_VARIABLE, "0")))


def describe_placement(run: TrainingRun) -> dict[str, Any]:
    engine = run.engine
    parameters = list(engine.module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    zero: Any = getattr(engine.optimizer, "optimizer", None)
    stepped = [parameter for group in unwrap_optimizer(engine.optimizer).param_groups for parameter in group["params"]]
    stepped = getattr(zero, "fp32_partitioned_groups_flat", stepped)  # ZeRO-3: its param_groups are empty between steps
    return {
        "pid": os.getpid(),
        "num_parameters": len(parameters),
        "num_dtensors": sum(isinstance(parameter, DTensor) for parameter in parameters),
        "num_partitioned": sum(hasattr(parameter, "ds_tensor") for parameter in parameters),
        # ZeRO-3 does not shard small parameters (stage3_param_persistence_threshold).
        "num_empty": sum(_count_local_elements(parameter) == 0 for parameter in parameters),
        "total_elements": sum(_count_elements(parameter) for parameter in parameters),
        "held_elements": sum(_count_shard_elements(parameter) for parameter in parameters),
        "trained_elements": sum(_count_elements(parameter) for parameter in trained),
        "stepped_elements": sum(_count_local_elements(parameter) for parameter in stepped),
        "loads_compiler": "torch._inductor.compile_fx" in sys.modules,
        "splits_gradients": bool(getattr(zero, "partition_gradients", False)),
    }


def _count_elements(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _count_shard_elements(parameter: Any) -> int:
    """Return the number of elements in the shard of this rank."""
    return int(parameter.ds_tensor.numel()) if hasattr(parameter, "ds_tensor") else _count_local_elements(parameter)


def _count_local_elements(parameter: Any) -> int:
    return int(parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel())


if __name__ == "__main__":
    vars(session)["Console"] = PlacementRecorder
    run_training()
