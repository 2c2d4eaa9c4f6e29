"""Damaged run directories through every verb that reads them."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
import signal
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from launcher.cli.main import main
from launcher.core.errors import LauncherError
from launcher.core.run_paths import RunPaths
from launcher.launch.resume import check_unchanged, plan_resumed
from launcher.request.request import Request, format_request
from launcher.request.run_directory import find_run_to_resume
from launcher.runs.checkpoints import BestState, CheckpointManifest, hash_file
from launcher.training.inference.trained_run import load_trained_run
from tests.conftest import ROOT
from tests.fuzz.mutate import mutate_text, remove, replace_file
from tests.made_runs import MadeRun, write_run

LIMIT_SECONDS = 60  # a shared machine may be slow
CODES = {0, 2, 3, 4, 5, 6, 7, 75, 130}  # documented, without 1: a bug
EXPERT = ROOT / "experts/neo4j/manifest.json"


class TooSlowError(Exception):
    """A case that took longer than the limit."""


@contextlib.contextmanager
def time_limit(seconds: int = LIMIT_SECONDS) -> Iterator[None]:
    """Raise TooSlowError in the main thread after half the limit of processor time, or ten limits of waiting."""
    began, limits = time.process_time(), 10

    def on_alarm(_number: int, _frame: FrameType | None) -> None:
        nonlocal limits
        limits -= 1
        if limits and time.process_time() - began < seconds / 2:
            signal.alarm(seconds)
            return
        raise TooSlowError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def make_runs(folder: Path) -> None:
    """Write two complete runs without a training: `good` stays as it is, `bad` is damaged."""
    for name in ("good", "bad"):
        made = MadeRun(run_id=name, num_steps=20, task_rates=(0.2, 0.7), task_rows=6)
        paths = write_run(folder, made)
        request = Request(expert=str(EXPERT), max_steps=20, gpu="rtx4090", gpus_per_node=1)
        paths.request.write_text(format_request(request), encoding="utf-8")
        shutil.copyfile(EXPERT, paths.manifest)
        shutil.copyfile(paths.evaluation_at(20), paths.evaluation)
        paths.command.write_text("accelerate launch launcher/train.py --plan plan.json\n")
        paths.wandb.write_text('{"id": "a", "project": "p", "mode": "offline"}\n')
        (paths.root / ".lock").touch()
        paths.console_log.write_text("training\n")
        paths.adapter.mkdir()
        (paths.adapter / "adapter_config.json").write_text('{"r": 16, "target_modules": ["q_proj"]}\n')
        (paths.adapter / "adapter_model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
        write_checkpoint(paths, 20)


def write_checkpoint(paths: RunPaths, step: int) -> None:
    folder = paths.checkpoint(step)
    folder.mkdir(parents=True)
    for name in ("adapter_model", "optimizer", "random"):
        (folder / f"{name}.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    manifest = CheckpointManifest(
        step=step,
        num_steps=step,
        chain="c",
        data_key="a" * 64,
        base="b",
        learning={},
        schedule_steps=step,
        scaler={},
        best=BestState(step=None, value=None, worse_in_a_row=0),
        owes_evaluation=False,
        strategy="single",
        num_ranks=1,
        launcher_version="0",
        saved_at="2026-11-15T10:00:00+00:00",
        files={file.name: hash_file(file) for file in sorted(folder.iterdir())},
    )
    (folder / "checkpoint.json").write_text(manifest.model_dump_json(indent=2) + "\n")


class RunDirectoryFuzzer:
    """Damages files of one run and calls a verb."""

    name = "run directory"

    def __init__(self, folder: Path) -> None:
        self._runs, self._clean = folder / "runs", folder / "clean"
        make_runs(self._clean)
        self._files = sorted(
            file.relative_to(self._clean / "bad") for file in (self._clean / "bad").rglob("*") if file.is_file()
        )
        shutil.copytree(self._clean, self._runs)

    def run_case(self, rng: random.Random) -> str:
        """Damage files and call a verb; return what is wrong, empty if nothing is."""
        remove(self._runs / "bad")
        shutil.copytree(self._clean / "bad", self._runs / "bad")
        damaged = [self._damage(rng) for _ in range(rng.choice((1, 1, 1, 2, 4)))]
        verb = rng.choice(sorted(self._verbs()))
        problem = self._call(verb)
        return f"{verb} after {', '.join(damaged)}: {problem}" if problem else ""

    def _damage(self, rng: random.Random) -> str:
        favourites = [Path(name) for name in ("plan.json", "outcome.json", "metrics.jsonl")]
        relative = rng.choice(favourites if rng.random() < 0.6 else self._files)
        file = self._runs / "bad" / relative
        if rng.random() < 0.25 or not file.is_file() or file.is_symlink():
            replace_file(file, rng)
        elif file.suffix in (".json", ".jsonl"):
            file.write_bytes(mutate_text((self._clean / "bad" / relative).read_text(), rng))
        else:
            file.write_bytes(rng.randbytes(rng.randrange(200)))
        return str(relative)

    def _verbs(self) -> dict[str, list[str]]:
        here = ["--runs-dir", str(self._runs)]
        return {
            "compare": ["compare", "good", "bad", *here, "-o", str(self._runs / "page.html")],
            "compare --all": ["compare", "--all", *here, "-o", str(self._runs / "page.html")],
            "compare md": ["compare", "--all", *here, "--format", "md"],
            "compare json": ["compare", "bad", *here, "--json"],
            "compare text": ["compare", "bad", *here, "--format", "text"],
            "report": ["report", "bad", *here, "--write"],
            "report json": ["report", "bad", *here, "--json"],
            "doctor": ["doctor", "--run", "bad", *here, "--quick"],
            "resume": [],
            "trained": [],
        }

    def _call(self, verb: str) -> str:
        output = io.StringIO()
        try:
            with time_limit(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                if verb == "resume":
                    self._resume()
                elif verb == "trained":
                    with contextlib.suppress(LauncherError):
                        load_trained_run(self._runs / "bad")
                elif (code := main(self._verbs()[verb])) not in CODES:
                    return f"exit code {code}"
                if verb.startswith("compare -") or verb == "compare md":
                    assert code == 0, f"--all is spoilt: {output.getvalue()[-300:]}"
        except Exception:
            return traceback.format_exc()[-2500:]
        return "a traceback" if "Traceback" in output.getvalue() else ""

    def _resume(self) -> None:
        """Do what `launcher train --resume` does before it starts a process."""
        with contextlib.suppress(LauncherError):
            resumed = plan_resumed(self._runs, "bad", Request(expert=str(EXPERT)))
            resumed.describe()
            check_unchanged(resumed)
            _ = resumed.is_done
        with contextlib.suppress(LauncherError):
            find_run_to_resume(self._runs, "", str(EXPERT))
