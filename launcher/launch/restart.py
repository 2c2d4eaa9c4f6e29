"""Restarts of a run: after a crash from its last checkpoint, after CUDA out of memory with the next OOM fallback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.core.errors import ExitCode
from launcher.core.run_paths import RunPaths
from launcher.launch.console import Console
from launcher.launch.nodes import Node
from launcher.launch.start import start_run
from launcher.launch.write_run import write_run_files
from launcher.plan.model import load_plan
from launcher.plan.oom_fallbacks import apply_next_fallback
from launcher.request.request import PlannedRun
from launcher.runs.record import Outcome, load_outcome, write_outcome

# What a restart may fix: a lost rank, a hang, a driver error. Wrong input stays wrong.
_TRANSIENT = (ExitCode.RUN_FAILED, ExitCode.BUG)


@dataclass(frozen=True, kw_only=True, slots=True)
class StartOptions:
    """Options for starting a run that are not part of its plan."""

    nodes: Sequence[Node] = ()
    script_args: Sequence[str] = ()
    script: str | None = None  # in place of launcher/train.py
    max_restarts: int = 0  # on a single node; agents of several nodes restart their ranks themselves


def run_with_restarts(planned: PlannedRun, paths: RunPaths, console: Console, options: StartOptions) -> Outcome:
    """Start a run, restart it after a crash or after CUDA out of memory, and return its last outcome."""
    restarts = 0
    while True:
        outcome = start_run(
            planned.plan,
            paths,
            console,
            nodes=options.nodes,
            script=options.script,
            script_args=options.script_args,
        )
        fallback = None if options.nodes else _apply_fallback(planned, paths, outcome)
        if fallback is not None:
            planned = fallback
            _log(console, f"restarting with the next OOM fallback: {planned.plan.decisions[-1].value}")
        elif not options.nodes and outcome.exit_code in _TRANSIENT and restarts < options.max_restarts:
            restarts += 1
            _log(console, f"restarting from the last checkpoint (restart {restarts} of {options.max_restarts})")
        else:
            return outcome


def _apply_fallback(planned: PlannedRun, paths: RunPaths, outcome: Outcome) -> PlannedRun | None:
    """Return the run with one more OOM fallback in its stored plan; None if memory sufficed or no fallback is left."""
    if outcome.exit_code != ExitCode.DOES_NOT_FIT:
        return None
    plan = apply_next_fallback(load_plan(paths.plan))
    if plan is None:
        return None
    next_run = replace(planned, plan=plan)
    write_run_files(next_run, paths)
    known = load_outcome(paths.outcome)
    if known is not None:
        fallbacks = (*known.oom_fallbacks, plan.decisions[-1].value)
        write_outcome(paths.outcome, known.model_copy(update={"oom_fallbacks": fallbacks}))
    return next_run


def _log(console: Console, text: str) -> None:
    """Write a line to the stream that receives the stderr of the training."""
    console.stderr.write(f"{text}\n".encode())
    console.stderr.flush()
