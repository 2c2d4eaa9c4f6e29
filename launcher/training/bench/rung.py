"""`python -m launcher.training.bench.rung SPEC`: one rung of the ladder, its timing as a line on stdout."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from launcher.bench.ladder import RungSpec
from launcher.bench.values import Said, Timing
from launcher.training.bench.telling import Tell, run_measuring


def measure_rung(spec: RungSpec, tell: Tell) -> None:
    tell(Said(timing=_time(spec)))


def _time(spec: RungSpec) -> Timing:
    if spec.setup is not None:
        from launcher.training.bench.rung_loop import time_rung

        return time_rung(spec, spec.setup)
    from launcher.training.bench.real_loop import build, time_block

    with tempfile.TemporaryDirectory() as folder:
        built = build(spec.plan, Path(spec.store), Path(folder))
        return time_block(built.run, spec.warm_steps, spec.timed_steps)


def main() -> int:
    spec = RungSpec.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    return run_measuring(lambda tell: measure_rung(spec, tell))


if __name__ == "__main__":
    sys.exit(main())
