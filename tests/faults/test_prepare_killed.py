"""`kill -9` in the middle of `launcher prepare`, again and again: the next call always finds or makes a whole store.

LAUNCHER_TORTURE=1 kills 50 times instead of 6. The phase of each kill is seen from outside, by the files there are.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.corpus.store import damage_of, find_store, make_key
from tests.unit.corpus.inputs import (
    command,
    environment,
    make_rows,
    prepare_quietly,
    read_files,
    wanted_of,
    write_base,
    write_expert,
    write_jsonl,
)

NUM_ROWS = 4000
NUM_KILLS = 50 if os.environ.get("LAUNCHER_TORTURE") else 6
# What is aimed at, in turn. A kill may come late: what counts is the phase that was seen last.
AIMS = ("start", "tokenising", "writing", "tokenising", "writing", "publishing")
MOST_DELAY_SECONDS = {"start": 0.6, "tokenising": 0.3, "writing": 0.03, "publishing": 0.0}
PHASES = tuple(MOST_DELAY_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Arena:
    folder: Path
    manifest: Path
    base: Path
    root: Path


@pytest.fixture
def arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Arena:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LAUNCHER_DATA_DIR", raising=False)
    write_jsonl(tmp_path / "train.jsonl", make_rows(NUM_ROWS))
    manifest = write_expert(tmp_path, evaluation_strategy="epoch", max_seq_length=512)
    base = write_base(tmp_path / "base")
    return Arena(folder=tmp_path, manifest=manifest, base=base, root=tmp_path / "datasets_optimized/neo4j")


def start(arena: Arena) -> subprocess.Popen[bytes]:
    arguments = ("prepare", str(arena.manifest), "--gpu", "rtx4090", "--base", str(arena.base), "--json")
    return subprocess.Popen(
        command(*arguments), cwd=arena.folder, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def see_phase(root: Path) -> str:
    """From the files alone. A folder that goes away while it is looked at was renamed: the store is there."""
    try:
        entries = sorted(os.listdir(root))  # noqa: PTH208  (a name is enough, and this is polled)
        if any(not name.startswith(".") for name in entries):
            return "done"
        making = next((root / name for name in entries if ".making-" in name), None)
        files = {entry.name: entry.stat().st_size for entry in os.scandir(making)} if making is not None else {}
    except FileNotFoundError:
        return "start" if not root.exists() else "done"
    if "store.json" in files:
        return "publishing"
    if any(name.endswith(".arrow") for name in files):
        return "writing"
    return "tokenising" if any(name.endswith(".ids") and size for name, size in files.items()) else "start"


def kill_in(arena: Arena, aim: str, dice: random.Random) -> str:
    """Waits for a phase, then a moment longer, then kills. The phase in which the process died."""
    process = start(arena)
    try:
        give_up = time.monotonic() + 60
        while (seen := see_phase(arena.root)) in PHASES[: PHASES.index(aim)]:
            assert process.poll() is None, f"it ended by itself, with {process.returncode}"
            assert time.monotonic() < give_up, f"never seen: {aim}"
        delay = dice.uniform(0, MOST_DELAY_SECONDS[aim])
        time.sleep(delay)
        phase = see_phase(arena.root) if delay else seen
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    return phase


def check_leftovers(root: Path) -> None:
    """One store, its lock, and the memory of hashes: nothing else."""
    hidden = {path.name for path in root.iterdir() if path.name.startswith(".")}
    [store] = [path.name for path in root.iterdir() if not path.name.startswith(".")]
    assert hidden == {f".{store}.lock", ".fingerprints.json", ".fingerprints.lock"}


def test_a_killed_preparation_leaves_nothing_that_loads(arena: Arena) -> None:
    wanted = wanted_of(arena.manifest, arena.base)
    undisturbed = prepare_quietly(wanted).store.folder
    expected = read_files(undisturbed)
    seed = random.SystemRandom().randrange(2**32)
    dice, phases = random.Random(seed), Counter[str]()
    while sum(phases[phase] for phase in PHASES) < NUM_KILLS:
        for file in arena.root.rglob("*"):
            if file.is_file():
                file.unlink()
        if undisturbed.is_dir():
            undisturbed.rmdir()
        aim = AIMS[sum(phases.values()) % len(AIMS)]
        phase = kill_in(arena, aim, dice)
        phases[phase] += 1
        print(f"kill {sum(phases.values())}: aimed at {aim}, died in {phase}")
        found = find_store(arena.root.relative_to(arena.folder), make_key(wanted.key_parts()))
        assert (found is not None) or damage_of(undisturbed) is not None
        assert found is None or phase in ("publishing", "done")
        again = prepare_quietly(wanted)
        assert again.was_there == (found is not None)
        assert read_files(undisturbed) == expected, f"seed {seed}, kill in {phase}"
        check_leftovers(arena.root)
    print(f"seed {seed}, phases: {dict(phases)}")
    assert phases["writing"] >= NUM_KILLS / 5, phases


def test_killed_while_another_waits(arena: Arena) -> None:
    """The lock goes with the process that held it: who waits takes over."""
    first = start(arena)
    while see_phase(arena.root) != "tokenising":
        assert first.poll() is None
    second = start(arena)
    time.sleep(0.05)
    first.kill()
    first.wait()
    assert second.wait(timeout=60) == 0
    wanted = wanted_of(arena.manifest, arena.base)
    assert prepare_quietly(wanted).was_there
    check_leftovers(arena.root)
