"""A run and its starts: what died is started again from its last checkpoint, what ran out of memory one rung lower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.errors import ExitCode
from launcher.inputs import PlannedRun
from launcher.launch import fill_existing, start_run
from launcher.nodes import Node
from launcher.paths import RunPaths
from launcher.plan.ladder import take_rung
from launcher.plan.load import load_plan
from launcher.record import Outcome, load_outcome, write_outcome
from launcher.relay import Console

# What another start may mend: a lost rank, a hang, a driver's whim. Wrong input stays wrong.
_MAY_PASS = (ExitCode.RUN_FAILED, ExitCode.BUG)


@dataclass(frozen=True, kw_only=True, slots=True)
class StartOptions:
    nodes: Sequence[Node] = ()
    script_args: Sequence[str] = ()
    script: str | None = None  # in place of launcher/train.py
    max_restarts: int = 0  # by us, on one node; agents of many nodes restart their ranks themselves


def run_to_end(planned: PlannedRun, paths: RunPaths, console: Console, options: StartOptions) -> Outcome:
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
        lower = None if options.nodes else _step_down(planned, paths, outcome)
        if lower is not None:
            planned = lower
            _say(console, f"starting again one rung lower: {planned.plan.decisions[-1].value}")
        elif not options.nodes and outcome.exit_code in _MAY_PASS and restarts < options.max_restarts:
            restarts += 1
            _say(console, f"starting again from the last checkpoint ({restarts} of {options.max_restarts} restarts)")
        else:
            return outcome


def _step_down(planned: PlannedRun, paths: RunPaths, outcome: Outcome) -> PlannedRun | None:
    """The training may have gone down some rungs by itself: its plan is the one on disk."""
    if outcome.exit_code != ExitCode.DOES_NOT_FIT:
        return None
    current = load_plan(paths.plan)
    lower = take_rung(current)
    if lower is None:
        return None
    next_run = replace(planned, plan=lower)
    fill_existing(next_run, paths)
    known = load_outcome(paths.outcome)
    if known is not None:
        write_outcome(paths.outcome, known.model_copy(update={"rungs": (*known.rungs, lower.decisions[-1].value)}))
    return next_run


def _say(console: Console, text: str) -> None:
    console.stderr.write(f"{text}\n".encode())
    console.stderr.flush()
