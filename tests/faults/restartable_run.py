"""Runs that tests stop and start again, and the bit-exact comparison of two runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from launcher.core import metrics
from launcher.core.metrics import load_metrics
from launcher.core.run_paths import RunPaths
from launcher.launch.resume import check_unchanged, plan_resumed, rewrite_run
from launcher.launch.start import ACCELERATE
from launcher.launch.write_run import write_run
from launcher.render import Command, render_command
from launcher.request.request import PlannedRun, Request, plan_request
from launcher.runs.record import load_outcome
from tests.conftest import ROOT
from tests.distributed.harness import Harness, TrainedRun, TrainingCase

PHASE_RECORDING_SCRIPT = str(ROOT / "tests/faults/phase_recording_train.py")
NUM_STEPS = 6
# Saves every step, evaluates every second step and loads the best checkpoint at the end. Dropout uses the RNG.
CONFIG = {
    "max_steps": NUM_STEPS,
    "save_steps": 1,
    "eval_steps": 2,
    "save_total_limit": 2,
    "dropout": 0.1,
    "load_best_model_at_end": True,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartableRun:
    """A run directory with its plan and the command that starts it."""

    planned: PlannedRun
    paths: RunPaths

    @property
    def command(self) -> Command:
        return self.make_command()

    def make_command(self, *flags: str) -> Command:
        """Render the launch command with additional flags of launcher/train.py."""
        plan, paths = self.planned.plan, self.paths
        return render_command(plan, paths, script=PHASE_RECORDING_SCRIPT, script_args=flags, accelerate=ACCELERATE)

    @property
    def trained(self) -> TrainedRun:
        return TrainedRun(self.paths)

    @property
    def is_done(self) -> bool:
        outcome = load_outcome(self.paths.outcome)
        return outcome is not None and outcome.status == "done"


def make_run(harness: Harness, case: TrainingCase) -> RestartableRun:
    planned, paths = harness.write(case)
    return RestartableRun(planned=planned, paths=paths)


def make_request(manifest: Path, strategy: str = "ddp", num_ranks: int = 2) -> Request:
    """Return the request that `launcher train` derives from make_flags()."""
    return Request(
        expert=str(manifest),
        profile="full",
        strategy=strategy,  # type: ignore[arg-type]
        cpu_ranks_per_node=num_ranks,
        cpu_cores_per_node=num_ranks,  # one thread per rank on every machine: the same summation order
    )


def make_flags(manifest: Path, strategy: str = "ddp", num_ranks: int = 2) -> tuple[str, ...]:
    ranks = ("--cpu-ranks", str(num_ranks), "--cores", str(num_ranks))
    return (str(manifest), "--profile", "full", "--strategy", strategy, *ranks)


def plan_run(harness: Harness, request: Request, run_id: str | None = None) -> RestartableRun:
    """Write a run as `launcher train` does, without starting it."""
    planned = plan_request(request)
    return RestartableRun(planned=planned, paths=write_run(planned, harness.runs, run_id))


def resume_run(
    harness: Harness, run: RestartableRun, request: Request, *, allow_changed_inputs: bool = False
) -> RestartableRun:
    """Rewrite a run as `launcher train --resume` does, without starting it."""
    resumed = plan_resumed(harness.runs, run.paths.run_id, request)
    if not allow_changed_inputs:
        check_unchanged(resumed)
    rewrite_run(resumed)
    return RestartableRun(planned=resumed.planned, paths=resumed.paths)


def launcher_train(harness: Harness, *flags: str) -> Command:
    """Return the command line that a user types."""
    argv = (sys.executable, "-m", "launcher", "train", *flags, "--runs-dir", str(harness.runs))
    return Command(argv=argv, environment={})


def check_same(trained: TrainedRun, uninterrupted: TrainedRun) -> None:
    """Compare weights, checkpoints and metrics bit for bit."""
    last = f"checkpoints/step-{uninterrupted.outcome.num_steps:06d}"
    for one in ("adapter", last):
        assert read_tensors(trained.paths.root / one) == read_tensors(uninterrupted.paths.root / one), one
    assert load_recorded_values(trained.paths) == load_recorded_values(uninterrupted.paths), (
        "each step is recorded once, with the same loss"
    )
    assert (trained.outcome.status, trained.outcome.exit_code) == ("done", 0)
    assert not find_partial_files(trained.paths)


def find_partial_files(paths: RunPaths) -> list[str]:
    return [str(file) for file in paths.root.rglob(".*") if file.name != ".lock"]


def read_tensors(folder: Path) -> dict[str, bytes]:
    found = {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}
    assert found
    return found


def load_recorded_values(paths: RunPaths) -> list[tuple[int, tuple[int, ...], dict[str, float]]]:
    """Return the recorded metrics of each step, without measured times."""
    names = (metrics.TRAIN_LOSS, metrics.GRAD_NORM, metrics.LEARNING_RATE, metrics.TOKENS_SEEN, metrics.EVAL_LOSS)
    rows = load_metrics(paths.metrics)
    return [(row.step, row.packs, {name: row.values[name] for name in names if name in row.values}) for row in rows]
