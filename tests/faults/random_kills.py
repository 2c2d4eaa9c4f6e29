"""Kill processes of a run at random moments, record the phase, and check what must hold afterwards."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from launcher.core.metrics import TRAIN_LOSS, StepMetrics, load_metrics
from launcher.core.run_paths import RunPaths
from launcher.render import Command
from launcher.runs.checkpoints import find_newest
from launcher.runs.record import load_outcome
from tests.conftest import TORTURE_VARIABLE
from tests.faults.fork_server import ForkServer, LaunchedProcesses
from tests.faults.phase_recording_train import PHASES, PHASES_VARIABLE, SAVE_SECONDS_VARIABLE, read_note, read_phase

IS_TORTURE = bool(os.environ.get(TORTURE_VARIABLE))
SEED_VARIABLE = "LAUNCHER_TORTURE_SEED"

# How much saving is slowed down, and the maximum delay between the start of a phase and the kill. If a save takes
# longer than a step, the run is saving nearly all the time: for the other phases, saving is not slowed down.
_SAVE_SECONDS = {"saving": "0.06", "ending": "0.06"}
_MAX_DELAY_SECONDS = {"starting": 2.5, "training": 0.8, "evaluating": 0.03, "saving": 0.7, "ending": 0.5}
_POLL_SECONDS = 0.004
_EXIT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    strategy: str
    victim: str
    aim: str
    phase: str
    save_stage: str
    newest: int  # step of the newest intact checkpoint afterwards

    def __str__(self) -> str:
        died_in = f"{self.phase} ({self.save_stage})" if self.save_stage else self.phase
        return f"{self.strategy:6} {self.victim:8} aimed at {self.aim:10} died in {died_in}; step {self.newest}"


@dataclass(kw_only=True)
class KillLog:
    seed: int = field(
        default_factory=lambda: int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().randrange(2**32))
    )
    is_torture: bool = IS_TORTURE
    kills: list[Kill] = field(default_factory=list)

    def add(self, kill: Kill) -> None:
        self.kills.append(kill)
        print(f"seed {self.seed}, kill {len(self.kills)}: {kill}", flush=True)

    def describe(self) -> str:
        strategies = sorted({kill.strategy for kill in self.kills})
        counts = Counter((kill.strategy, kill.phase) for kill in self.kills)
        lines = ["  ".join(["".ljust(10), *(phase.rjust(10) for phase in PHASES), "all".rjust(5)])]
        for name in (*strategies, "all"):
            of = [sum(counts[one, phase] for one in strategies if name in (one, "all")) for phase in PHASES]
            lines.append("  ".join([name.ljust(10), *(str(count).rjust(10) for count in of), str(sum(of)).rjust(5)]))
        victims = Counter(kill.victim for kill in self.kills)
        return "\n".join([*lines, "killed: " + ", ".join(f"{name} {count}" for name, count in sorted(victims.items()))])

    def list_kills(self) -> str:
        return "\n".join(f"{number}. {kill}" for number, kill in enumerate(self.kills, 1))


def kill_once(
    fork_server: ForkServer, command: Command, paths: RunPaths, strategy: str, aim: str, rng: random.Random
) -> Kill | None:
    """Start a run, kill one of its processes and wait until all have exited; None if it ended before the kill."""
    notes = paths.logs / "phases"
    shutil.rmtree(notes, ignore_errors=True)
    notes.mkdir()
    before = get_newest_step(paths)
    delay = rng.uniform(0, _MAX_DELAY_SECONDS[aim])
    more = {PHASES_VARIABLE: str(notes), SAVE_SECONDS_VARIABLE: _SAVE_SECONDS.get(aim, "0")}
    with fork_server.started(command, **more) as launched:
        while not _is_reached(notes, aim) and launched.poll() is None:
            time.sleep(_POLL_SECONDS)
        time.sleep(delay)
        pids = {"agent": launched.agent, **{f"rank {rank}": pid for rank, pid in launched.ranks.items()}}
        victim = rng.choice(sorted(pids))
        rank = int(victim.split()[-1]) if victim != "agent" else 0
        seen = read_phase(notes, rank)
        was_killed = _kill(launched, pids[victim])
        if victim == "rank 0":  # the writer of the notes is dead: its last note is the phase in which it died
            seen = read_phase(notes, rank)
        launched.wait(_EXIT_SECONDS)
    check_no_step_lost(paths, before, has_begun=read_note(notes, "rank-0") not in ("", "starting"))
    if not was_killed:
        return None
    phase, save_stage = seen
    newest = get_newest_step(paths)
    return Kill(strategy=strategy, victim=victim, aim=aim, phase=phase, save_stage=save_stage, newest=newest)


def _is_reached(notes: Path, aim: str) -> bool:
    return aim == "starting" or read_phase(notes, 0)[0] == aim


def _kill(launched: LaunchedProcesses, pid: int) -> bool:
    """Return whether the process was alive and died of this signal."""
    if pid not in launched.living:
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        launched.wait_until(lambda: pid not in launched.living, 10)
        if pid == launched.agent:
            launched.wait_until(lambda: launched.poll() is not None, 10)
            return launched.returncode == -signal.SIGKILL
        return True
    return False


def get_newest_step(paths: RunPaths) -> int:
    """Return the step of the newest checkpoint; none may be damaged, whichever process was killed."""
    checkpoint, damaged = find_newest(paths)
    assert not damaged
    return 0 if checkpoint is None else checkpoint.manifest.step


def check_no_step_lost(paths: RunPaths, before: int, *, has_begun: bool) -> None:
    """Check that the newest checkpoint is at most two steps older than the last recorded step."""
    newest = get_newest_step(paths)
    assert newest >= before
    assert newest >= max((row.step for row in load_step_rows(paths)), default=0) - 2
    outcome = load_outcome(paths.outcome)
    if has_begun:
        assert outcome is not None
        assert outcome.attempts[-1].from_step == before, "it resumed from the newest checkpoint"


def load_step_rows(paths: RunPaths) -> list[StepMetrics]:
    rows = load_metrics(paths.metrics) if paths.metrics.exists() else []
    return [row for row in rows if TRAIN_LOSS in row.values]
