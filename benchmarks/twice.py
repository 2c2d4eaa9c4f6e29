"""Is a training the same twice, to the bit, and the same when it is killed on the way and taken up again?

Three trainings: two undisturbed, one ended by SIGKILL at half its length and resumed. Their adapters are compared byte
by byte, their losses by how far they are apart. One row for each attention backend.

    python benchmarks/twice.py --out twice.jsonl --attention varlen triton -- neo4j --profile full --random-weights
    python benchmarks/twice.py --out twice.jsonl --attention sdpa -- json --max-steps 6     # anywhere
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

from pieces import add_row  # type: ignore[import-not-found]  # beside this file

from launcher import metrics
from launcher.metrics import load_metrics
from launcher.paths import RunPaths

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 300.0  # seconds until a step that is waited for


def train(words: list[str], runs: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "launcher", "train", *words, "--wandb", "disabled", "--runs-dir", str(runs)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    log = (runs / "log.txt").open("ab")
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)


def train_whole(words: list[str], runs: Path, run_id: str) -> RunPaths:
    if code := train([*words, "--run-id", run_id], runs).wait():
        raise RuntimeError(f"exit code {code}: {(runs / 'log.txt').read_text()[-2000:]}")
    return RunPaths(runs / run_id)


def train_killed(words: list[str], runs: Path, run_id: str, step: int) -> RunPaths:
    """The launcher and all that it started, at once."""
    paths, process = RunPaths(runs / run_id), train([*words, "--run-id", run_id], runs)
    deadline = time.monotonic() + PATIENCE
    while len(losses_of(paths)) < step:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"step {step} never came: {(runs / 'log.txt').read_text()[-2000:]}")
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if code := train([*words[:1], "--resume", run_id], runs).wait():
        raise RuntimeError(f"resumed, exit code {code}: {(runs / 'log.txt').read_text()[-2000:]}")
    return paths


def losses_of(paths: RunPaths) -> dict[int, float]:
    """By step; one that was trained again counts as it was trained last."""
    if not paths.metrics.exists():
        return {}
    rows = (row for row in load_metrics(paths.metrics) if isinstance(row, metrics.StepMetrics))
    return {row.step: row.values[metrics.TRAIN_LOSS] for row in rows if metrics.TRAIN_LOSS in row.values}


def digest_of(paths: RunPaths) -> str:
    return hashlib.sha256((paths.adapter / "adapter_model.safetensors").read_bytes()).hexdigest()


def compare(words: list[str], attention: str, num_steps: int) -> dict[str, object]:
    words = [*words, "--max-steps", str(num_steps), "--set", f"training.config.attention={attention}"]
    words += ["--set", f"training.config.save_steps={max(1, num_steps // 4)}", "--set", "evaluation.task_rows=0"]
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        first, second = (train_whole(words, runs, name) for name in ("first", "second"))
        killed = train_killed(words, runs, "killed", num_steps // 2)
        apart = {}
        for name, other in (("again", second), ("killed", killed)):
            pairs = zip(losses_of(first).values(), losses_of(other).values(), strict=True)
            apart[name] = max(abs(one - two) for one, two in pairs)
        return {
            "attention": attention,
            "steps": num_steps,
            "same_bytes_again": digest_of(first) == digest_of(second),
            "same_bytes_killed": digest_of(first) == digest_of(killed),
            "losses_apart_again": apart["again"],
            "losses_apart_killed": apart["killed"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--attention", nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("train", nargs=argparse.REMAINDER, help="-- and what `launcher train` is given")
    args = parser.parse_args()
    for attention in args.attention:
        row = compare([word for word in args.train if word != "--"], attention, args.steps)
        print(row, flush=True)
        add_row(args.out, {"command": " ".join(args.train), **row})


if __name__ == "__main__":
    main()
