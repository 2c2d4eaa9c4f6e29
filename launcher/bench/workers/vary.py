"""`python -m launcher.bench.workers.vary SPEC`: measures one variant of an A/B test with the training's own loop.

It builds its model, reports that it is ready, then trains one block of steps per line on stdin. Each block starts at
the same sequences, so that all blocks of all variants do the same work.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from launcher.bench.ab_test import Ready, VariantSpec
from launcher.bench.workers.output import Send, run_worker


def measure_blocks(spec: VariantSpec, send: Send) -> None:
    """Build the model once, then time one block of steps for each line read from stdin."""
    from launcher.bench.workers.training_loop import build, time_block

    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        run, compiled = build(spec.plan, Path(spec.store), Path(folder))
        seconds = time.perf_counter() - began
        send(Ready(seconds=seconds, attention=run.plan.attention.backend, compiled=compiled))
        for _ in sys.stdin:
            send(time_block(run, spec.warmup_steps, spec.timed_steps))


if __name__ == "__main__":
    sys.exit(run_worker(VariantSpec, measure_blocks))
