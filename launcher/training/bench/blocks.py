"""`python -m launcher.training.bench.blocks SPEC`: one side of a comparison, by the loop that trainings have.

It builds its model, says that it is ready, then trains a block of steps for every line on stdin. Each block begins at
the same sequences again, so that all blocks of all sides have the same work.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from launcher.bench.values import Ready, Said, SideSpec
from launcher.training.bench.telling import Tell, run_measuring


def measure_blocks(spec: SideSpec, tell: Tell) -> None:
    from launcher.training.bench.real_loop import build, time_block

    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        built = build(spec.plan, Path(spec.store), Path(folder))
        ready = Ready(seconds=time.perf_counter() - began, attention=built.attention, compiled=built.compiled)
        tell(Said(ready=ready))
        for _ in sys.stdin:
            tell(Said(timing=time_block(built.run, spec.warm_steps, spec.timed_steps)))


def main() -> int:
    spec = SideSpec.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    return run_measuring(lambda tell: measure_blocks(spec, tell))


if __name__ == "__main__":
    sys.exit(main())
