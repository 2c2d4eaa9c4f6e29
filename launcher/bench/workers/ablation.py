"""`python -m launcher.bench.workers.ablation SPEC`: measures one stage of an ablation.

It imports its libraries at once, and waits for a line on stdin before it measures: another stage may be running.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from launcher.bench.ablation import StageSpec
from launcher.bench.messages import Reply, Timing
from launcher.bench.workers.output import Send, run_worker


def measure_stage(spec: StageSpec, send: Send) -> None:
    """Measure after a line on stdin; its end means that the parent is gone."""
    from launcher.bench.workers.ablation_loop import time_stage
    from launcher.bench.workers.training_loop import build, time_block

    def measure() -> Timing:
        if spec.config is not None:
            return time_stage(spec, spec.config)
        with tempfile.TemporaryDirectory() as folder:
            built = build(spec.plan, Path(spec.store), Path(folder))
            return time_block(built.run, spec.warmup_steps, spec.timed_steps)

    if sys.stdin.readline():
        send(Reply(timing=measure()))


if __name__ == "__main__":
    sys.exit(run_worker(StageSpec, measure_stage))
