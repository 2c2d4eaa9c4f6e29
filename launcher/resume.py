"""A run that exists, taken up again: asked for the same, planned for what is here now, compared before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.checkpoints import find_newest
from launcher.errors import InputError
from launcher.inputs import PlannedRun, Request, load_request, merge_requests, plan_request
from launcher.launch import fill_existing
from launcher.paths import RunPaths
from launcher.plan import load_plan
from launcher.plan.learning import find_drift, learning_values
from launcher.record import load_outcome
from launcher.render import Rendezvous, SlurmOptions
from launcher.runs import find_run_to_resume


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumedRun:
    planned: PlannedRun
    paths: RunPaths

    @property
    def is_done(self) -> bool:
        outcome = load_outcome(self.paths.outcome)
        return outcome is not None and outcome.status == "done"

    def describe(self) -> str:
        """Where it would begin. The training looks again, and says so."""
        checkpoint, damaged = find_newest(self.paths)
        lines = [f"warning: {one}" for one in damaged]
        if checkpoint is None:
            lines.append(f"resuming {self.paths.root}: it has no checkpoint, and begins at its first step")
        else:
            done, total = checkpoint.manifest.step, checkpoint.manifest.num_steps
            lines.append(f"resuming {self.paths.root}: step {done:,} of {total:,} is saved in {checkpoint.folder}")
        return "\n".join(lines)


def plan_resumed(runs_dir: Path, named: str, given: Request) -> ResumedRun:
    """The run's own request, with what is asked for now on top of it."""
    paths = find_run_to_resume(runs_dir, named, given.expert)
    planned = plan_request(merge_requests(load_request(paths.request), given))
    return ResumedRun(planned=planned, paths=paths)


def check_drift(resumed: ResumedRun) -> None:
    """What is learnt must be what was learnt so far. Data and base weights are compared by the training itself."""
    before = learning_values(load_plan(resumed.paths.plan))
    problems = find_drift(before, learning_values(resumed.planned.plan))
    if problems:
        raise InputError(
            f"{resumed.paths.root}: what is to be trained is not what this run has trained so far",
            problems,
            "undo the change, or train it as a new run; --allow-drift goes on all the same",
        )


def rewrite_run(
    resumed: ResumedRun,
    *,
    rendezvous: Rendezvous | None = None,
    slurm: SlurmOptions | None = None,
    script_args: Sequence[str] = (),
) -> None:
    """Files for what is here now. A plan that is replaced is kept among the logs."""
    paths, plan = resumed.paths, resumed.planned.plan
    before = paths.plan.read_text(encoding="utf-8")
    if before != plan.model_dump_json(indent=2) + "\n":
        outcome = load_outcome(paths.outcome)
        number = 1 if outcome is None else max(1, len(outcome.attempts))
        (paths.logs / f"plan-of-attempt-{number}.json").write_text(before, encoding="utf-8")
    fill_existing(resumed.planned, paths, rendezvous=rendezvous, slurm=slurm, script_args=script_args)
