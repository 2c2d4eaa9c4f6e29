"""Resume of an existing run: plan its request again for the current hardware, and compare the settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.core.errors import InputError
from launcher.core.run_files import read_text
from launcher.core.run_paths import RunPaths, write_text_atomically
from launcher.launch.write_run import write_run_files
from launcher.manifest import find_manifest
from launcher.manifest.trust import list_code
from launcher.plan import load_plan
from launcher.plan.resume_identity import collect_learning_settings, find_changed_settings
from launcher.render import JobOptions, Rendezvous
from launcher.request.request import PlannedRun, Request, load_request, merge_requests, plan_request
from launcher.request.run_directory import find_run_to_resume
from launcher.runs.checkpoints import find_newest
from launcher.runs.record import load_outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumedRun:
    """A run to resume, with its new plan."""

    planned: PlannedRun
    paths: RunPaths

    @property
    def is_done(self) -> bool:
        """Whether the run has finished."""
        outcome = load_outcome(self.paths.outcome)
        return outcome is not None and outcome.status == "done"

    def list_code(self, expert: str, *, executes: bool) -> tuple[str, ...]:
        """Return what a user must trust: the manifest if it is not the expert's and, if it `executes`, the code in it.

        Without a manifest of another expert, a dry run needs no trust.
        """
        trained = self.planned.loaded.path
        is_other = find_manifest(expert).resolve() != trained.resolve()
        other = (f"the manifest {trained}, which request.json names instead of {expert}'s",) if is_other else ()
        return (*other, *(list_code(self.planned.loaded.manifest) if executes else ()))

    def describe(self) -> str:
        """Return a message that says from which checkpoint the run resumes, after a warning for each damaged one."""
        checkpoint, damaged = find_newest(self.paths)
        lines = [f"warning: {problem}" for problem in damaged]
        if checkpoint is None:
            lines.append(f"resuming {self.paths.root}: no checkpoint, starting at step 1")
        else:
            done, total = checkpoint.manifest.step, checkpoint.manifest.num_steps
            lines.append(f"resuming {self.paths.root}: step {done:,} of {total:,} is saved in {checkpoint.folder}")
        return "\n".join(lines)


def plan_resumed(runs_dir: Path, name: str, overrides: Request) -> ResumedRun:
    """Plan an existing run again, from its stored request and the flags of this command, which take precedence."""
    paths = find_run_to_resume(runs_dir, name, overrides.expert)
    planned = plan_request(merge_requests(load_request(paths.request), overrides))
    return ResumedRun(planned=planned, paths=paths)


def check_unchanged(resumed: ResumedRun) -> None:
    """Raise InputError if training settings have changed. The training itself compares data and base weights."""
    before = collect_learning_settings(load_plan(resumed.paths.plan))
    problems = find_changed_settings(before, collect_learning_settings(resumed.planned.plan))
    if problems:
        raise InputError(
            f"{resumed.paths.root}: the settings differ from those this run was trained with",
            problems,
            "undo the change, or train a new run; --allow-changed-inputs resumes anyway",
        )


def rewrite_run(
    resumed: ResumedRun,
    *,
    rendezvous: Rendezvous | None = None,
    job: JobOptions | None = None,
    script_args: Sequence[str] = (),
) -> None:
    """Write the files of the new plan; the replaced plan is kept in logs/."""
    paths, plan = resumed.paths, resumed.planned.plan
    before = read_text(paths.plan)
    if before != plan.model_dump_json(indent=2) + "\n":
        outcome = load_outcome(paths.outcome)
        number = 1 if outcome is None else max(1, len(outcome.attempts))
        write_text_atomically(paths.logs / f"plan-of-attempt-{number}.json", before)
    write_run_files(resumed.planned, paths, rendezvous=rendezvous, job=job, script_args=script_args)
