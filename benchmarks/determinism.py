"""Determinism: is a training bit-identical when repeated, and when killed and resumed?

Three trainings: two uninterrupted, one killed by SIGKILL half-way and resumed. Their adapters are compared byte by
byte, their losses by the largest difference. One row per attention backend.

    python benchmarks/determinism.py --out rows.jsonl --attention varlen triton -- neo4j --profile full --random-weights
    python benchmarks/determinism.py --out rows.jsonl --attention sdpa -- json --max-steps 6     # anywhere
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from child_environment import ROOT, make_environment  # type: ignore[import-not-found]  # in this folder
from resumable_cases import add_row  # type: ignore[import-not-found]  # in this folder

from launcher.core import metrics
from launcher.core.metrics import load_metrics
from launcher.core.run_paths import RunPaths

TIMEOUT_SECONDS = 300.0  # for reaching a step


def train(words: list[str], runs: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "launcher", "train", *words, "--wandb", "disabled", "--runs-dir", str(runs)]
    log = (runs / "log.txt").open("ab")
    return subprocess.Popen(command, cwd=ROOT, env=make_environment(), stdout=log, stderr=log, start_new_session=True)


def train_uninterrupted(words: list[str], runs: Path, run_id: str) -> RunPaths:
    if code := train([*words, "--run-id", run_id], runs).wait():
        raise RuntimeError(f"exit code {code}: {(runs / 'log.txt').read_text()[-2000:]}")
    return RunPaths(runs / run_id)


def train_killed(words: list[str], runs: Path, run_id: str, step: int) -> RunPaths:
    """Kill the launcher and all its children at a step, then resume."""
    paths, process = RunPaths(runs / run_id), train([*words, "--run-id", run_id], runs)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while len(load_losses(paths)) < step:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"step {step} was not reached: {(runs / 'log.txt').read_text()[-2000:]}")
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if code := train([*words[:1], "--resume", run_id], runs).wait():
        raise RuntimeError(f"resumed, exit code {code}: {(runs / 'log.txt').read_text()[-2000:]}")
    return paths


def load_losses(paths: RunPaths) -> dict[int, float]:
    """Return the losses by step; of a repeated step, the last."""
    if not paths.metrics.exists():
        return {}
    rows = (row for row in load_metrics(paths.metrics) if isinstance(row, metrics.StepMetrics))
    return {row.step: row.values[metrics.TRAIN_LOSS] for row in rows if metrics.TRAIN_LOSS in row.values}


def hash_adapter(paths: RunPaths) -> str:
    return hashlib.sha256((paths.adapter / "adapter_model.safetensors").read_bytes()).hexdigest()


def compare(words: list[str], attention: str, num_steps: int) -> dict[str, object]:
    words = [*words, "--max-steps", str(num_steps), "--set", f"training.config.attention={attention}"]
    words += ["--set", f"training.config.save_steps={max(1, num_steps // 4)}", "--set", "evaluation.task_rows=0"]
    for name in ("save_strategy", "evaluation_strategy"):
        words += ["--set", f"training.config.{name}=steps"]
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        first, second = (train_uninterrupted(words, runs, name) for name in ("first", "second"))
        killed = train_killed(words, runs, "killed", num_steps // 2)
        differences = {}
        for name, other in (("again", second), ("killed", killed)):
            pairs = zip(load_losses(first).values(), load_losses(other).values(), strict=True)
            differences[name] = max(abs(loss - other_loss) for loss, other_loss in pairs)
        return {
            "attention": attention,
            "steps": num_steps,
            "same_bytes_again": hash_adapter(first) == hash_adapter(second),
            "same_bytes_killed": hash_adapter(first) == hash_adapter(killed),
            "loss_difference_again": differences["again"],
            "loss_difference_killed": differences["killed"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--attention", nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("train", nargs=argparse.REMAINDER, help="-- and the arguments of `launcher train`")
    args = parser.parse_args()
    for attention in args.attention:
        row = compare([word for word in args.train if word != "--"], attention, args.steps)
        print(row, flush=True)
        add_row(args.out, {"command": " ".join(args.train), **row})


if __name__ == "__main__":
    main()
