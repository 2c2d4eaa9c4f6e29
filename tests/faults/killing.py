"""Kills at random moments, each with the phase in which it came, and what must hold behind it."""

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

from launcher.checkpoints import find_newest
from launcher.metrics import TRAIN_LOSS, StepMetrics, load_metrics
from launcher.paths import RunPaths
from launcher.record import load_outcome
from launcher.render import Command
from tests.conftest import TORTURE_VARIABLE
from tests.faults.phased_train import PHASES, PHASES_VARIABLE, SAVE_SECONDS_VARIABLE, read_note, read_phase
from tests.faults.warm import Launched, Warm

IS_TORTURE = bool(os.environ.get(TORTURE_VARIABLE))
SEED_VARIABLE = "LAUNCHER_TORTURE_SEED"

# How long saving is drawn out, and how long behind the first sight of a phase the kill may come. Where a save takes
# longer than a step, nearly all of a training is saving: other phases are met only where it does not.
_PIECE_SECONDS = {"saving": "0.06", "ending": "0.06"}
_MOST_DELAY_SECONDS = {"starting": 2.5, "training": 0.8, "evaluating": 0.03, "saving": 0.7, "ending": 0.5}
_LOOK_EVERY_SECONDS = 0.004
_ALL_GONE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    strategy: str
    victim: str
    aim: str
    phase: str
    piece: str
    newest: int  # step of the newest whole checkpoint behind it

    def __str__(self) -> str:
        piece = f" ({self.piece})" if self.piece else ""
        return (
            f"{self.strategy:6} {self.victim:8} aimed at {self.aim:10} died in {self.phase}{piece}; step {self.newest}"
        )


@dataclass(kw_only=True)
class Tally:
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
    warm: Warm, command: Command, paths: RunPaths, strategy: str, aim: str, dice: random.Random
) -> Kill | None:
    """Starts a run, kills one of its processes, waits until all are gone. None: it ended before the kill came."""
    notes = paths.logs / "phases"
    shutil.rmtree(notes, ignore_errors=True)
    notes.mkdir()
    before = newest_step(paths)
    delay = dice.uniform(0, _MOST_DELAY_SECONDS[aim])
    more = {PHASES_VARIABLE: str(notes), SAVE_SECONDS_VARIABLE: _PIECE_SECONDS.get(aim, "0")}
    with warm.started(command, **more) as launched:
        while not _is_reached(notes, aim) and launched.poll() is None:
            time.sleep(_LOOK_EVERY_SECONDS)
        time.sleep(delay)
        pids = {"agent": launched.agent, **{f"rank {rank}": pid for rank, pid in launched.ranks.items()}}
        victim = dice.choice(sorted(pids))
        rank = int(victim.split()[-1]) if victim != "agent" else 0
        seen = read_phase(notes, rank)
        was_killed = _kill(launched, pids[victim])
        if victim == "rank 0":  # who writes these notes is dead: they tell what it was about
            seen = read_phase(notes, rank)
        launched.wait(_ALL_GONE_SECONDS)
    check_nothing_lost(paths, before, has_begun=read_note(notes, "rank-0") not in ("", "starting"))
    if not was_killed:
        return None
    phase, piece = seen
    newest = newest_step(paths)
    return Kill(strategy=strategy, victim=victim, aim=aim, phase=phase, piece=piece, newest=newest)


def _is_reached(notes: Path, aim: str) -> bool:
    return aim == "starting" or read_phase(notes, 0)[0] == aim


def _kill(launched: Launched, pid: int) -> bool:
    """Whether it was there to be killed, and died of it."""
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


def newest_step(paths: RunPaths) -> int:
    """A folder that has a checkpoint's name is whole, whatever was killed."""
    checkpoint, damaged = find_newest(paths)
    assert not damaged
    return 0 if checkpoint is None else checkpoint.manifest.step


def check_nothing_lost(paths: RunPaths, before: int, *, has_begun: bool) -> None:
    """Where every step is saved: of a step that is told, the last but one is on the disk."""
    newest = newest_step(paths)
    assert newest >= before
    assert newest >= max((row.step for row in step_rows(paths)), default=0) - 2
    outcome = load_outcome(paths.outcome)
    if has_begun:
        assert outcome is not None
        assert outcome.attempts[-1].from_step == before, "it began at the newest checkpoint"


def step_rows(paths: RunPaths) -> list[StepMetrics]:
    rows = load_metrics(paths.metrics) if paths.metrics.exists() else []
    return [row for row in rows if TRAIN_LOSS in row.values]
