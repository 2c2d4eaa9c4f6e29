"""The part of `launcher train` after planning: start a run and restart it. Its argument is a pickled StartedRun."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass
from pathlib import Path

from launcher.core.log import configure
from launcher.core.run_paths import RunPaths
from launcher.launch.console import Console
from launcher.launch.restart import StartOptions, run_with_restarts
from launcher.request.request import PlannedRun

SCRIPT = __file__


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedRun:
    planned: PlannedRun
    paths: RunPaths
    options: StartOptions


def main() -> int:
    run: StartedRun = pickle.loads(Path(sys.argv[1]).read_bytes())
    configure()
    console = Console(stdout=sys.stdout.buffer, stderr=sys.stderr.buffer)
    outcome = run_with_restarts(run.planned, run.paths, console, run.options)
    return outcome.exit_code or 0


if __name__ == "__main__":
    sys.exit(main())
