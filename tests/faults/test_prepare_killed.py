"""`kill -9` during `launcher prepare`, many times: the next call always finds or writes a complete store.

LAUNCHER_TORTURE=1 kills 50 times instead of 6. The phase of each kill is derived from the files on disk.
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

from launcher.corpus.store import find_damage, find_store, make_key
from tests.unit.corpus.inputs import (
    command,
    environment,
    make_rows,
    make_spec,
    prepare_quietly,
    read_files,
    write_base,
    write_expert,
    write_jsonl,
)

NUM_ROWS = 4000
NUM_KILLS = 50 if os.environ.get("LAUNCHER_TORTURE") else 6
# Phases to kill in, in turn. A kill may come late: the phase detected last counts.
AIMS = ("start", "tokenising", "writing", "tokenising", "writing", "publishing")
MAX_DELAY_SECONDS = {"start": 0.6, "tokenising": 0.3, "writing": 0.03, "publishing": 0.0}
PHASES = tuple(MAX_DELAY_SECONDS)


@dataclass(frozen=True, kw_only=True)
class PrepareProject:
    folder: Path
    manifest: Path
    base: Path
    root: Path


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PrepareProject:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LAUNCHER_DATA_DIR", raising=False)
    write_jsonl(tmp_path / "train.jsonl", make_rows(NUM_ROWS))
    manifest = write_expert(tmp_path, evaluation_strategy="epoch", max_seq_length=512)
    base = write_base(tmp_path / "base")
    return PrepareProject(folder=tmp_path, manifest=manifest, base=base, root=tmp_path / "datasets_optimized/neo4j")


def start(project: PrepareProject) -> subprocess.Popen[bytes]:
    arguments = ("prepare", str(project.manifest), "--gpu", "rtx4090", "--base", str(project.base), "--json")
    return subprocess.Popen(
        command(*arguments), cwd=project.folder, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def detect_phase(root: Path) -> str:
    """Return the phase, derived from the files. A folder that disappears meanwhile was renamed: the store is there."""
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


def kill_in_phase(project: PrepareProject, aim: str, rng: random.Random) -> str:
    """Wait for a phase and a random delay, then kill; return the phase in which the process died."""
    process = start(project)
    try:
        give_up = time.monotonic() + 60
        while (seen := detect_phase(project.root)) in PHASES[: PHASES.index(aim)]:
            assert process.poll() is None, f"it exited by itself with {process.returncode}"
            assert time.monotonic() < give_up, f"phase not reached: {aim}"
        delay = rng.uniform(0, MAX_DELAY_SECONDS[aim])
        time.sleep(delay)
        phase = detect_phase(project.root) if delay else seen
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    return phase


def check_leftovers(root: Path) -> None:
    """Check that only one store, its lock and the cached hashes are left."""
    hidden = {path.name for path in root.iterdir() if path.name.startswith(".")}
    [store] = [path.name for path in root.iterdir() if not path.name.startswith(".")]
    assert hidden == {f".{store}.lock", ".fingerprints.json", ".fingerprints.lock"}


@pytest.mark.slow  # `make torture` runs it, too
def test_killed_prepare_leaves_no_loadable_partial_store(project: PrepareProject) -> None:
    spec = make_spec(project.manifest, project.base)
    uninterrupted = prepare_quietly(spec).store.folder
    expected = read_files(uninterrupted)
    seed = random.SystemRandom().randrange(2**32)
    rng, phases = random.Random(seed), Counter[str]()
    while sum(phases[phase] for phase in PHASES) < NUM_KILLS:
        for file in project.root.rglob("*"):
            if file.is_file():
                file.unlink()
        if uninterrupted.is_dir():
            uninterrupted.rmdir()
        aim = AIMS[sum(phases.values()) % len(AIMS)]
        phase = kill_in_phase(project, aim, rng)
        phases[phase] += 1
        print(f"kill {sum(phases.values())}: aimed at {aim}, died in {phase}")
        found = find_store(project.root.relative_to(project.folder), make_key(spec.key_parts()))
        assert (found is not None) or find_damage(uninterrupted) is not None
        assert found is None or phase in ("publishing", "done")
        again = prepare_quietly(spec)
        assert again.was_cached == (found is not None)
        assert read_files(uninterrupted) == expected, f"seed {seed}, kill in {phase}"
        check_leftovers(project.root)
    print(f"seed {seed}, phases: {dict(phases)}")
    assert phases["writing"] >= NUM_KILLS / 5, phases


def test_waiting_prepare_takes_over_from_a_killed_one(project: PrepareProject) -> None:
    """The lock is released with the process that held it."""
    first = start(project)
    while detect_phase(project.root) != "tokenising":
        assert first.poll() is None
        time.sleep(0.002)
    second = start(project)
    time.sleep(0.05)
    first.kill()
    first.wait()
    assert second.wait(timeout=60) == 0
    spec = make_spec(project.manifest, project.base)
    assert prepare_quietly(spec).was_cached
    check_leftovers(project.root)
