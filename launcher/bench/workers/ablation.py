"""`python -m launcher.bench.workers.ablation SPEC`: measures one stage of an ablation."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from launcher.bench.ablation import StageSpec
from launcher.bench.workers.output import Send, run_worker


def measure_stage(spec: StageSpec, send: Send) -> None:
    """Measure an ablation stage in a plain training loop, or in the launcher's own loop if it has no LoopConfig."""
    from launcher.bench.workers.ablation_loop import time_stage
    from launcher.bench.workers.training_loop import build, time_block

    if spec.config is not None:
        send(time_stage(spec, spec.config))
        return
    with tempfile.TemporaryDirectory() as folder:
        run, _ = build(spec.plan, Path(spec.store), Path(folder))
        send(time_block(run, spec.warmup_steps, spec.timed_steps))


if __name__ == "__main__":
    sys.exit(run_worker(StageSpec, measure_stage))
