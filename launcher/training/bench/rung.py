"""`python -m launcher.training.bench.rung SPEC`: one rung of the ladder, its timing as a line on stdout.

It reads its libraries at once, and measures behind a line on stdin: until then another rung may be measured.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from launcher.bench.ladder import RungSpec
from launcher.bench.values import Said, Timing
from launcher.training.bench.telling import Tell, run_measuring


def measure_rung(spec: RungSpec, tell: Tell) -> None:
    from launcher.training.bench import real_loop, rung_loop  # noqa: F401

    if sys.stdin.readline():  # none: whoever started it is gone
        tell(Said(timing=_time(spec)))


def _time(spec: RungSpec) -> Timing:
    from launcher.training.bench.real_loop import build, time_block
    from launcher.training.bench.rung_loop import time_rung

    if spec.setup is not None:
        return time_rung(spec, spec.setup)
    with tempfile.TemporaryDirectory() as folder:
        built = build(spec.plan, Path(spec.store), Path(folder))
        return time_block(built.run, spec.warm_steps, spec.timed_steps)


def main() -> int:
    spec = RungSpec.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    return run_measuring(lambda tell: measure_rung(spec, tell))


if __name__ == "__main__":
    sys.exit(main())
