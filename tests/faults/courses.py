"""Runs that are started again and again, and when two of them are the same."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from launcher import metrics
from launcher.inputs import PlannedRun, Request, plan_request
from launcher.launch import ACCELERATE, write_run
from launcher.metrics import load_metrics
from launcher.paths import RunPaths
from launcher.record import load_outcome
from launcher.render import Command, render_command
from launcher.resume import check_drift, plan_resumed, rewrite_run
from tests.conftest import ROOT
from tests.distributed.bench import Bench, Cell, Trained

PHASED = str(ROOT / "tests/faults/phased_train.py")
NUM_STEPS = 6
# Every step is saved, every second one evaluated, and the best is what a run ends with. Dropout draws random numbers.
CONFIG = {
    "max_steps": NUM_STEPS,
    "save_steps": 1,
    "eval_steps": 2,
    "save_total_limit": 2,
    "dropout": 0.1,
    "load_best_model_at_end": True,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """A run and how to start it."""

    planned: PlannedRun
    paths: RunPaths

    @property
    def command(self) -> Command:
        return self.make_command()

    def make_command(self, *flags: str) -> Command:
        """With flags of launcher/train.py."""
        plan, paths = self.planned.plan, self.paths
        return render_command(plan, paths, script=PHASED, script_args=flags, accelerate=ACCELERATE)

    @property
    def trained(self) -> Trained:
        return Trained(self.paths)

    @property
    def is_done(self) -> bool:
        outcome = load_outcome(self.paths.outcome)
        return outcome is not None and outcome.status == "done"


def make_course(bench: Bench, cell: Cell) -> Course:
    planned, paths = bench.write(cell)
    return Course(planned=planned, paths=paths)


def make_request(manifest: Path, strategy: str = "ddp", num_ranks: int = 2) -> Request:
    """As the flags of `launcher train` would make it; see make_flags."""
    return Request(
        expert=str(manifest),
        profile="full",
        strategy=strategy,  # type: ignore[arg-type]
        cpu_ranks_per_node=num_ranks,
        cpu_cores_per_node=num_ranks,  # one thread a rank, whatever this machine has: sums come in the same order
    )


def make_flags(manifest: Path, strategy: str = "ddp", num_ranks: int = 2) -> tuple[str, ...]:
    ranks = ("--cpu-ranks", str(num_ranks), "--cores", str(num_ranks))
    return (str(manifest), "--profile", "full", "--strategy", strategy, *ranks)


def plan_course(bench: Bench, request: Request, run_id: str | None = None) -> Course:
    """As `launcher train` makes it, not yet started."""
    planned = plan_request(request)
    return Course(planned=planned, paths=write_run(planned, bench.runs, run_id))


def resume_course(bench: Bench, course: Course, request: Request, *, allow_drift: bool = False) -> Course:
    """As `launcher train --resume` does, not yet started."""
    resumed = plan_resumed(bench.runs, course.paths.run_id, request)
    if not allow_drift:
        check_drift(resumed)
    rewrite_run(resumed)
    return Course(planned=resumed.planned, paths=resumed.paths)


def launcher_train(bench: Bench, *flags: str) -> Command:
    """As a user types it."""
    argv = (sys.executable, "-m", "launcher", "train", *flags, "--runs-dir", str(bench.runs))
    return Command(argv=argv, environment={})


def check_same(trained: Trained, undisturbed: Trained) -> None:
    """What was trained, what one could go on from, and what was told: to the bit."""
    last = f"checkpoints/step-{undisturbed.outcome.num_steps:06d}"
    for one in ("adapter", last):
        assert read_tensors(trained.paths.root / one) == read_tensors(undisturbed.paths.root / one), one
    assert read_told(trained.paths) == read_told(undisturbed.paths), "each step once, each loss the same"
    assert (trained.outcome.status, trained.outcome.exit_code) == ("done", 0)
    assert not find_half_made(trained.paths)


def find_half_made(paths: RunPaths) -> list[str]:
    return [str(file) for file in paths.root.rglob(".*") if file.name != ".lock"]


def read_tensors(folder: Path) -> dict[str, bytes]:
    found = {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}
    assert found
    return found


def read_told(paths: RunPaths) -> list[tuple[int, tuple[int, ...], dict[str, float]]]:
    """All but what a clock measured."""
    names = (metrics.TRAIN_LOSS, metrics.GRAD_NORM, metrics.LEARNING_RATE, metrics.TOKENS_SEEN, metrics.EVAL_LOSS)
    rows = load_metrics(paths.metrics)
    return [(row.step, row.packs, {name: row.values[name] for name in names if name in row.values}) for row in rows]
